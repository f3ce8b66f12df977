/* What is wrong with the page that is open, each check as a list of lines for a person to read. Playwright puts this into
   every page (`conftest.py`). */
window.checks = (() => {
  "use strict";

  const CODE = "code, pre, script, style, noscript, textarea, mjx-container, q[lang]"; // and what is quoted as it was typed
  // TeX that was not read, roles or fields that were never filled in, and types in a signature that was not.
  const RAW = /\\[a-zA-Z()[\]]|\$|[_^]\{|\{[a-z][\w:.-]*(\([^)]*\))?\}|~[a-z]+\.[a-zA-Z]/;

  function called(element) {
    const name = [element.localName, ...element.classList].join(".");
    return `${name} "${element.textContent.trim().replace(/\s+/g, " ").slice(0, 60)}"`;
  }

  function formulas() {
    const bare = [...document.querySelectorAll(".math")].filter((math) => !math.querySelector("mjx-container"));
    const wrong = [...document.querySelectorAll("[data-mjx-error], mjx-merror, mjx-container [fill=red]")];
    return [
      ...bare.map((math) => `not typeset: ${called(math)}`),
      ...wrong.map((part) => `not understood: ${called(part.closest("mjx-container"))}`),
    ];
  }

  // Where one letter of a text stands.
  function place(text, at) {
    const range = document.createRange();
    range.setStart(text, at);
    range.setEnd(text, at + 1);
    return range.getBoundingClientRect();
  }

  // Where a line begins with the sign that stands behind a formula, or ends with the one before it.
  function signs() {
    const apart = [...document.querySelectorAll("mjx-container:not([display])")].flatMap((drawing) => {
      const { previousSibling: before, nextSibling: after } = drawing.closest(".math") ?? drawing;
      const { left, right } = drawing.getBoundingClientRect();
      const found = [];
      if (after instanceof Text && /^[.,;:!?)\]%’”]/.test(after.data) && place(after, 0).left < right - 1) {
        found.push(["begins", after.data.slice(0, 20), after]);
      }
      if (before instanceof Text && /[([‘“"]$/.test(before.data) && place(before, before.length - 1).right > left + 1) {
        found.push(["ends", before.data.slice(-20), before]);
      }
      return found;
    });
    return apart.map(([how, words, text]) => `${how} a line: "${words}" in ${called(text.parentElement)}`);
  }

  function text() {
    const found = RAW.test(document.title) ? [`raw title: ${document.title}`] : [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const { data, parentElement } = walker.currentNode;
      if (RAW.test(data) && !parentElement.closest(CODE)) found.push(`raw text: ${data.match(RAW)[0]} in ${called(parentElement)}`);
    }
    return found;
  }

  function pictures() {
    const described = ({ alt }) => alt.trim() && !/\.(svg|png|jpe?g|gif|webp)$/.test(alt);
    return [...document.images].filter((image) => !described(image)).map((image) => `without words: ${image.src}`);
  }

  // The box that decides what becomes of an element that is too wide for it: one that scrolls or cuts, or the page.
  function box(element) {
    const parent = element.parentElement ?? document.documentElement;
    const { display, overflowX } = getComputedStyle(parent);
    const decides = parent === document.documentElement || (overflowX !== "visible" && display !== "inline");
    return decides ? parent : box(parent);
  }

  function width() {
    const page = document.scrollingElement;
    const edge = (element) => element.getBoundingClientRect().right;
    const cut = [...document.querySelectorAll("article :is(img, pre, svg, table)")].filter(
      (element) => /hidden|clip/.test(getComputedStyle(box(element)).overflowX) && edge(element) > edge(box(element)) + 1,
    );
    const found = cut.map((element) => `cut off: ${called(element)}`);
    for (const formula of document.querySelectorAll("mjx-container")) {
      const place = formula.hasAttribute("display") ? formula : formula.parentElement;
      if (place.scrollWidth > place.clientWidth + 1) found.push(`shown in part: ${called(place)}`);
    }
    if (page.scrollWidth <= innerWidth) return found;
    const pushing = [...document.body.querySelectorAll("*")].filter(
      (element) => element.offsetParent && box(element) === page && edge(element) > innerWidth + 1,
    );
    found.unshift(`the page is ${page.scrollWidth} px wide, the window ${innerWidth}`);
    return [...found, ...pushing.map((element) => `too wide: ${called(element)}`)];
  }

  /* Takes the page apart: leaves one text of each kind, and what it lies in. Colours hang on tags, classes and styles, not
     on words, and to compare those of some thousand elements that are alike would take axe a minute a page. */
  function specimens() {
    const seen = new Set();
    const kind = (element) =>
      element === document.body
        ? ""
        : `${kind(element.parentElement)}>${element.localName} ${element.className} ${element.getAttribute("style")}`;
    function prune(element) {
      // axe takes a single character for a sign.
      const own = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE);
      const speaks = own.some((node) => node.data.trim().length > 1);
      const fresh = (speaks || element.matches("input, select, style")) && !seen.has(kind(element));
      if (fresh) seen.add(kind(element));
      const needed = [...element.children].map(prune).includes(true);
      if (!fresh && !needed) element.remove();
      return fresh || needed;
    }
    document.querySelectorAll("mjx-container, body svg").forEach((drawing) => drawing.remove());
    [...document.body.children].forEach(prune);
  }

  return { formulas, signs, text, pictures, width, specimens };
})();
