"""One projection for all blocks; heads of any width."""

import io
from functools import partial

import pytest
import torch
from refusals import refuses
from seeded import generator

from ortho import LanguageModel, to_standard
from ortho.projections import FrozenProjection, LearnedProjection
from ortho.projections.projection import head_sizes, kv_heads

# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("projection", [LearnedProjection, FrozenProjection])
def test_one_module_for_all_blocks(projection):
    """It is one module, whose parameters are there once, and have the gradient of all blocks together."""
    shared = projection(24, 4, generator=generator(1), dtype=torch.float64)
    kwargs = {"max_length": 16, "dtype": torch.float64}
    model = LanguageModel(13, 24, 4, 3, projection=shared, generator=generator(2), **kwargs)
    apart = LanguageModel(13, 24, 4, 3, projection=projection, generator=generator(2), **kwargs)
    apart.load_state_dict(model.state_dict())  # each block's name is there, and stands for the same
    learned = projection is LearnedProjection
    count = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in apart.parameters()) - count == 2 * 2 * 24**2
    tokens = torch.randint(13, (2, 9), generator=generator(3))
    close(model(tokens), apart(tokens))
    close(to_standard(model)(tokens), model(tokens))
    if learned:
        for each in (model, apart):
            each(tokens).square().sum().backward()
        for name in ("weight_q", "weight_k"):
            blocks = [getattr(block.attention.projection, name).grad for block in apart.blocks]
            torch.testing.assert_close(getattr(shared, name).grad, sum(blocks), atol=1e-9, rtol=1e-9)  # sums of 1e3
    other = LanguageModel(13, 24, 4, 3, projection=projection(24, 4, dtype=torch.float64), **kwargs)
    other.load_state_dict(through_a_file(model.state_dict()))
    assert torch.equal(other(tokens), model(tokens))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: head_sizes(8, 0, 4), "num_heads"),
        (lambda: head_sizes(-8, 2, 4), "d_model"),
        (lambda: head_sizes(8, 2, 0), "head_dim"),
        (lambda: kv_heads(4, 0), "num_kv_heads"),
        (lambda: kv_heads(4, -2), "num_kv_heads"),
    ],
)
def test_sizes_below_one_are_refused(call, name):
    refuses(f"^{name}: expected an integer of at least 1", call)
