"""N-gram heads: matches by hand, the fast form, and what a model of them may see."""

import pytest
import torch

from paper.experiments.learning.ladder_arms import ARMS
from paper.experiments.learning.ngram_heads import NgramHeads, matches, matches_reference

TOKENS = torch.tensor([[7, 8, 9, 7, 8, 7, 8]])


def attended(found):
    return {t: row.nonzero()[:, 0].tolist() for t, row in enumerate(found[0]) if row.any()}


@pytest.mark.parametrize("form", [matches, matches_reference])
def test_by_hand(form):
    """Matches of one token: 8 follows 7; 9 follows 8, later 7 does. Of two: 9 follows 7 8, later 7 does. There are none
    of four. A sequence as long as the match, or shorter, has no place for one."""
    assert attended(form(TOKENS, 1)) == {3: [1], 4: [2], 5: [1, 4], 6: [2, 5]}
    assert attended(form(TOKENS, 2)) == {4: [2], 6: [2, 5]}
    assert attended(form(TOKENS, 4)) == {}
    assert not form(TOKENS[:, :2], 2).any() and not form(TOKENS[:, :1], 4).any()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_fast_form(n):
    tokens = torch.randint(3, (4, 40), generator=torch.Generator().manual_seed(n))
    found = matches(tokens, n)
    assert torch.equal(found, matches_reference(tokens, n)) and found.any()


def test_a_model_sees_matches_and_nothing_later():
    """The logits of a prefix do not change with later tokens."""
    arm = ARMS["2 n-gram + 2 positional"]
    case = {"convolution": 0, "d": 16, "L": 2, "d_ff": 32}
    model = arm.build(case, torch.Generator().manual_seed(0)).double()
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, (2, 24), generator=draw)
    other = tokens.clone()
    other[:, 16:] = torch.randint(3, (2, 8), generator=draw)
    first, second = model(tokens), model(other)
    torch.testing.assert_close(first[:, :16], second[:, :16], rtol=0, atol=1e-12)  # sums of 24 in another order
    assert not torch.allclose(first[:, 16:], second[:, 16:])


def test_rows_without_a_match_give_nothing():
    heads = NgramHeads(8, 2, head_dim=4, generator=torch.Generator().manual_seed(0))
    heads.read(TOKENS)
    y = heads(torch.ones(1, 7, 8), is_causal=True)
    assert torch.equal(y[0].abs().sum(1) > 0, torch.tensor([False] * 4 + [True, False, True]))


@pytest.mark.bad_input
def test_errors():
    heads = NgramHeads(8, 2, head_dim=4)
    x = torch.ones(1, 7, 8)
    with pytest.raises(ValueError, match="x: expected the tokens that `read` was given last"):
        heads(x, is_causal=True)
    heads.read(TOKENS)
    for others in ({}, {"is_causal": True, "return_state": True}, {"is_causal": True, "attn_mask": x > 0}):
        with pytest.raises(ValueError, match="is_causal: expected True, without mask, state or cache"):
            heads(x, **others)
