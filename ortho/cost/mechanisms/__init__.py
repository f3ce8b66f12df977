"""The closed forms of the mechanisms' costs, a file a family; importing this enters them in `MECHANISMS`."""

from typing import Any

from ortho.attention import MECHANISMS
from ortho.attention.mechanism import Mechanism, with_made
from ortho.cost.mechanisms import linear, position_bias, recurrent, softmax, sparse

_COSTS = softmax.COSTS | linear.COSTS | recurrent.COSTS | position_bias.COSTS | sparse.COSTS


def closed_form_of(mechanism: Mechanism) -> Any:
    """The closed form of a mechanism of ours, or of one made by `kernel_mechanism` or `pattern_mechanism`."""
    if mechanism.make is None:
        return _COSTS.get(mechanism.name)
    if mechanism.family == "sparse":
        return with_made(sparse.pattern_cost, "pattern", mechanism.make, mechanism.name)
    # A closed form reads the number of features, `m`, itself: it may be a symbol.
    return with_made(linear.linear_attention_cost, "feature_map", mechanism.make, mechanism.name, but=("m",))


for _mechanism in MECHANISMS.values():
    _mechanism.cost = closed_form_of(_mechanism)
