"""The kinds of heads that the learning experiments compare: functions that make a layer of them, and its cost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from ortho.checks import positive_int
from ortho.cost import Cost, synthesizer
from ortho.cost.layers import layer, positional_heads, stopped_layer
from ortho.layers.multihead import MultiheadAttention
from ortho.layers.positional import PositionalHeads
from ortho.projections import FrozenProjection
from paper.experiments.learning.heads import (
    StoppedRotaryAttention,
    TemperatureProjection,
    TiedProjection,
    low_rank,
    random_feature_heads,
    scaled,
    synthesizer_heads,
    window_heads,
)

RANK = 2  # of a head's low-rank matrices
FACTOR = 4.0  # by which badly scaled matrices are too large, or too small
FEATURES = 64  # of FAVOR+: of the order K ln K for heads of 16 to 32 dimensions


@dataclass(frozen=True)
class Kind:
    """`make` makes a layer of some heads, as an entry of `ortho.HEADS` does; `cost` is its closed form, exact in
    FLOPs of matrix products and in trained parameters. `facts` describe it further, besides its name."""

    make: Callable[..., nn.Module]
    cost: Callable[..., Cost]
    facts: Mapping[str, int | float] = field(default_factory=dict)


def kinds(N: int) -> dict[str, Kind]:
    """The kinds by name, for sequences of at most N tokens. Raises TypeError or ValueError for an N below 1.

    Softmax heads, learned, frozen or stopped, turn queries and keys by their positions (rotary), except for 'softmax'
    and 'alibi'. A window holds an eighth of the sequence, but at least 4 tokens.
    """
    width = max(4, positive_int("N", N) // 8)
    found = {
        "learned": _by_name("learned", "rotary"),
        "softmax": _by_name("learned", "softmax"),
        "alibi": _by_name("learned", "alibi"),
        "positional": Kind(PositionalHeads, positional_heads),
        "identity": Kind(_identity, _identity_cost),
        "frozen temperature": _temperature("frozen"),
        "stopped temperature": _temperature("stopped"),
        "tied": Kind(partial(MultiheadAttention, projection=TiedProjection, attention="rotary"), _tied_cost),
        **_frozen_kinds(),
    }
    sources = {"static random": "fixed-random", "random Synthesizer": "random", "dense Synthesizer": "dense"}
    for name, source in sources.items():
        own: dict[str, Any] = {"source": source, "max_length": N}
        found[name] = Kind(partial(synthesizer_heads, **own), partial(synthesizer, **own))
    for projection, prefix in (("learned", ""), ("frozen", "frozen ")):
        own = {"projection": projection}
        found |= {
            f"{prefix}linear": _by_name(projection, "linear"),
            f"{prefix}delta": _by_name(projection, "delta"),
            f"{prefix}window": Kind(
                partial(window_heads, width=width, **own),
                partial(layer, attention="window", width=width, **own),
                {"window": width},
            ),
            f"{prefix}FAVOR+": Kind(
                partial(random_feature_heads, m=FEATURES, **own),
                partial(layer, attention="favor", m=FEATURES, **own),
                {"features": FEATURES},
            ),
        }
    return found


def _by_name(projection: str, attention: str) -> Kind:
    """The kind of heads with this projection and mechanism, by their names in both the layer and its closed form."""
    names: dict[str, Any] = {"projection": projection, "attention": attention}
    return Kind(partial(MultiheadAttention, **names), partial(layer, **names))


def _rotary(name: str, made: Any, **facts: int | float) -> Kind:
    """Rotary heads with the projection that `made` makes; it costs what the projection of that name does."""
    if name == "stopped":
        return Kind(partial(StoppedRotaryAttention, projection=made), partial(stopped_layer, projection=name), facts)
    make = partial(MultiheadAttention, projection=made, attention="rotary")
    return Kind(make, partial(layer, projection=name, attention="rotary"), facts)


def _frozen_kinds() -> dict[str, Kind]:
    """Frozen and stopped heads with orthogonal, Gaussian, low-rank and badly scaled matrices; learned heads that begin
    with low-rank or too large matrices."""
    found = {}
    for name in ("frozen", "stopped"):
        found[name] = _rotary(name, name)
        gaussian = partial(FrozenProjection, draw="gaussian", stop_gradient=name == "stopped")
        found[f"{name} Gaussian"] = _rotary(name, gaussian)
        found[f"{name} 1/4 x"] = _rotary(name, partial(scaled, of=name, factor=1 / FACTOR), factor=1 / FACTOR)
    for name in ("learned", "frozen", "stopped"):
        found[f"{name} low-rank"] = _rotary(name, partial(low_rank, of=name, rank=RANK), rank=RANK)
        found[f"{name} 4 x"] = _rotary(name, partial(scaled, of=name, factor=FACTOR), factor=FACTOR)
    return found


def _identity(d_model: int, num_heads: int, **kwargs: Any) -> PositionalHeads:
    """Heads in which each token attends to itself."""
    return PositionalHeads(d_model, num_heads, patterns=("current",) * num_heads, **kwargs)


def _identity_cost(B: int, N: int, d: int, H: int, **kwargs: Any) -> Cost:
    return positional_heads(B, N, d, H, patterns=("current",) * H, **kwargs)


def _temperature(name: str) -> Kind:
    projection = partial(TemperatureProjection, stop_gradient=name == "stopped")
    make = partial(MultiheadAttention, projection=projection, attention="rotary")
    return Kind(make, partial(_temperature_cost, projection=name))


def _temperature_cost(B: int, N: int, d: int, H: int, **kwargs: Any) -> Cost:
    bare = layer(B, N, d, H, attention="rotary", **kwargs)
    return replace(bare, trained=bare.trained + H)


def _tied_cost(B: int, N: int, d: int, H: int, *, head_dim: int | None = None, **kwargs: Any) -> Cost:
    """Queries and keys take one product together, forward and backward."""
    bare = layer(B, N, d, H, head_dim=head_dim, projection="frozen", attention="rotary", **kwargs)
    product = 2 * B * N * d * (d if head_dim is None else H * head_dim)
    return replace(bare, forward=bare.forward - product, backward=bare.backward - product)
