/* The ledger's controls. Without this script the page is plain tables, one a document; with it their rows can be
   searched, filtered by document, verdict, severity and chapter, and sorted. What is chosen stands in the address, so that a
   choice can be linked: ledger.html?verdict=refuted. */
(() => {
  "use strict";

  const KEYS = ["document", "verdict", "severity", "chapter"];
  const ORDERS = { claim: "as in the documents", verdict: "by verdict", chapter: "by chapter" };

  function read(row) {
    const [name, evidence] = row.cells;
    const link = name.querySelector("a[href]");
    const id = (link ?? name).textContent.trim().split(/\s/)[0];
    const chapter = link ? decodeURIComponent(link.pathname.split("/").pop().replace(/\.html$/, "")) : "none yet";
    return {
      row,
      id,
      document: id.split(".")[0],
      verdict: name.querySelector("strong").textContent.trim(),
      severity: name.querySelector("em")?.textContent.trim() ?? "none",
      chapter,
      text: `${name.textContent} ${evidence.textContent}`.toLowerCase(),
    };
  }

  function title(chapter) {
    const link = document.querySelector(`nav a[href$="${chapter}.html"]`);
    return link ? link.textContent.trim() : chapter;
  }

  function labelled(text, control) {
    const label = document.createElement("label");
    label.append(`${text} `, control);
    return label;
  }

  function choice(name, options) {
    const select = document.createElement("select");
    select.name = name;
    select.append(...options.map(([value, text]) => new Option(text, value)));
    return select;
  }

  function start() {
    const tables = [...document.querySelectorAll(".tag_ledger table")];
    if (!tables.length) return;
    const bodies = tables.map((table) => table.tBodies[0]);
    const groups = bodies.map((body) => [...body.rows].map(read));
    const claims = groups.flat();

    const search = document.createElement("input");
    search.type = "search";
    search.name = "words";
    search.placeholder = "or an id: S0.4.1d";
    const selects = KEYS.map((key) => {
      const values = [...new Set(claims.map((claim) => claim[key]))].sort();
      const text = key === "chapter" ? title : String;
      return choice(key, [["", "all"], ...values.map((value) => [value, text(value)])]);
    });
    const order = choice("order", Object.entries(ORDERS));
    const controls = [search, ...selects, order];
    const status = document.createElement("output");
    const key = document.querySelector(".tag_ledger:not(:has(table))"); // away while somebody looks for something
    const form = document.createElement("form");
    form.className = "ledger-controls";
    form.setAttribute("role", "search");
    form.append(...controls.map((control) => labelled(control.name, control)), status);

    const chosen = new URLSearchParams(location.search);
    for (const control of controls) {
      const wanted = chosen.get(control.name);
      if (wanted === null) continue;
      const known = control === search || [...control.options].some((option) => option.value === wanted);
      if (known) control.value = wanted;
    }

    function show() {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const matches = (claim) =>
        words.every((word) => claim.text.includes(word)) &&
        selects.every((select) => !select.value || claim[select.name] === select.value);
      let count = 0;
      groups.forEach((group, i) => {
        const by = order.value;
        const sorted = by === "claim" ? group : [...group].sort((a, b) => a[by].localeCompare(b[by]));
        bodies[i].append(...sorted.map((claim) => claim.row));
        let visible = 0;
        for (const claim of group) {
          claim.row.hidden = !matches(claim);
          visible += !claim.row.hidden;
        }
        const section = tables[i].closest("section");
        section.hidden = visible === 0;
        for (const link of document.querySelectorAll(`.page-toc a[href="#${section.id}"]`)) {
          link.parentElement.hidden = section.hidden;
        }
        count += visible;
      });
      const only = count === 1 && claims.find((claim) => !claim.row.hidden);
      if (only) only.row.querySelector("details")?.setAttribute("open", ""); // who looks for one claim wants its evidence
      status.textContent = `${count} of ${claims.length} claims`;
      const told = controls.filter((control) => control.value && control.value !== "claim");
      const query = new URLSearchParams(told.map((control) => [control.name, control.value])).toString();
      if (key) key.hidden = told.length > 0;
      history.replaceState(null, "", `${location.pathname}${query && `?${query}`}${location.hash}`);
    }

    form.addEventListener("input", show);
    form.addEventListener("submit", (event) => event.preventDefault());
    (key ?? tables[0].closest("section")).before(form);
    show();
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
