"""The shape annotations are true: the tests of all that trains pass with each checked at run time."""

import pytest
from shape_checks import assert_annotations_hold

CHECKED = {  # names of tests/test_*.py
    "translators": "encoder_decoder encoder_decoder_cost beam_search",
    "tasks": "tasks tasks_download tasks_drawn tasks_images tasks_text tasks_transduction tasks_translation",
    "training": "training",
    "learning": "learning learning_rows",
    "arms": "arms learning_heads",
    "language": "language language_cases",
}


@pytest.mark.parametrize("names", CHECKED.values(), ids=CHECKED)
def test_annotations_hold(names):
    assert_annotations_hold(names)
