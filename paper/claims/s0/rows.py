r"""S0, section 3.1: the rows of the source's comparison, and the closed form behind each."""

from typing import Any

import sympy
from torch import nn

from ortho.attention.linear.favor import FEATURES
from ortho.cost import layer, synthesizer
from ortho.cost.big_o import H, N, d, m
from ortho.layers.multihead import MultiheadAttention
from ortho.layers.synthesizer import SynthesizerAttention

COSTS = {
    "learned": layer(1, N, d, H, form="reference"),
    "synthesizer": synthesizer(1, N, d, H),
    "favor": layer(1, N, d, H, attention="favor", m=m),
    "linear": layer(1, N, d, H, attention="linear"),
    "frozen": layer(1, N, d, H, projection="frozen", form="reference"),
    "stopped": layer(1, N, d, H, projection="stopped", form="reference"),
}
NAMES = {
    "learned": "standard",
    "synthesizer": "Synthesizer",
    "favor": "Performer",
    "linear": "linear attention",
    "frozen": "ORA (frozen)",
    "stopped": "frozen, gradient stopped",
}
# As the source prints them: time, space, trained parameters, backward. It has no row for the last layer.
SOURCE = {
    "learned": ("N^2*d + N*d^2", "N^2 + N*d", "4*d^2", "N^2*d + N*d^2"),
    "synthesizer": ("N^2*d + N*d^2", "N^2 + N*d", "4*d^2", "N^2*d + N*d^2"),
    "favor": ("N*d^2 + N*d*log(d)", "N*d", "4*d^2", "N*d^2 + N*d*log(d)"),
    "linear": ("N*d^2", "N*d", "4*d^2", "N*d^2"),
    "frozen": ("N^2*d + N*d^2", "N^2 + N*d", "2*d^2", "N*d^2"),
}


def kept(name: str) -> Any:
    """How many numbers a row's layer keeps from the forward to the backward pass; a byte is a quarter of one."""
    return sympy.expand(COSTS[name].saved_bytes / COSTS[name].itemsize)


def evaluate(formula: Any, length: int, d_model: int, heads: int, features: int = FEATURES) -> int:
    """A closed form at these sizes, exactly. ValueError if it is no integer there."""
    sizes = {N: length, d: d_model, H: heads, m: features}
    value = sympy.sympify(formula).subs(sizes)
    if not value.is_integer:
        raise ValueError(f"formula: expected an integer at {sizes}, got {value} of {formula}")
    return int(value)


def build(name: str, N: int, d_model: int, num_heads: int) -> nn.Module:
    """The layer of a row, to be run on N tokens; the Performer with its default number of features."""
    if name == "synthesizer":
        return SynthesizerAttention(d_model, num_heads, N)
    if name in ("linear", "favor"):
        return MultiheadAttention(d_model, num_heads, attention=name)
    return MultiheadAttention(d_model, num_heads, projection=name, form="reference")
