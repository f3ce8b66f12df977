/* The table of contents at the side begins at the page that is open. */
document.addEventListener("DOMContentLoaded", () => {
  const side = document.querySelector(".bd-sidebar-primary");
  const here = side?.querySelector(".current.active > a");
  if (here) side.scrollTop += here.getBoundingClientRect().top - side.getBoundingClientRect().top - side.clientHeight / 2;
});
