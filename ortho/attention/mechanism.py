"""What an attention mechanism is: a definition, a fast form, and what each costs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple

import torch
from torch import nn

from ortho._cost import Cost, product, quotient
from ortho._typing import Size
from ortho.attention.call import AttentionFunction as AttentionFunction
from ortho.checks import FORMS as FORMS
from ortho.checks import describe, one_of, unknown


def causal_pairs(N: Any) -> Any:
    """The number of (query, key) pairs with key <= query, N (N + 1) / 2, exact for integers and symbols alike."""
    return quotient(N * (N + 1), 2)


class CostedCall(NamedTuple):
    """The call whose cost is computed: self-attention of queries and keys (B, H, N, K) and values (B, H, N, V).

    `qk_grad` says whether autograd must reach q and k, or v alone.
    """

    B: Size
    N: Size
    H: Size
    K: Size
    V: Size
    form: str = "fast"
    causal: bool = False
    qk_grad: bool = True
    itemsize: int = 4

    @property
    def sizes(self) -> tuple[Size, Size, Size, Size]:
        """(G, N, K, V), where G = B H is the number of sequences."""
        return self.B * self.H, self.N, self.K, self.V

    @property
    def reach(self) -> int:
        """`qk_grad` as a number: 1 if gradients reach q and k, else 0."""
        return int(self.qk_grad)

    @property
    def item(self) -> int:
        """Bytes of a number where computation is in float32 at least."""
        return max(self.itemsize, 4)

    def attending(self, pairs: Size, width: Size = None) -> Cost:
        """The products for `pairs` pairs: scores of vectors of this width, by default K, and weights times values.
        Backward: the values' gradient and, if gradients reach q and k, those of weights, queries and keys."""
        scores = product(pairs * (self.K if width is None else width), 2 * self.reach)
        return scores + product(pairs * self.V, 1 + self.reach)

    def held_keys(self, keys: Size = None) -> Cost:
        """A state of `keys` keys and values, by default N; a new token is multiplied with all of them."""
        numbers = self.B * self.H * (self.N if keys is None else keys) * (self.K + self.V)
        return Cost(decode=2 * numbers, state_bytes=self.itemsize * numbers)

    def by(self, form: Callable[..., Cost], **options: Any) -> Cost:
        """The cost of the same call by another closed form."""
        return form(*self[:5], **dict(zip(self._fields[5:], self[5:], strict=True)), **options)


def closed_form(of: Callable[..., Cost]) -> Callable[..., Cost]:
    """A `Mechanism.cost` made from `of(call, **options)`, where `call` is a `CostedCall`."""

    def cost(
        B: Size,
        N: Size,
        H: Size,
        K: Size,
        V: Size,
        *,
        form: str = "fast",
        causal: bool = False,
        qk_grad: bool = True,
        itemsize: int = 4,
        **options: Any,
    ) -> Cost:
        one_of("form", form, FORMS)
        return of(CostedCall(B, N, H, K, V, form, causal, qk_grad, itemsize), **options)

    return with_options(cost, of)


