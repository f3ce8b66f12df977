/* The tokens that reach the last one through layers of a pattern. Without this script the page has the table of shares;
   with it a pattern and a number of layers can be chosen, and the tokens are shown one by one. */
(() => {
  "use strict";

  function labelled(text, control) {
    const label = document.createElement("label");
    label.append(`${text} `, control);
    return label;
  }

  function start(box) {
    const needed = JSON.parse(box.dataset.layers);
    const rows = [...box.querySelectorAll("tbody tr")];
    const most = rows[0].cells.length - 1;

    const pattern = document.createElement("select");
    pattern.name = "pattern";
    pattern.append(...Object.keys(needed).map((name) => new Option(name, name)));
    const layers = document.createElement("input");
    Object.assign(layers, { type: "range", name: "layers", min: 1, max: most, value: 2 });
    const said = document.createElement("output");
    const controls = document.createElement("div");
    controls.className = "reach-controls";
    controls.append(labelled("Pattern", pattern), labelled("Layers", layers), said);

    const strip = document.createElement("div");
    strip.className = "reach-tokens";
    strip.setAttribute("role", "img");

    function show() {
      const at = needed[pattern.value];
      const count = Number(layers.value);
      const there = at.map((layer) => layer >= 0 && layer <= count);
      strip.replaceChildren(
        ...there.map((reached, token) => {
          const cell = document.createElement("span");
          if (reached) cell.className = token === at.length - 1 ? "reached last" : "reached";
          return cell;
        }),
      );
      const found = there.filter(Boolean).length;
      const text = `${found} of ${at.length} tokens after ${count} layer${count > 1 ? "s" : ""}`;
      said.textContent = text;
      strip.setAttribute("aria-label", `Tokens that reach the last one, on the right: ${text}`);
      rows.forEach((row) => {
        [...row.cells].forEach((cell, column) => {
          cell.classList.toggle("chosen", row.cells[0].textContent === pattern.value && column === count);
        });
      });
    }

    [pattern, layers].forEach((control) => control.addEventListener("input", show));
    box.prepend(controls, strip);
    show();
  }

  const all = () => document.querySelectorAll(".reach").forEach(start);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", all);
  else all();
})();
