"""The values that several pages print, and the sentences that hold them."""

import re
from pathlib import Path
from string import Formatter

import nbformat
import pytest

from paper import experiments, findings
from paper.findings import Sentences, values

ROOT = Path(__file__).parents[2]


def test_values_are_strings_under_names_that_a_page_can_ask_for():
    assert all(re.fullmatch(r"[a-z]\w*", name) and value and isinstance(value, str) for name, value in values().items())


def test_a_sentence_is_left_out_where_one_of_its_values_is_not_there():
    say = Sentences({"most": "1.2"}).say
    assert say("At most {most} times as fast.") == "At most 1.2 times as fast."
    assert say("At most {most} times, measured {clock}.") == ""


def test_without_records_there_are_the_values_of_formulas_alone(monkeypatch):
    monkeypatch.setattr(experiments, "load", lambda name: [])
    findings.measured_steps.cache_clear()
    try:
        found = {name for topic in findings.TOPICS for name in topic()}
    finally:
        findings.measured_steps.cache_clear()
    assert {"layer_most", "source_rule", "favor_short", "flash_backward", "choosing_top_k"} <= found
    assert not found & {"step_gains", "linear_time", "bytes_learned", "decode_clocks", "split_layer"}


def test_a_page_relies_on_outcomes_that_are_checked(monkeypatch):
    judged = findings.language.judged
    monkeypatch.setattr(findings.language, "judged", lambda *runs: judged(*runs)._replace(outcome="equivalent"))
    with pytest.raises(AssertionError, match="frozen against learned: expected worse, got equivalent"):
        findings.freezing_learnt()


def test_every_value_that_the_landing_page_names_exists():
    cells = {cell.id: cell for cell in nbformat.read(ROOT / "book" / "index.ipynb", as_version=4).cells}
    source = re.sub(r'f"[^"]*"', "", cells["findings"].source)  # f-strings name the cell's own variables
    asked = {field for text in re.findall(r'"([^"]*)"', source) for _, field, _, _ in Formatter().parse(text) if field}
    assert asked
    assert asked <= values().keys()


def test_every_value_is_asked_for():
    """The landing page, the Chinese page or the article prints it: no value is computed in vain."""
    notebooks = [nbformat.read(ROOT / "book" / f"{name}.ipynb", as_version=4) for name in ("index", "zh")]
    texts = [cell.source for notebook in notebooks for cell in notebook.cells if cell.cell_type == "code"]
    text = "\n".join([*texts, (ROOT / "book" / "article" / "article.typ").read_text(encoding="utf-8")])
    assert [name for name in values() if not re.search(rf"\b{name}\b", text)] == []
