"""Every public function and class, called with one odd argument: it works, or says in one sentence what it expected.

One call in six is made, always the same; with ORTHO_TESTS=all, all are. `python tests/fuzz_calls.py` counts.
"""

import random
from collections import Counter

import pytest
from extent import WHOLE
from fuzz_calls import FINE, calls, outcome
from fuzz_targets import targets

SHARE = 1.0 if WHOLE else 1 / 6

pytestmark = [pytest.mark.bad_input, pytest.mark.filterwarnings("ignore")]


def test_odd_arguments_are_refused_in_one_sentence():
    generator, wrong, made = random.Random(0), {}, Counter()
    for label, function in targets().items():
        for call in calls(label, function):
            if not call.name or generator.random() < SHARE:  # each function's valid call is always made
                found = outcome(call)
                made[found] += 1
                if found not in FINE:
                    wrong[str(call)] = found
    assert wrong == {}
    # Most odd values cannot be meant for what they replace: if most calls worked, the values would not be odd.
    assert made["refused"] > 4 * made["works"]
