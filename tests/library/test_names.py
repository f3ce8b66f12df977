"""Unknown names: the error names the nearest known one, and does not list all names if there are many."""

import pytest

from ortho import MECHANISMS, PROJECTIONS
from ortho.attention.linear.random_features import FEATURE_DRAWS
from ortho.checks import ALIASES, nearest
from ortho.orthogonal import DRAWS

pytestmark = pytest.mark.bad_input


@pytest.mark.parametrize(
    ("asked", "known", "meant"),
    [
        ("rope", MECHANISMS, "rotary"), ("RoPE", MECHANISMS, "rotary"), ("sliding_window", MECHANISMS, "window"),
        ("performer", MECHANISMS, "favor"), ("FAVOR+", MECHANISMS, "favor"), ("GLA", MECHANISMS, "gla"),
        ("softmax-attention", MECHANISMS, "softmax"), ("sofmax", MECHANISMS, "softmax"),
        ("sdpa", MECHANISMS, "softmax"),
        ("deltanet", MECHANISMS, "delta"), ("gated deltanet", MECHANISMS, "gated-delta"),
        ("top_k", MECHANISMS, "top-k"),
        ("trained", PROJECTIONS, "learned"), ("gram-schmidt", DRAWS, "gram_schmidt"), ("qr", DRAWS, "haar"),
        ("gaussian", FEATURE_DRAWS, "iid"), ("zzzz", MECHANISMS, None), ("", MECHANISMS, None), (3, MECHANISMS, None),
    ],
)  # fmt: skip
def test_the_nearest_name(asked, known, meant):
    assert nearest(asked, known) == meant


def test_each_alias_leads_to_a_known_name_and_is_none_itself():
    named = {*MECHANISMS, *PROJECTIONS, *DRAWS, *FEATURE_DRAWS, "fast", "reference", "sinusoidal", "mqar", "recall"}
    named |= {"positive", "rff"}
    assert {name for names in ALIASES.values() for name in names} <= named
    assert not any(one in ALIASES[one] for one in ALIASES)
