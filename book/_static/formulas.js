/* Makes a formula that is wider than its place smaller, down to a point: cut off, it would say something else. What is
   wider still scrolls. */
window.addEventListener("load", async () => {
  "use strict";
  const SMALLEST = 0.5; // of the text's size
  await window.MathJax?.startup?.promise;
  function fit() {
    for (const drawing of document.querySelectorAll("mjx-container")) {
      const place = drawing.hasAttribute("display") ? drawing : drawing.parentElement;
      drawing.style.fontSize = "";
      // Not all of a drawing shrinks with its letters, so that once is not enough.
      for (let size = 1; place.scrollWidth > place.clientWidth && size > SMALLEST; ) {
        size = Math.max(SMALLEST, (0.99 * size * place.clientWidth) / place.scrollWidth);
        drawing.style.fontSize = `${100 * size}%`;
      }
    }
  }
  fit();
  window.addEventListener("resize", fit);
});

/* Keeps a formula and the sign behind or before it on one line. A browser takes a formula in a sentence for a picture,
   beside which a line may end: ". " would begin the next one. */
window.addEventListener("load", async () => {
  "use strict";
  const CLOSING = /^[.,;:!?)\]%’”]+/;
  const OPENING = /[([‘“"]+$/;
  await window.MathJax?.startup?.promise;
  for (const drawing of document.querySelectorAll("mjx-container:not([display])")) {
    const formula = drawing.closest(".math") ?? drawing;
    const { previousSibling: before, nextSibling: after } = formula;
    const closing = after instanceof Text && after.data.match(CLOSING);
    const opening = before instanceof Text && before.data.match(OPENING);
    if (!closing && !opening) continue;
    const together = document.createElement("span");
    together.style.whiteSpace = "nowrap";
    formula.before(together);
    if (opening) together.append(before.splitText(opening.index));
    together.append(formula);
    if (closing) {
      after.splitText(closing[0].length);
      together.append(after);
    }
  }
});
