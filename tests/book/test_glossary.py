"""The glossary: terms are in order, none occurs twice, and each has one sentence."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "book" / "notation.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^(\S.*)\n  (\S.*)$", PAGE.partition("```{glossary}\n")[2].partition("```")[0], re.MULTILINE)


def test_terms_stand_in_order_and_none_twice():
    terms = [term.lower() for term, _ in ENTRIES]
    assert len(terms) >= 40
    assert terms == sorted(set(terms))


def test_each_term_has_one_sentence():
    assert [term for term, words in ENTRIES if not words.endswith(".") or ". " in words] == []
