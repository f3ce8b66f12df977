/* What a reader can set on a page: a function for each interactive, by the class of its element. It makes the controls
   that the page does not have, and returns what shows the figures for their present values. All figures are Python's,
   put into the page; without this script there are tables that say the same. */
(() => {
  "use strict";

  const SCOPES = ["layer", "block"];
  const MEMORIES = { linear: "linear memory", delta: "delta rule" };

  function made(tag, attributes, ...inside) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...inside);
    return element;
  }

  function tableRow(tag, texts) {
    return made("tr", {}, ...texts.map((text) => made(tag, {}, text)));
  }

  /* A range under a label: both of them. */
  function ranged(words, attributes) {
    const input = made("input", { type: "range", ...attributes });
    return [made("label", {}, words, input), input];
  }

  /* A range over the rows of a table, with its value beside it, from `data-start` or the last row; `show` gets the value and the rows. */
  function stepper(root, words, min, show) {
    const rows = [...root.querySelectorAll("tbody tr")];
    const [label, input] = ranged(words, { min, max: rows.length, value: root.dataset.start ?? rows.length });
    const output = made("output", {});
    label.append(output);
    root.prepend(made("div", { class: "controls" }, label));
    return () => {
      const step = Number(input.value);
      output.textContent = step;
      rows.forEach((row, i) => row.classList.toggle("now", i === step - 1));
      show(step, rows);
    };
  }

  // Chapter 2: costs over N/d.

  function costRows(at, variants) {
    return at.flatMap((costs, scope) => {
      const standard = costs[0][0] + costs[0][1];
      return costs.map(([forward, backward], variant) => {
        const total = forward + backward;
        const gains = [standard / total - 1, 1 - total / standard]; // faster by, share saved
        const shown = gains.map((gain) => (variant ? `${(100 * gain).toFixed(1)} %` : "–"));
        const numbers = [forward, backward, total].map((value) => String(Number(value.toFixed(2))));
        return tableRow("td", [variant ? "" : SCOPES[scope], variants[variant], ...shown, ...numbers]);
      });
    });
  }

  function costSlider(root) {
    const { ratios, variants, costs } = JSON.parse(root.dataset.costs);
    const [range, choice, shown] = ["input", "select", "output"].map((name) => root.querySelector(name));
    const body = root.querySelector(".chosen tbody");
    return () => {
      const ratio = ratios[range.value];
      shown.textContent = ratio;
      range.setAttribute("aria-valuetext", `N/d = ${ratio}`);
      body.replaceChildren(...costRows(costs[choice.value][range.value], variants));
    };
  }

  // Chapter 12: writes, and bars of what each key is answered by then.

  function number(value) {
    return value.toFixed(1).replace("-", "−");
  }

  function bars(keys, figures, widest) {
    const rows = keys.flatMap((key, i) =>
      Object.entries(MEMORIES).map(([memory, name]) => {
        const value = figures[memory][i];
        const reaches = (end) => `calc(var(--reach) * ${Math.abs(end) / widest})`;
        const bar = made("td", {}, made("span", { class: "bar", style: `width: ${reaches(value)}` }));
        const last = figures.wanted[i];
        if (last !== null) bar.append(made("span", { class: "last", style: `left: ${reaches(last)}` }));
        const wanted = `last value: ${last === null ? "none yet" : last}`;
        const cells = [bar, made("td", {}, number(value)), made("td", {}, wanted)];
        return made("tr", {}, made("th", { scope: "row" }, `${key}, ${name}`), ...cells);
      }),
    );
    const caption = made("caption", {}, "What each key is answered, and a tick at its last value");
    return made("table", { class: "bars" }, caption, ...rows);
  }

  function deltaWrites(root) {
    const { keys, steps } = JSON.parse(root.dataset.figures);
    const widest = Math.max(...steps.flatMap((step) => [...step.linear, ...step.delta].map(Math.abs)));
    const place = made("div", {});
    root.append(place);
    return stepper(root, "Writes so far: ", 1, (step, rows) => {
      rows.forEach((row, i) => row.classList.toggle("later", i >= step));
      place.replaceChildren(bars(keys, steps[step - 1], widest));
    });
  }

  // Chapter 12: a row of the system, the errors that it uses, what is still unknown.

  function chunkSolve(root) {
    return stepper(root, "Rows solved: ", 0, (solved, rows) => {
      const now = rows[solved - 1]?.querySelectorAll("td");
      rows.forEach((row, i) => {
        row.querySelectorAll("td").forEach((cell, j) => {
          cell.classList.toggle("used", i === solved - 1 && j < i && cell.textContent !== "0");
        });
        const error = row.querySelector(".error");
        error.classList.toggle("known", i < solved - 1 && now[i].textContent !== "0");
        for (const cell of [error, row.querySelector(".how")]) cell.classList.toggle("later", i >= solved);
      });
    });
  }

  // Chapter 15: which tokens reach the last one, through so many layers.

  function reach(root) {
    const needed = JSON.parse(root.dataset.layers);
    const rows = [...root.querySelectorAll("tbody tr")];
    const pattern = made("select", { name: "pattern" }, ...Object.keys(needed).map((name) => new Option(name, name)));
    const [label, layers] = ranged("Layers ", { name: "layers", min: 1, max: rows[0].cells.length - 1, value: 2 });
    const said = made("output", {});
    const strip = made("div", { class: "reach-tokens", role: "img" });
    const controls = [made("label", {}, "Pattern ", pattern), label, said];
    root.prepend(made("div", { class: "reach-controls" }, ...controls), strip);
    return () => {
      const count = Number(layers.value);
      const there = needed[pattern.value].map((layer) => layer >= 0 && layer <= count);
      const last = there.length - 1;
      const kind = (token) => (token === last ? "reached last" : "reached");
      strip.replaceChildren(...there.map((reached, token) => made("span", reached ? { class: kind(token) } : {})));
      const layer = `layer${count > 1 ? "s" : ""}`;
      said.textContent = `${there.filter(Boolean).length} of ${there.length} tokens after ${count} ${layer}`;
      strip.setAttribute("aria-label", `Tokens that reach the last one, on the right: ${said.textContent}`);
      for (const { cells } of rows) {
        const chosen = cells[0].textContent === pattern.value;
        [...cells].forEach((cell, column) => cell.classList.toggle("chosen", chosen && column === count));
      }
    };
  }

  // The landing page: the chance that an untrained head finds the right token. The point follows the pointer, too.

  function lookup(root) {
    const { widths, tokens, chances, spelt, two, x, axis, start, words } = JSON.parse(root.dataset.figures);
    const [top, bottom] = axis;
    const picture = root.querySelector("svg");
    const point = picture.querySelector(".point");
    point.removeAttribute("hidden");
    const curves = [...picture.querySelectorAll("polyline.one")];
    const ranges = [words.width, words.tokens].map((name, i) =>
      ranged(`${name} `, { min: 0, max: (i ? tokens : widths).length - 1, value: start[i] }),
    );
    const [width, count] = ranges.map(([, input]) => input);
    const said = made("output", {});
    root.prepend(made("div", { class: "controls" }, ...ranges.map(([label]) => label), said));
    const nearest = (values, wanted) =>
      values.reduce((best, value, i) => (Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? i : best), 0);

    function drag(event) {
      const box = picture.getBoundingClientRect();
      const scale = picture.viewBox.baseVal.width / box.width;
      count.value = nearest(x, (event.clientX - box.left) * scale);
      const chance = (bottom - (event.clientY - box.top) * scale) / (bottom - top);
      width.value = nearest(chances.map((row) => row[count.value]), chance);
      root.dispatchEvent(new Event("input"));
    }

    picture.addEventListener("pointerdown", (event) => {
      picture.setPointerCapture(event.pointerId);
      drag(event);
    });
    picture.addEventListener("pointermove", (event) => event.buttons && drag(event));
    return () => {
      const [row, column] = [Number(width.value), Number(count.value)];
      const number = tokens[column].toLocaleString("en");
      width.setAttribute("aria-valuetext", widths[row]);
      count.setAttribute("aria-valuetext", number);
      curves.forEach((curve, i) => curve.classList.toggle("chosen", i === row));
      point.setAttribute("cx", x[column]);
      point.setAttribute("cy", bottom - (bottom - top) * chances[row][column]);
      const values = { width: widths[row], tokens: number, one: spelt[row][column], two: two[column] };
      said.textContent = words.said.replace(/\{(\w+)\}/g, (_, name) => values[name]);
    };
  }

  const INTERACTIVES = {
    lookup,
    "cost-slider": costSlider,
    "delta-writes": deltaWrites,
    "chunk-solve": chunkSolve,
    reach,
  };

  document.addEventListener("DOMContentLoaded", () => {
    for (const [name, start] of Object.entries(INTERACTIVES)) {
      for (const root of document.querySelectorAll(`.${name}`)) {
        const show = start(root);
        root.addEventListener("input", show);
        show();
        root.querySelectorAll("[hidden]").forEach((part) => (part.hidden = false));
        root.classList.add("live");
      }
    }
  });
})();
