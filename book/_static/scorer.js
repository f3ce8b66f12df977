/* The order of what a search finds: headings that are what was asked for, then chapters, then guides and the glossary, then the ledger, last names of the
   package. Sphinx puts this before its own script (`html_search_scorer`); within a group its scores decide. */
var Scorer = {
  score: ([page, title, , , score]) => {
    const asked = new URLSearchParams(location.search).get("q")?.trim().toLowerCase();
    if (title.split(" > ").pop().toLowerCase() === asked) return score + 5000;
    const groups = [/^notebooks\//, /^book\/(guides\/|notation)/, /^book\/(?!reference\/)/];
    const group = groups.findIndex((pattern) => pattern.test(page));
    return score + 1000 * (group < 0 ? 0 : groups.length - group);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
