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
