"""The stored verdicts are those that the evidence gives; a damaged file of verdicts is refused."""

import json
import subprocess
import sys

import pytest

from paper.claims import LedgerError, judge, stored
from paper.claims.report import entry_markdown
from paper.experiments import EXPERIMENTS
from tools.notebooks import ROOT, VERDICTS, environment

WRITE = "import sys; from pathlib import Path; from tools.verdicts import main; main(Path(sys.argv[1]))"


def test_the_stored_verdicts_are_those_that_the_chapters_show():
    """Running the chapters against their stored outputs computes these verdicts anew from the evidence."""
    shown = {}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        outputs = (output.get("data", {}) for cell in cells for output in cell.get("outputs", []))
        shown[path.stem] = "\n".join("".join(data.get("text/markdown", "")) for data in outputs)
    for name, (entry, _) in stored(VERDICTS).items():
        assert entry.code or entry_markdown(entry) in shown[entry.chapter], name


@pytest.mark.nightly
def test_the_stored_verdicts_are_those_of_the_evidence(tmp_path):
    """In a separate process: records that were read here before would not be read again, and not be named."""
    path = tmp_path / "verdicts.json"
    subprocess.run([sys.executable, "-c", WRITE, str(path)], cwd=ROOT, env=environment(VERDICTS), check=True)
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(VERDICTS.read_text(encoding="utf-8"))
    assert path.read_bytes() == VERDICTS.read_bytes()


def test_stored_verdicts_are_read_with_the_records_of_their_evidence():
    found = stored(VERDICTS)
    assert found["S0.1.2b"] == (judge("S0.1.2b"), ())
    read = {name for _, records in found.values() for name in records}
    assert "training-step" in read
    assert read <= EXPERIMENTS.keys()


OTHER_CLAIMS, DAMAGED = "expected the claims of the catalogue, ", "expected the verdicts that .* writes: "


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.pop(next(iter(rows))), OTHER_CLAIMS + "got "),
        (lambda rows: rows.update({"S9.1a": {}}), OTHER_CLAIMS + r"got \['S9.1a'\] "),
        (lambda rows: next(iter(rows.values())).pop("verdict"), DAMAGED + ".*'verdict'"),
        (lambda rows: next(iter(rows.values())).pop("records"), DAMAGED + ".*'records'"),
        (lambda rows: next(iter(rows.values())).update(more="1"), DAMAGED + ".*'more'"),
        (lambda rows: rows.update({next(iter(rows)): None}), DAMAGED),
        *((text, DAMAGED) for text in (None, "[]", "{", "3")),  # in place of the whole file; None: no file
    ],
)
def test_damaged_verdicts_are_refused(tmp_path, change, said):
    path = tmp_path / "verdicts.json"
    if callable(change):
        rows = json.loads(VERDICTS.read_text(encoding="utf-8"))
        change(rows)
        change = json.dumps(rows)
    if change is not None:
        path.write_text(change, encoding="utf-8")
    with pytest.raises(LedgerError, match=f"verdicts.json: {said}"):
        stored(path)
