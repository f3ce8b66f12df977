/* Solves the chunk of chapter 12 row by row: the row at hand, the errors that it uses, and what is still unknown.
   Without this script the table shows the solved system. */
(() => {
  "use strict";

  function start() {
    for (const root of document.querySelectorAll(".chunk-solve")) {
      const rows = [...root.querySelectorAll("tbody tr")];
      const controls = document.createElement("div");
      controls.className = "controls";
      const label = document.createElement("label");
      const input = document.createElement("input");
      Object.assign(input, { type: "range", min: 0, max: rows.length, value: rows.length });
      const output = document.createElement("output");
      label.append("Rows solved: ", input, output);
      controls.append(label);
      root.prepend(controls);
      const show = () => {
        const solved = Number(input.value);
        output.textContent = solved;
        rows.forEach((row, i) => {
          const now = i === solved - 1;
          row.classList.toggle("now", now);
          const cells = [...row.querySelectorAll("td")];
          cells.forEach((cell, j) => cell.classList.toggle("used", now && j < i && cell.textContent !== "0"));
          const used = rows[solved - 1]?.querySelectorAll("td")[i];
          const error = row.querySelector(".error");
          error.classList.toggle("known", i < solved - 1 && used.textContent !== "0");
          for (const cell of [error, row.querySelector(".how")]) cell.classList.toggle("later", i >= solved);
        });
      };
      input.addEventListener("input", show);
      show();
    }
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
