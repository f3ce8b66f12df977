"""What an attention mechanism is: a definition, a fast form, and what a layer or a cache has to know of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import Parameter, Signature, getdoc, signature
from typing import Any

from ortho.attention.call import AttentionFunction
from ortho.checks import FORMS, one_of


@dataclass(kw_only=True, eq=False)
class Mechanism:
    """An entry of `MECHANISMS`.

    `cost(B, N, H, K, V, *, form, causal, qk_grad, itemsize)` is the closed form of one call on (B, H, N, ·) operands;
    None if there is none. `ortho.cost.mechanisms` has, and enters, those of our own mechanisms. Further arguments of
    the functions have defaults that work. `gates` maps the names of those that a layer computes to their classes (of
    `ortho.gates.Gate`): they are made from the keys' tokens or, for names in `query_gates`, from the queries'. The
    closed form is for a call with gates, which need a gradient. All other arguments that the functions do not share are
    options, which a layer takes by their names; where a name would collide with an operand's, `option_names` has the
    layer's name and the function's.
    """

    name: str
    reference: AttentionFunction
    fast: AttentionFunction
    family: str = "own"  # the folder of `ortho.attention` that it is in
    source: str = ""
    cost: Any = None
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
    make: Any = None  # makes the pattern, or the feature map, from the options; None if the functions need neither

    def form(self, name: str) -> AttentionFunction:
        """The function of that form, 'reference' or 'fast'."""
        return self.reference if one_of("form", name, FORMS) == "reference" else self.fast


def with_made(
    form: Callable[..., Any], argument: str, make: Callable[..., Any], name: str, *, but: tuple[str, ...] = ()
) -> Any:
    """`form` with the options of `make` in place of the `argument` that this makes: `favor_attention(q, k, v, m=128)`.

    The function is named after the mechanism, and has what `make` makes by default as an attribute. Options in `but`
    stay those of `form`.
    """
    default, known = make(), signature(form).parameters
    own = {n: p.replace(kind=Parameter.KEYWORD_ONLY) for n, p in signature(make).parameters.items() if n not in but}

    def attend(*args: Any, **given: Any) -> Any:
        options = {n: given.pop(n) for n in own if n in given}
        return form(*args, **{argument: make(**options) if options else default}, **given)

    about: Any = attend
    kept = [p for n, p in known.items() if n != argument]
    about.__signature__ = Signature(sorted([*kept, *own.values()], key=lambda p: p.kind))
    about.__name__ = about.__qualname__ = "_".join(
        [name.replace("-", "_").replace("+", "_plus"), *form.__name__.split("_")[1:]]
    )
    about.__module__ = form.__module__
    about.__doc__ = f"`{form.__name__}` with the {argument} `{default!r}` or, with options, another of its class."
    if docs := getdoc(make.func if isinstance(make, partial) else make):
        about.__doc__ += f"\n\n{docs}"
    about.keeps = getattr(form, "keeps", "keys")
    setattr(about, argument, default)
    return about
