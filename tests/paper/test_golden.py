"""Golden runs give their stored figures: to the last digit on the processor that stored them, else within a tolerance.

A sample by default, all with ORTHO_TESTS=all.
"""

import json

import golden_runs
import pytest
from experiment_fakes import small_library
from extent import WHOLE
from golden_runs import STORED, TIMES, deviation, figures

from paper.experiments.learning import fine_tuning
from paper.tasks import text

GOLDEN = json.loads(STORED.read_text())
RUNS = {f"{run['experiment']}, {run['case'].get('arm')}": run for run in GOLDEN["runs"]}
SAMPLE = [name for name in RUNS if WHOLE or name in ("recall, delta", "bytes, frozen", "images, learned")]


@pytest.fixture(autouse=True, scope="module")
def library(tmp_path_factory):
    parts = small_library(tmp_path_factory.mktemp("library"), times=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "python_parts", lambda: parts)
        fine_tuning.tasks.cache_clear()
        yield
    fine_tuning.tasks.cache_clear()


SAME = golden_runs.processor() == GOLDEN["processor"]
TOLERANCE = TIMES * GOLDEN["spread"]  # the largest relative deviation that another processor's rounding explains


@pytest.mark.unchecked  # as the experiments run
@pytest.mark.parametrize("name", SAMPLE)
def test_the_code_computes_what_it_did(name):
    run = RUNS[name]
    assert deviation(figures(run["experiment"], run["case"]), run["losses"]) <= (0.0 if SAME else TOLERANCE)


def test_the_golden_runs_are_the_short_cases_of_today():
    assert [run["case"] for run in GOLDEN["runs"]] == [case for _, _, case in golden_runs.cases()]
