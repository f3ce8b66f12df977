/* The table of contents at the side shows the story, whose chapters have numbers, and the group of the page that is open;
   other groups are folded. It begins at this page. */
document.addEventListener("DOMContentLoaded", () => {
  const side = document.querySelector(".bd-sidebar-primary");
  for (const caption of side?.querySelectorAll("p.caption") ?? []) {
    const pages = caption.nextElementSibling;
    if (/^\s*\d/.test(pages.textContent)) continue;
    const group = document.createElement("details");
    group.className = "group";
    group.open = pages.matches(".current") || pages.querySelector(".current") !== null;
    const summary = document.createElement("summary");
    caption.before(group);
    summary.append(caption);
    group.append(summary, pages);
  }
  const here = side?.querySelector(".current.active > a");
  if (here) side.scrollTop += here.getBoundingClientRect().top - side.getBoundingClientRect().top - side.clientHeight / 2;
});
