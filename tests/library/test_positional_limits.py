"""What attention by position refuses, and what it says."""

from functools import partial

import pytest
import torch

from ortho.attention.untrained.positional_attention import SEVEN, positional_attention, positional_attention_reference

FORMS = {"reference": positional_attention_reference, "fast": positional_attention}
both_forms = pytest.mark.parametrize("form", FORMS)

V = torch.zeros(2, 2, 4, 3)
TWO = ("previous", "next")
STATE = positional_attention(V, TWO, is_causal=True, return_state=True)[1]
BAD = [
    ({"v": V.long()}, TypeError, "v: expected a floating-point tensor, got a int64 tensor"),
    ({"v": V[0, 0]}, ValueError, r"v: expected shape \(..., H, N, V\) without empty axes, got \(4, 3\)"),
    ({"v": V[:, :, :0]}, ValueError, r"v: expected shape .* got \(2, 2, 0, 3\)"),
    ({"v": V + torch.inf}, ValueError, "v: expected finite numbers, got 48 NaN or infinite of 48"),
    ({"patterns": "previous"}, TypeError, "patterns: expected a sequence .*, got str 'previous'"),
    ({"patterns": ("previous", "nxt")}, ValueError, "patterns: expected one of 'current'.*, got 'nxt'"),
    ({"patterns": (1, 2)}, ValueError, "patterns: expected a sequence .of a PositionalPattern or a name each., got"),
    ({"patterns": SEVEN}, ValueError, "patterns: expected one for each of 2 heads, got 7"),
    ({"is_causal": 1}, TypeError, "is_causal: expected True or False, got int 1"),
    ({"return_state": None}, TypeError, "return_state: expected True or False, got NoneType None"),
    ({"empty": "one"}, ValueError, "empty: expected one of 'zero', 'self', got 'one'"),
    ({"attn_mask": torch.ones(4)}, TypeError, "attn_mask: expected a boolean tensor"),
    (
        {"attn_mask": torch.ones(4, 4, dtype=torch.bool)},
        ValueError,
        r"attn_mask: expected a mask of keys, of shape \(..., 1, 4\), got \(4, 4\)",
    ),
    ({"attn_mask": torch.ones(5, dtype=torch.bool)}, ValueError, r"attn_mask: expected a shape that broadcasts"),
    ({"words": torch.zeros(2, 4)}, TypeError, "words: expected int32 or int64 indices, got a float32"),
    ({"words": torch.zeros(4).long()}, ValueError, r"words: expected shape \(2, 4\), got \(4,\)"),
    ({"return_state": True}, ValueError, "return_state: expected none in a call that is not causal"),
    ({"initial_state": STATE}, ValueError, "initial_state: expected none in a call that is not causal"),
    ({"is_causal": True, "initial_state": V}, TypeError, "initial_state: expected a tuple of tensors"),
    ({"is_causal": True, "initial_state": STATE[:2]}, ValueError, "initial_state: expected a tuple of tensors"),
    (
        {"is_causal": True, "initial_state": STATE, "attn_mask": torch.ones(4, dtype=torch.bool)},
        ValueError,
        "attn_mask: expected None beside an initial_state",
    ),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
@both_forms
def test_errors(form, arguments, error, message):
    with pytest.raises(error, match=message):
        FORMS[form](**{"v": V, "patterns": TWO, **arguments})


@pytest.mark.bad_input
@both_forms
def test_errors_of_words(form):
    call = partial(FORMS[form], V, TWO)
    for numbers, message in (([0, 1, 0, 1], "steps .* got -1 to 1"), ([-1, 0, 1, 2], "numbers .* got -1 to 2")):
        with pytest.raises(ValueError, match=f"words: expected {message}"):
            call(words=torch.tensor([numbers] * 2))
    there = torch.tensor([True, True, False, True])  # what is masked may have any number
    call(words=torch.tensor([[0, 1, -7, 1]] * 2), attn_mask=there)
    words = torch.tensor([[4, 5, 5, 6]] * 2)
    _, state = call(words=words, is_causal=True, return_state=True)
    with pytest.raises(ValueError, match="words: expected steps .* got -2 to 0"):
        call(words=words, is_causal=True, initial_state=state)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("form", "part", "value", "message"),
    [
        ("fast", 0, STATE[0].float(), r"values torch.float64 of shape \(2, 2, 3\)"),
        ("fast", 1, STATE[1][..., :0], r"sums torch.float64 of shape \(2, 3, 1\)"),
        ("fast", 2, STATE[2].double(), r"places torch.int64 of shape \(2, 1, 3\)"),
        ("reference", 0, V.double(), r"values torch.float32 of shape \(2, 2, 4, 3\)"),
        ("reference", 1, torch.zeros(2, 1, 4), r"positions torch.int64 of shape \(2, 1, 4\)"),
        ("reference", 2, torch.zeros(2, 3).long(), r"word torch.int64 of shape \(2, 1\)"),
    ],
)
def test_errors_of_states(form, part, value, message):
    _, state = FORMS[form](V, TWO, is_causal=True, return_state=True)
    with pytest.raises(ValueError, match=f"initial_state: expected {message}"):
        FORMS[form](V, TWO, is_causal=True, initial_state=(*state[:part], value, *state[part + 1 :]))
