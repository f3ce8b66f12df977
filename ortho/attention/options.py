"""Options of an attention: the arguments of its functions that a layer or a cache takes by their names."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn

from ortho.attention.mechanism import Mechanism
from ortho.checks import describe, unknown

# Arguments of attention functions that a layer gives itself.
GIVEN = {"q", "k", "v", "is_causal", "attn_mask", "scale", "initial_state", "return_state", "same_tokens"}


def options_of(function: Callable[..., Any], gates: Mapping[str, Any]) -> list[str] | None:
    """The names of an attention function's own options, without its gates; None if it takes any name."""
    parameters = _parameters(function).values()
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
        if any(str(error).startswith(f"{name}: ") for name in given):
            raise
        got = f"{described(mechanism.name, options)}: {error}"
        raise ValueError(f"{', '.join(options)}: expected what the attention can be called with, got {got}") from error
    return given


def check_names(what: str, function: Callable[..., Any], options: Mapping[str, Any], gates: Mapping[str, Any]) -> None:
    """TypeError for an option that an attention function, which is `what`, does not have."""
    known = options_of(function, gates)
    if known is None:
        return
    for name in options:
        if name not in known:
            wanted = unknown("options", name, known) if known else f"options: expected none, got {name!r}"
            raise TypeError(f"{wanted}, with the attention {what}")


def takes_state(function: Callable[..., Any]) -> bool:
    """Whether an attention function can go on from a state."""
    parameters = _parameters(function)
    return "initial_state" in parameters or any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())


def _parameters(function: Callable[..., Any]) -> Mapping[str, Parameter]:
    return signature(function.forward if isinstance(function, nn.Module) else function).parameters


def described(attention: Any, options: Mapping[str, Any]) -> str:
    """An attention and its options in words: "window, width=64"."""
    name = attention if isinstance(attention, str) else _name(attention)
    shown = (
        f"{key}={value!r}" if not torch.is_tensor(value) else f"{key}={describe(value)}"
        for key, value in (getattr(attention, "keywords", {}) | dict(options)).items()
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