def with_options(function: Callable[..., Any], form: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the name of `form`, and with the options of `form` in its signature in place of `**options`."""
    given, own = signature(function).parameters, signature(form).parameters
    options = [p for p in own.values() if p.kind is Parameter.KEYWORD_ONLY and p.name not in given]
    kept = [
        p.replace(annotation=own[p.name].annotation) if p.name in own else p
        for p in given.values()
        if p.kind is not Parameter.VAR_KEYWORD
    ]
    by_position = [p for p in kept if p.kind is not Parameter.KEYWORD_ONLY]
    signed: Any = update_wrapper(function, form)
    signed.__signature__ = Signature([*by_position, *options, *kept[len(by_position) :]])
    return function


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """An entry of `MECHANISMS`.

    `cost(B, N, H, K, V, *, form, causal, qk_grad, itemsize)` is the closed form of one call on (B, H, N, ·) operands,
    as `closed_form` makes it; None if there is none. Further arguments of the functions have defaults that work.
    `gates` maps the names of those that a layer computes to their classes (of `ortho.gates.Gate`): they are made from
    the keys' tokens or, for names in `query_gates`, from the queries'. The closed form is for a call with gates, which
    need a gradient. All other arguments that the functions do not share are options, which a layer takes by their
    names; where a name would collide with an operand's, `option_names` has the layer's name and the function's.
    """

    name: str
    reference: AttentionFunction
    fast: AttentionFunction
    family: str = "own"  # the folder of `ortho.attention` that it is in
    source: str = ""
    cost: Any = None  # a closed form, as `closed_form` makes it; None if there is none
    causal: bool = True  # whether is_causal=True is supported
    bidirectional: bool = True  # whether is_causal=False is supported
    exact: bool = False  # whether the result is softmax attention itself, not an approximation or another function
    positional: bool = False  # whether the result depends on where a token stands, not only on what it is
    signed: bool = False  # whether weights may be negative
    data_dependent: bool = False  # whether it fits constants to the sequence; no gradient flows through them
    gates: Mapping[str, type[Any]] = field(default_factory=dict)
    query_gates: frozenset[str] = frozenset()
    option_names: Mapping[str, str] = field(default_factory=dict)
    self_attention_only: bool = False  # whether each query must be one of the keys' tokens
    has_weights: bool = True  # whether the result is weights, made of queries, keys and gates, times the values
    same_tokens: bool = False  # whether the functions take `same_tokens`: query i and key i are one token

    def form(self, name: str) -> AttentionFunction:
        """The function of that form, 'reference' or 'fast'."""
        return self.reference if one_of("form", name, FORMS) == "reference" else self.fast


# Arguments of attention functions that a layer gives itself.
GIVEN = {*signature(AttentionFunction.__call__).parameters, "same_tokens"}


def options_of(function: Callable[..., Any], gates: Mapping[str, Any]) -> list[str] | None:
    """The names of an attention function's own options, which are no gates; None if it takes any."""
    of = function.forward if isinstance(function, nn.Module) else function
    parameters = signature(of).parameters.values()
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY and p.name not in GIVEN | gates.keys()]


def check_options(
    mechanism: Mechanism, form: str, options: Mapping[str, Any], H: int = 1, K: int = 8
) -> dict[str, Any]:
    """The options by the function's names, after a call on two tokens, by H heads of width K.

    Raises TypeError for an unknown option, and ValueError for values with which the call fails.
    """
    if not options:
        return {}
    given = {mechanism.option_names.get(name, name): value for name, value in options.items()}
    function, q = mechanism.form(form), torch.zeros(1, H, 2, K, device="cpu")
    check_names(repr(mechanism.name), function, given, mechanism.gates)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            function(q, q, q, is_causal=mechanism.causal, **given)
    except Exception as error:
        got = f"{described(mechanism.name, options)}: {error}"
        raise ValueError(f"{', '.join(options)}: expected what the attention can be called with, got {got}") from error
    return given


def check_names(what: str, function: Callable[..., Any], options: Mapping[str, Any], gates: Mapping[str, Any]) -> None:
    """TypeError for an option that an attention function, which is `what`, does not have."""
    known = options_of(function, gates)
    for name in options if known is not None else ():
        if known is not None and name not in known:
            wanted = unknown("options", name, known) if known else f"options: expected none, got {name!r}"
            raise TypeError(f"{wanted}, with the attention {what}")


def described(attention: Any, options: Mapping[str, Any]) -> str:
    """An attention and its options in words: "window, width=64"."""
    name = attention if isinstance(attention, str) else _name(attention)
    shown = (
        f"{key}={value!r}" if not torch.is_tensor(value) else f"{key}={describe(value)}"
        for key, value in options.items()
    )
    return ", ".join([name, *shown])


def _name(attention: Any) -> str:
    function = attention.func if isinstance(attention, partial) else attention
    return getattr(function, "__name__", type(function).__name__)


def sums_keys(function: Callable[..., Any]) -> bool:
    """Whether an attention function keeps sums of its keys as a state, so that a mask beside a state is of the new keys
    alone. A function or module of your own says so by an attribute, `keeps = "sums"`."""
    function = function.func if isinstance(function, partial) else function
    return getattr(function, "keeps", "keys") == "sums"
