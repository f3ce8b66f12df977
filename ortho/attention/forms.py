"""The definition and the fast form of a mechanism whose forms differ only in how they compute."""

from collections.abc import Callable
from functools import update_wrapper
from inspect import Parameter, getdoc, signature
from typing import Any

from ortho.attention.call import AttentionFunction, Call, attention_function


def two_forms(
    prepare: Callable[..., tuple[Any, ...]], definition: Callable[..., Any], fast: Callable[..., Any], **kept: Any
) -> tuple[AttentionFunction, AttentionFunction]:
    """(the definition, the fast form), made of what they share and of what computes each.

    `prepare` turns a call and the mechanism's options into the arguments that `definition` and `fast` take after the
    call; options of `fast` are further options of the fast form. `kept` are the arguments of `attention_function`. The
    definition has the docstring of `prepare`, and its name with `_reference`. The fast form has the name, and the
    docstring of `fast`, which speaks of the `definition`.
    """
    name, own = prepare.__name__.strip("_"), signature(prepare)
    sizes = [p for p in signature(fast).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]

    def form(compute: Callable[..., Any], its_name: str, more: list[Parameter]) -> AttentionFunction:
        def body(call: Call, **options: Any) -> Any:
            given = {p.name: options.pop(p.name) for p in more if p.name in options}
            return compute(call, *prepare(call, **options), **given)

        about: Any = update_wrapper(body, prepare)
        about.__name__ = about.__qualname__ = its_name
        about.__signature__ = own.replace(parameters=[*own.parameters.values(), *more])
        if more:
            about.__doc__ = (getdoc(fast) or "").replace(f"`{definition.__name__}`", f"`{name}_reference`")
        return attention_function(**kept)(body)

    return form(definition, f"{name}_reference", []), form(fast, name, sizes)
