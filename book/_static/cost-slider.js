// The slider over N/d in chapter 2: it moves between figures that Python has computed and put into the page.
"use strict";

const SCOPES = ["layer", "block"];

function costRows(at, variants) {
  return at.flatMap((costs, scope) => {
    const standard = costs[0][0] + costs[0][1];
    return costs.map(([forward, backward], variant) => {
      const total = forward + backward;
      const saved = variant ? `${(100 * (1 - total / standard)).toFixed(1)} %` : "–";
      const numbers = [forward, backward, total].map((value) => String(Number(value.toFixed(2))));
      return [variant ? "" : SCOPES[scope], variants[variant], ...numbers, saved];
    });
  });
}

function startSlider(root) {
  const { ratios, variants, costs } = JSON.parse(root.dataset.costs);
  const [range, choice, shown] = ["input", "select", "output"].map((name) => root.querySelector(name));
  const body = root.querySelector(".chosen tbody");
  const update = () => {
    const ratio = ratios[range.value];
    shown.textContent = ratio;
    range.setAttribute("aria-valuetext", `N/d = ${ratio}`);
    const rows = costRows(costs[choice.value][range.value], variants).map((cells) => {
      const row = document.createElement("tr");
      cells.forEach((text) => (row.insertCell().textContent = text));
      return row;
    });
    body.replaceChildren(...rows);
  };
  range.addEventListener("input", update);
  choice.addEventListener("change", update);
  update();
  root.querySelectorAll("[hidden]").forEach((part) => (part.hidden = false));
  root.classList.add("live");
}

document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".cost-slider").forEach(startSlider));
