/* The calculator of the guide "Choose a mechanism": it shows what Python has computed for the sizes that a reader sets. */
(() => {
  "use strict";
  const MOST = 12; // rows

  function row(tag, texts) {
    const made = document.createElement("tr");
    for (const text of texts) {
      const cell = document.createElement(tag);
      cell.textContent = text;
      made.append(cell);
    }
    return made;
  }

  function start(root) {
    const { mechanisms, uses, costs } = JSON.parse(root.dataset.costs);
    const { N, d, use, causal, exact } = root.querySelector("form").elements;
    const [head, body] = ["thead", "tbody"].map((name) => root.querySelector(`.chosen ${name}`));
    const update = () => {
      causal.disabled = use.value === "decoding"; // one token at a time is causal
      if (causal.disabled) causal.checked = true;
      const all = costs[`${use.value} ${causal.checked} ${N.value} ${d.value}`];
      const softmax = all.find(([name]) => name === "softmax");
      const fitting = all.filter(([name]) => !exact.checked || mechanisms[name][1]);
      const shown = fitting.slice(0, MOST);
      if (!shown.includes(softmax)) shown.push(softmax);
      head.replaceChildren(row("th", ["mechanism", "family", ...uses[use.value], "of softmax", "exact"]));
      body.replaceChildren(
        ...shown.map(([name, work, memory]) => {
          const [family, isExact] = mechanisms[name];
          const share = `${Number(((100 * work) / softmax[1]).toPrecision(3))} %`;
          const figures = [work, memory].map((figure) => figure.toLocaleString("en", { maximumSignificantDigits: 15 }));
          return row("td", [name, family, ...figures, share, isExact ? "yes" : "no"]);
        }),
      );
      const place = fitting.indexOf(softmax) + 1;
      root.querySelector("output").textContent =
        `${fitting.length} mechanisms fit; softmax attention is number ${place} by work.`;
    };
    root.addEventListener("change", update);
    root.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
    update();
    root.querySelectorAll("[hidden]").forEach((part) => (part.hidden = false));
    root.classList.add("live");
  }

  document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".calculator").forEach(start));
})();
