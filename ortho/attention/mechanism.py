"""What an attention mechanism is: a definition, a fast form, and what each costs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ortho._checks import FORMS as FORMS
from ortho._checks import one_of
from ortho._cost import Cost
from ortho._typing import State

AttentionCost = Cost  # its name before

# Scalar operations per element that a composite kernel is counted as, by its textbook definition.
SOFTMAX_FORWARD = 5  # maximum, subtract, exp, sum, divide
SOFTMAX_BACKWARD = 4  # multiply by the weights, sum, subtract, multiply
# A fused backward kernel, a score: scale, subtract the log-sum-exp, exp; subtract the row's term, multiply, scale.
FUSED_BACKWARD = 6


def causal_pairs(N: Any) -> Any:
    """The number of (query, key) pairs with key <= query, N (N + 1) / 2, exact for integers and symbols alike."""
    return N * (N + 1) // 2 if isinstance(N, int) else N * (N + 1) / 2


@runtime_checkable
class AttentionFunction(Protocol):
    """The one signature of every mechanism: q (..., N, K), k (..., M, K), v (..., M, V) -> o (..., N, V)."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool = False,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        initial_state: State | None = None,
        return_state: bool = False,
    ) -> Any: ...


@dataclass(frozen=True)
class Mechanism:
    """An entry of `MECHANISMS`.

    `cost(B, N, H, K, V, *, form, causal, qk_grad, itemsize)` is the closed form of one call on (B, H, N, ·) operands;
    `qk_grad` says whether autograd must reach q and k, or v alone. What the functions take besides has a default that
    works; `gates` has the classes (of `ortho.gates.Gate`) by which a layer makes it, by the argument's name: from the
    keys' tokens, and for the names in `query_gates` from the queries'. The closed form is that of a call with gates,
    which need a gradient.
    """

    name: str
    family: str
    source: str
    reference: AttentionFunction
    fast: AttentionFunction
    causal: bool  # whether is_causal=True is served
    bidirectional: bool = field(default=True, kw_only=True)  # whether is_causal=False is
    exact: bool  # whether the result is softmax attention itself, not an approximation or another function
    cost: Callable[..., Cost]
    positional: bool = False  # whether the result depends on where a token stands, not only on what it is
    signed: bool = False  # whether weights may be negative
    fitted: bool = False  # whether it fits constants to the sequence, through which autograd does not differentiate
    gates: Mapping[str, type[Any]] = field(default_factory=dict)
    query_gates: frozenset[str] = frozenset()
    one_sequence: bool = False  # whether each query must be one of the keys' tokens
    gives_weights: bool = True  # whether the result is weights, of queries, keys and gates, times the values
    same_tokens: bool = False  # whether the functions take `same_tokens`, which says that it is

    def form(self, name: str) -> AttentionFunction:
        """The function of that form, 'reference' or 'fast'."""
        return self.reference if one_of("form", name, FORMS) == "reference" else self.fast
