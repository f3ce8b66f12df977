"""What would be wrong in silence is refused in one sentence, alike by every mechanism: a table for the shared door."""

import pytest
import torch
from seeded import draw

from ortho.attention import MECHANISMS

N, K = 5, 4
# Wrong arguments in place of right ones, and the beginning of the refusal.
TABLE = {
    "leading axes": ({"k": draw(3, N, K)}, "q, k, v: expected shapes"),
    "one axis": ({"q": draw(K), "k": draw(K), "v": draw(K)}, "q, k, v: expected shapes"),
    "integers": ({name: torch.ones(2, N, K, dtype=torch.int64) for name in "qkv"}, "q, k, v: expected one floating"),
    "dtypes": ({"v": draw(2, N, K, dtype=torch.float32)}, "q, k, v: expected one floating"),
    "width": ({"k": draw(2, N, K + 1)}, "k: expected width 4 like q"),
    "length": ({"v": draw(2, N - 1, K)}, "v: expected length 5 like k"),
    "empty": ({name: draw(2, 0, K) for name in "qkv"}, "q, k: expected no empty axes"),
    "integers as a mask": ({"attn_mask": torch.ones(N, N, dtype=torch.int64)}, "attn_mask: expected a boolean tensor"),
    "mask's shape": ({"attn_mask": torch.ones(N, N + 1, dtype=torch.bool)}, "attn_mask: expected a shape"),
    "mask's axes": ({"attn_mask": torch.ones(3, 2, N, N, dtype=torch.bool)}, "attn_mask: expected a shape"),
    "state": ({"initial_state": (draw(2, 1, K),) * 7}, "initial_state: expected"),
}
# The families whose functions take a `Call`.
FAMILIES = ("softmax", "linear", "recurrent", "position_bias", "sparse")
FORMS = [(name, form) for name, m in MECHANISMS.items() if m.family in FAMILIES for form in ("reference", "fast")]


@pytest.mark.bad_input
@pytest.mark.parametrize(("name", "form"), FORMS)
@pytest.mark.parametrize("row", TABLE)
def test_the_door(name, form, row):
    mechanism, (wrong, message) = MECHANISMS[name], TABLE[row]
    right = {part: draw(2, N, K, seed=seed) for seed, part in enumerate("qkv")}
    if "attn_mask" not in wrong and mechanism.causal:
        right["is_causal"] = True
    with pytest.raises((TypeError, ValueError), match=message):
        mechanism.form(form)(**right | wrong)


@pytest.mark.bad_input
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_causal_call_needs_a_key_for_each_query(name, form):
    if not MECHANISMS[name].causal:
        pytest.skip("not causal")
    with pytest.raises(ValueError, match="is_causal: expected as many queries as keys, got 3 and 5"):
        MECHANISMS[name].form(form)(draw(2, 3, K), draw(2, N, K), draw(2, N, K), is_causal=True)
