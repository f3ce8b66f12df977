/* Steps through the writes of chapter 11: the table shows them up to the one chosen, and bars what each key is then
   answered by either memory. Without this script the table shows all of them. */
(() => {
  "use strict";

  const NAMES = { linear: "linear memory", delta: "delta rule" };

  function made(tag, text = "", attributes = {}) {
    const element = document.createElement(tag);
    element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  function number(value) {
    return String(Number(value.toPrecision(4))).replace("-", "−");
  }

  function bars(keys, figures, widest) {
    const table = made("table", "", { class: "bars" });
    table.append(made("caption", "What each key is answered, and its last value"));
    keys.forEach((key, i) => {
      for (const [memory, name] of Object.entries(NAMES)) {
        const row = made("tr");
        const value = figures[memory][i];
        const bar = made("span", "", { class: "bar", style: `width: ${(12 * Math.abs(value)) / widest}rem` });
        const cell = made("td");
        cell.append(bar, number(value));
        const wanted = figures.wanted[i] === null ? "none yet" : number(figures.wanted[i]);
        row.append(made("th", `${key}, ${name}`, { scope: "row" }), cell, made("td", `last value: ${wanted}`));
        table.append(row);
      }
    });
    return table;
  }

  function start() {
    for (const root of document.querySelectorAll(".delta-writes")) {
      const { keys, steps } = JSON.parse(root.dataset.figures);
      const rows = [...root.querySelectorAll("tbody tr")];
      const widest = Math.max(...steps.flatMap((step) => [...step.linear, ...step.delta].map(Math.abs)));
      const input = made("input", "", { type: "range", min: 1, max: steps.length, value: steps.length });
      const output = made("output");
      const label = made("label", "Writes so far: ");
      label.append(input, output);
      const controls = made("div", "", { class: "controls" });
      controls.append(label);
      const place = made("div");
      root.prepend(controls);
      root.append(place);
      const show = () => {
        const step = Number(input.value);
        output.textContent = step;
        rows.forEach((row, i) => {
          row.classList.toggle("now", i === step - 1);
          row.classList.toggle("later", i >= step);
        });
        place.replaceChildren(bars(keys, steps[step - 1], widest));
      };
      input.addEventListener("input", show);
      show();
    }
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
