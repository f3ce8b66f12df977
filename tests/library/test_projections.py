"""One projection for all blocks; heads of any width."""

import io
from functools import partial

import pytest
import torch
from seeded import generator

from ortho import LanguageModel, to_standard
from ortho.projections import FrozenProjection, LearnedProjection

# Sums of at most 1e2 rounded products of size 1 in float64, in different orders.
close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-12)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("projection", [LearnedProjection, FrozenProjection])
def test_each_block_has_a_projection_of_its_own(projection):
    """A module that is given to a model is copied for each block: the numbers are the same, the parameters are not."""
    given = projection(24, 4, generator=generator(1), dtype=torch.float64)
    kwargs = {"max_length": 16, "dtype": torch.float64}
    model = LanguageModel(13, 24, 4, 3, projection=given, generator=generator(2), **kwargs)
    apart = LanguageModel(13, 24, 4, 3, projection=projection, generator=generator(2), **kwargs)
    assert [p.shape for p in model.parameters()] == [p.shape for p in apart.parameters()]
    weights = [block.attention.projection.weight_q for block in model.blocks]
    assert len({id(weight) for weight in (given.weight_q, *weights)}) == 4
    assert all(torch.equal(weight, given.weight_q) for weight in weights)
    apart.load_state_dict(through_a_file(model.state_dict()))
    tokens = torch.randint(13, (2, 9), generator=generator(3))
    assert torch.equal(model(tokens), apart(tokens))
    close(to_standard(model)(tokens), model(tokens))
