"""The values that several pages print."""

import pytest

from paper import findings


def test_a_page_relies_on_outcomes_that_are_checked(monkeypatch):
    judged = findings.language.judged
    monkeypatch.setattr(findings.language, "judged", lambda *runs: judged(*runs)._replace(outcome="equivalent"))
    with pytest.raises(AssertionError, match="frozen against learned: expected worse, got equivalent"):
        findings.freezing_learnt()
