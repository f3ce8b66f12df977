"""The memories with a decay a channel, and operands for them: what several files of tests begin with."""

import memory_operands
from memory_operands import FORMS, draw

from ortho.attention.recurrent.gla import (
    gated_linear_attention,
    gated_linear_attention_reference,
    kimi_delta_attention,
    kimi_delta_attention_reference,
)

FUNCTIONS = {
    "gla": dict(zip(FORMS, (gated_linear_attention_reference, gated_linear_attention), strict=True)),
    "kda": dict(zip(FORMS, (kimi_delta_attention_reference, kimi_delta_attention), strict=True)),
}
NAMES = list(FUNCTIONS)


def arguments(name, *lead, length, keys=None, state=True, seed=0):
    """As `memory_operands.arguments` has them; decays are of channels, some tokens forget nothing, others all of two
    channels."""
    given = memory_operands.arguments(*lead, length=length, keys=keys, state=state, seed=seed, gated=True)
    k = given["k"]
    rates = -draw(*k.shape, seed=100 * seed + 10).square() / 2 * (draw(*k.shape[:-1], 1, seed=100 * seed + 11) > -1)
    rates[..., 2::9, 1:3] = -1e30
    given["log_decay"] = rates
    if name == "gla":
        del given["beta"]
    return given
