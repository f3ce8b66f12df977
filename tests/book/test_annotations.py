"""While the tests run, annotations are checked at run time, shapes included; the check can fail and can be left out."""

import annotation_checks
import jaxtyping
import pytest
import torch

from ortho.attention.dynamic_sparse.routing import _products, normalised
from ortho.attention.recurrence import chunks

VECTOR = torch.ones(2)  # where a sequence of vectors is expected


def test_a_false_shape_is_an_error():
    normalised(torch.ones(4, 2))
    with pytest.raises(jaxtyping.TypeCheckError, match="normalised"):
        normalised(VECTOR)


def test_a_false_type_is_an_error():
    with pytest.raises(jaxtyping.TypeCheckError, match="length"):
        chunks("3", 2)


def test_sizes_of_one_name_are_equal():
    """Within one call; another call may have other sizes."""
    wider = torch.ones(4, 5)
    _products("x", wider, wider)
    with pytest.raises(jaxtyping.TypeCheckError, match="_products"):
        _products("x", wider, torch.ones(3, 2))


@pytest.mark.parametrize("repetition", [1, 2])
def test_the_first_calls_of_each_test_are_checked(repetition):
    for _ in range(annotation_checks.CALLS):
        with pytest.raises(jaxtyping.TypeCheckError):
            normalised(VECTOR)
    assert normalised(VECTOR).shape == VECTOR.shape


@pytest.mark.bad_input
def test_they_are_not_checked_where_the_input_is_bad():
    assert normalised(VECTOR).shape == VECTOR.shape
