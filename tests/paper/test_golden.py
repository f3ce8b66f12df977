"""Golden runs give their stored figures: to the last digit on the processor that stored them, else within a tolerance.

A sample by default, all with ORTHO_TESTS=all.
"""

import json

import golden_runs
import pytest
from golden_runs import STORED, TIMES, deviation, figures
from sample import WHOLE

GOLDEN = json.loads(STORED.read_text())
RUNS = {f"{run['experiment']}, {run['case'].get('arm')}": run for run in GOLDEN["runs"]}
SAMPLE = [name for name in RUNS if WHOLE or name in ("recall, delta", "bytes, frozen", "images, learned")]


SAME = golden_runs.processor() == GOLDEN["processor"]
TOLERANCE = TIMES * GOLDEN["spread"]  # the largest relative deviation that another processor's rounding explains


@pytest.mark.unchecked  # as the experiments run
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", SAMPLE)
def test_the_code_computes_what_it_did(name):
    run = RUNS[name]
    assert deviation(figures(run["experiment"], run["case"]), run["losses"]) <= (0.0 if SAME else TOLERANCE)


def test_the_golden_runs_are_the_smoke_cases_of_today():
    assert [run["case"] for run in GOLDEN["runs"]] == [case for _, _, case in golden_runs.cases()]
