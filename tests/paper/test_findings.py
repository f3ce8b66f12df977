"""The values that several pages print, and the sentences that hold them."""

import pytest

from paper import findings
from paper.findings import Sentences


def test_a_sentence_is_left_out_where_one_of_its_values_is_not_there():
    say = Sentences({"most": "1.2"}).say
    assert say("At most {most} times as fast.") == "At most 1.2 times as fast."
    assert say("At most {most} times, measured {clock}.") == ""


def test_a_page_relies_on_outcomes_that_are_checked(monkeypatch):
    judged = findings.language.judged
    monkeypatch.setattr(findings.language, "judged", lambda *runs: judged(*runs)._replace(outcome="equivalent"))
    with pytest.raises(AssertionError, match="frozen against learned: expected worse, got equivalent"):
        findings.freezing_learnt()
