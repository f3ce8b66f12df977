"""Annotations are checked at run time while the tests run, shapes among them: the check can fail, and be left out."""

import annotation_checks
import jaxtyping
import pytest
import torch

from ortho._weights import split_heads
from ortho.attention.chunking import chunks
from ortho.attention.softmax.flash import flash_attention
from ortho.layers.synthesizer.sources import product

FLAT = torch.ones(3, 4).unbind()  # vectors, where queries, keys and values are expected


def test_a_false_shape_is_an_error():
    split_heads(torch.ones(3, 4, 2), 2)
    with pytest.raises(jaxtyping.TypeCheckError, match="split_heads"):
        split_heads(FLAT[0], 2)


def test_a_false_type_is_an_error():
    with pytest.raises(jaxtyping.TypeCheckError, match="length"):
        chunks("3", 2)


def test_sizes_of_one_name_are_equal():
    """In one call, not from call to call."""
    left, right = torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 3)
    product(right, right)
    with pytest.raises(jaxtyping.TypeCheckError, match="product"):
        product(left, right)


@pytest.mark.parametrize("repetition", [1, 2])
def test_the_first_calls_of_each_test_are_checked(repetition):
    for _ in range(annotation_checks.CALLS):
        with pytest.raises(jaxtyping.TypeCheckError):
            split_heads(FLAT[0], 2)
    with pytest.raises(IndexError):  # by PyTorch
        split_heads(FLAT[0], 2)


@pytest.mark.bad_input
def test_they_are_not_checked_where_the_input_is_bad():
    with pytest.raises(ValueError, match="q: expected shape"):
        flash_attention(*FLAT)
