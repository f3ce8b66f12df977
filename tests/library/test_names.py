"""Unknown names: the error names the nearest known one, and does not list all names if there are many."""

import pytest
from refusals import refuses

from ortho import MECHANISMS, PROJECTIONS, LanguageModel, MultiheadAttention
from ortho.attention.linear.random_features import FEATURE_DRAWS
from ortho.checks import ALIASES, WHOLE, nearest, one_of
from ortho.orthogonal import DRAWS
from paper.experiments import EXPERIMENTS
from paper.experiments.engine.cli import find

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


def test_many_names_are_listed_whole_only_if_none_is_near():
    with pytest.raises(ValueError, match="^attention: expected one of") as near:
        MultiheadAttention(8, 2, attention="rope")
    wanted = f"one of {len(MECHANISMS)} names (all: list(ortho.MECHANISMS)), got 'rope'"
    assert str(near.value) == f"attention: expected {wanted}; did you mean 'rotary'?"
    with pytest.raises(ValueError, match="^attention: expected one of 'softmax', .*'sparse-linear', got"):
        LanguageModel(8, 8, 2, 1, max_length=8, attention="zzzz")
    with pytest.raises(
        ValueError, match="^form: expected one of 'reference', 'fast', got 'naive'; did you mean 'refer"
    ):
        one_of("form", "naive", ("reference", "fast"))
    assert len(EXPERIMENTS) > WHOLE
    refuses(
        r"^experiment: expected one of \d+ names, got 'recal'; did you mean 'recall'\?$", find, "recal", EXPERIMENTS
    )
