"""Check arguments against their annotations: `@checked` refuses what they do not allow, with one wording everywhere.

A check either raises or changes nothing. It raises TypeError or ValueError, `name: expected ..., got ...`.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import Parameter, isclass, isfunction, signature
from math import isfinite
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, overload

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from ortho._checks import values as _checks
from ortho._checks.values import FORMS, describe
from ortho._typing import Shaped, Size, State, shaped

F = TypeVar("F", bound=Callable[..., Any])

# The least integer that an argument of this name may be, where that is not 1; None: any.
LEAST: dict[str, int | None] = {
    "age": 0, "ahead": 0, "distance": 0, "erase": 0, "first": 0, "last": 0, "offset": None, "past": 0,
    "q_start": 0, "seed": None, "segments": 0, "split": None, "start": None, "stop": None,
}  # fmt: skip
MEANT = {"key_padding_mask": " (True = padding)"}  # what a value of this argument means
WIDTHS = ("K", "V")  # of closed forms; they may be 0, so that one product alone is counted


def _all_fit(_: Any) -> bool:
    return True


class Kind(NamedTuple):
    """One alternative that an annotation allows: a type, and a range of its values."""

    wanted: str
    accepts: Callable[[Any], bool]
    fits: Callable[[Any], bool] = _all_fit


@overload
def checked(function: F) -> F: ...
@overload
def checked(*, shapes: bool = True, values: bool = True, own: tuple[str, ...] = ()) -> Callable[[F], F]: ...
def checked(function: Any = None, *, shapes: bool = True, values: bool = True, own: tuple[str, ...] = ()) -> Any:
    """`function`, made to refuse arguments that their annotations do not allow.

    Integers are at least 1, or what `LEAST` says, and other numbers are finite. Tensors have the kind of dtype that the
    annotation says. With `shapes` they also have its axes; axes of one name have one size, and d is a module's
    `d_model`. With `values` as well, they hold finite numbers. The function itself checks what is left out of this, and
    all arguments in `own`. Numbers that cannot be computed with, and tensors on the device meta whose values are
    needed, are refused too. Defaults are not checked, and nothing is checked while compiling.
    """

    def held(one: Any) -> Any:
        if not isclass(one):
            return _wrapped(one, shapes, values, own)
        # a dataclass, whose fields are its arguments
        setattr(one, "__init__", _wrapped(one.__dict__["__init__"], shapes, values, own))  # noqa: B010 - for mypy
        return one

    return held if function is None else held(function)


def all_checked(module: str) -> None:
    """Apply `checked` to each public function of a module. Call it after the functions and before tables that hold some
    of them."""
    names = vars(sys.modules[module])
    for name, value in list(names.items()):
        if isfunction(value) and value.__module__ == module and not name.startswith("_"):
            names[name] = checked(value)


def _wrapped(function: Callable[..., Any], shapes: bool, values: bool, own: tuple[str, ...]) -> Callable[..., Any]:
    made: list[Rules] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not made:
            made.append(_rules(function, shapes, values, own))
        rules = made[0]
        allowed, together = rules.allowed, rules.shapes or rules.others
        for name, value in zip(rules.positions, args, strict=False):
            if name in allowed and not allowed[name](value):
                _refuse(name, value, rules.kinds[name])
        for name, value in kwargs.items():
            if name in allowed and not allowed[name](value):
                _refuse(name, value, rules.kinds[name])
        if together:
            rules.look_together(args, kwargs)
        for name in rules.masks:
            if kwargs.get(name) is not None:
                rules.look_at_mask(name, kwargs[name], (*args, *kwargs.values()))
        try:
            return function(*args, **kwargs)
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            _explain(error, [*rules.given(args), *kwargs.items()])
            raise

    return call


class Rules(NamedTuple):
    """The rules for a function's arguments: by name, positional ones first, and those of `*args`."""

    positions: tuple[str, ...]
    others: str
    kinds: dict[str, tuple[Kind, ...]]
    allowed: dict[str, Callable[[Any], bool]]  # whether a value is one of the kinds
    shapes: dict[str, Shaped]
    masks: tuple[str, ...]
    values: bool

    def given(self, args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
        """Positional arguments with their names."""
        yield from zip(self.positions, args, strict=False)
        yield from ((self.others, value) for value in args[len(self.positions) :])

    def look_at_mask(self, name: str, mask: Tensor, given: tuple[Any, ...]) -> None:
        """Raise TypeError for a mask on another device than the operands."""
        first = next((x for x in given if isinstance(x, Tensor) and x is not mask), None)
        if first is not None and mask.device != first.device:
            raise TypeError(f"{name}: expected a tensor on {first.device} like the others, got one on {mask.device}")

    def look_together(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TypeError or ValueError for sizes that do not agree, and for `*args` that are not allowed."""
        for value in args[len(self.positions) :]:
            if self.others in self.allowed and not self.allowed[self.others](value):
                _refuse(self.others, value, self.kinds[self.others])
        if not self.shapes:
            return
        width = getattr(args[0], "d_model", None) if self.positions[:1] == ("self",) else None
        sizes: dict[str, tuple[str, Any]] = {} if width is None else {"d": ("d_model", width)}
        for name, value in (*self.given(args), *kwargs.items()):
            if name in self.shapes and isinstance(value, Tensor):
                _hold_shape(name, value, self.shapes[name].axes, sizes)
                if self.values and value.is_floating_point():
                    _checks.finite(name, value)


def _rules(function: Callable[..., Any], shapes: bool, values: bool, own: tuple[str, ...]) -> Rules:
    positions: list[str] = []
    others = ""
    kinds: dict[str, tuple[Kind, ...]] = {}
    axes: dict[str, Shaped] = {}
    for name, parameter in signature(function).parameters.items():
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            positions.append(name)
        if parameter.kind is Parameter.VAR_POSITIONAL:
            others = name
        if parameter.kind is Parameter.VAR_KEYWORD or parameter.annotation is Parameter.empty or name in own:
            continue
        parts = _parts(parameter.annotation)
        if allowed := _kinds(name, parts, parameter.default):
            kinds[name] = allowed
        for found in filter(None, map(shaped, parts if shapes else ())):
            axes[name] = found
    masks = tuple(name for name, found in kinds.items() if found[0].wanted == _TENSORS["bool"][0])
    each = {name: _allowed(found) for name, found in kinds.items()}
    return Rules(tuple(positions), others, kinds, each, axes, masks, values)


def _allowed(kinds: tuple[Kind, ...]) -> Callable[[Any], bool]:
    """Test whether a value is one of the kinds, with as few calls as possible: it runs in every call of a function."""
    empty = any(kind.wanted == "None" for kind in kinds)
    if len(kinds) > 1 + empty or kinds[0].wanted == "None":
        return lambda value: any(kind.accepts(value) and kind.fits(value) for kind in kinds)
    _, accepts, fits = kinds[0]
    if fits is not _all_fit:
        return lambda value: (empty and value is None) or (accepts(value) and fits(value))
    return (lambda value: value is None or accepts(value)) if empty else accepts


def _parts(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the single type; names that are not yet defined stay text."""
    if isinstance(annotation, str):
        return tuple(None if part == "None" else part for part in annotation.split(" | "))
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _kinds(name: str, parts: tuple[Any, ...], default: Any = ..., least: int | None = 1) -> tuple[Kind, ...]:
    """What the parts of an annotation allow; () where one of them allows all."""
    if torch.device in parts:
        parts = (torch.device, *(part for part in parts if part not in (torch.device, str)))
    found = [_kind(name, part, LEAST.get(name, 1) if least else None) for part in parts]
    if default is None:
        found.append(_kind(name, NoneType, None))
    return () if None in found else tuple(one for one in found if one)


def _kind(name: str, part: Any, least: int | None) -> Kind | None:
    """What one type allows; None if anything."""
    if part is Size:
        least = 0 if name in WIDTHS else least or 0
        wanted = f"an integer of at least {least}"
        return Kind(
            wanted, lambda x: _is_integer(x) or hasattr(x, "free_symbols"), lambda x: not _is_integer(x) or x >= least
        )
    if part is State:
        return None  # the function itself checks what is in a state
    if part is bool:
        return Kind("True or False", lambda x: isinstance(x, bool))
    if part is int and least is None:
        return Kind("an integer", _is_integer)
    if part is int:
        return Kind(f"an integer of at least {least}", _is_integer, lambda x: x >= least)
    if part is str and name == "form":
        return Kind(f"one of {', '.join(map(repr, FORMS))}", lambda x: isinstance(x, str), lambda x: x in FORMS)
    if part is float:
        return Kind("a finite number", lambda x: isinstance(x, int | float) and not isinstance(x, bool), isfinite)
    if part is torch.dtype:
        return Kind("a floating-point type", lambda x: isinstance(x, torch.dtype) and x.is_floating_point)
    if part is torch.device:
        return Kind("a device of this machine", lambda x: isinstance(x, torch.device | str), _is_device)
    if part in (None, NoneType):
        return Kind("None", lambda x: x is None)
    if of := shaped(part):
        wanted, accepts = _TENSORS[of.kind]
        return Kind(wanted + MEANT.get(name, ""), accepts)
    return _container(name, part)


def _container(name: str, part: Any) -> Kind | None:
    """What an annotation of a function, a sequence, a mapping or a class allows; None if anything."""
    if isinstance(part, str):
        return (
            Kind(f"a {part}", lambda x: part in [one.__name__ for one in type(x).__mro__])
            if part.isidentifier()
            else None
        )
    origin = get_origin(part) or part
    if isinstance(part, TypeVar):
        return _kind(name, part.__bound__, None) if isclass(part.__bound__) else None
    if origin is Callable:
        return Kind("a function", callable)
    if part is Any or not isclass(origin) or (getattr(origin, "_is_protocol", False) and origin not in _ABSTRACT):
        return None
    if origin is tuple or origin in _ABSTRACT:
        inner = tuple(_kinds(name, _parts(one), least=None) for one in get_args(part) if one is not ...)
        endless, wanted = ... in get_args(part), _ABSTRACT.get(origin, "a tuple")
        if inner and all(inner):
            each = " to ".join(map(_wanted, inner if origin is Mapping else inner[:1]))
            wanted += f" (of {each} each)"
        return Kind(wanted, _of(origin), lambda x: _elements(x, origin, inner, endless))
    title = {torch.nn.Module: "nn.Module", Tensor: "tensor"}.get(origin, origin.__name__)
    article = "" if title.endswith("s") and not title.endswith("ss") else "an " if title[0] in "AEIOUn" else "a "
    return Kind("a name" if origin is str else article + title, lambda x: isinstance(x, origin))


_ABSTRACT: dict[Any, str] = {Sequence: "a sequence", Mapping: "a mapping", Iterable: "something to go through"}
_INTEGERS = (torch.int64, torch.int32)
_TENSORS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "float": ("a floating-point tensor", lambda x: isinstance(x, Tensor) and x.is_floating_point()),
    "bool": ("a boolean tensor", lambda x: isinstance(x, Tensor) and x.dtype == torch.bool),
    "int": ("int32 or int64 indices", lambda x: isinstance(x, Tensor) and x.dtype in _INTEGERS),
}


def _of(origin: Any) -> Callable[[Any], bool]:
    types: tuple[type, ...] = (tuple, list) if origin is tuple else (origin,)
    return lambda x: isinstance(x, types) and not isinstance(x, str | bytes)


def _elements(value: Any, origin: Any, inner: tuple[tuple[Kind, ...], ...], endless: bool) -> bool:
    """Whether what a container holds is allowed; an iterator is not consumed."""
    if origin is Iterable or not all(inner):
        return True
    if origin is Mapping:
        rows: Iterable[Any] = [(each, kinds) for item in value.items() for each, kinds in zip(item, inner, strict=True)]
    elif origin is tuple and not endless:
        if len(value) != len(inner):
            return False
        rows = zip(value, inner, strict=True)
    else:
        rows = ((each, inner[0]) for each in value)
    return all(any(kind.accepts(each) and kind.fits(each) for kind in kinds) for each, kinds in rows)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_device(value: Any) -> bool:
    """Whether there is such a device here."""
    try:
        device = torch.device(value)
        return device.type == "meta" or torch.empty(0, device=device) is not None
    except (AssertionError, NotImplementedError, RuntimeError):
        return False


def _refuse(name: str, value: Any, kinds: tuple[Kind, ...]) -> None:
    """Raise ValueError for a value of an allowed type that is out of its range, else TypeError."""
    if any(kind.accepts(value) for kind in kinds):
        got = repr(value) if isinstance(value, int | float | str) else describe(value)
        raise ValueError(f"{name}: expected {_wanted(kinds)}, got {got}")
    raise TypeError(f"{name}: expected {_wanted(kinds).replace('finite ', '')}, got {describe(value)}")


def _wanted(kinds: tuple[Kind, ...]) -> str:
    wanted = list(dict.fromkeys(kind.wanted for kind in kinds if kind.wanted != "None"))
    if any(one.endswith(" number") for one in wanted):  # which include integers
        wanted = [one for one in wanted if not one.startswith("an integer")]
    return "True, False or None" if wanted == ["True or False"] and len(kinds) > 1 else " or ".join(wanted) or "None"


def _hold_shape(name: str, value: Tensor, axes: tuple[str, ...], sizes: dict[str, tuple[str, Any]]) -> None:
    """Raise ValueError unless a tensor has these axes, none empty, with the known `sizes`; new ones are added there."""
    fixed = [axis for axis in axes if axis != "..." and not axis.startswith("*")]
    shape, rank = tuple(value.shape), value.dim()
    wanted = f"({', '.join('...' if axis.startswith('*') else axis for axis in axes)}{',' * (len(axes) == 1)})"
    if 0 in shape or rank < len(fixed) or (len(fixed) == len(axes) and rank != len(fixed)):
        raise ValueError(f"{name}: expected shape {wanted} without empty axes, got {shape}")
    if axes[len(axes) - len(fixed) :] != tuple(fixed):
        return  # axes of varying number are in between
    found: list[tuple[str, Any]] = list(zip(fixed, shape[rank - len(fixed) :], strict=True))
    if len(axes) == len(fixed) + 1:
        found.append((axes[0].lstrip("*"), shape[: rank - len(fixed)]))
    for axis, size in found:
        other, known = ("", int(axis)) if axis.isdigit() else sizes.setdefault(axis, (name, size))
        if size != known and (axis.isidentifier() or axis.isdigit()):
            like = f" like {other}" if other else ""
            raise ValueError(f"{name}: expected shape {wanted} with {axis} = {known}{like}, got {shape}")


_SHAPES = "cannot be multiplied|must match|must be equal|dimension|1-?D|both arguments"  # as PyTorch says it


def _explain(error: Exception, given: list[tuple[str, Any]]) -> None:
    """Raise TypeError or ValueError that names the arguments, if their values explain an error from elsewhere."""
    text = str(error)
    if re.match(r"[\w, .]*\w: expected ", text):  # one of ours
        return
    for name, value in given:
        if getattr(getattr(value, "device", None), "type", "") == "meta":
            raise ValueError(f"{name}: expected a tensor that has values, got {describe(value)} on meta") from error
        if name == "device" and value is not None and torch.device(value).type == "meta":
            raise ValueError(f"device: expected one where tensors have values, got {describe(value)}") from error
    tensors = [(name, value) for name, value in given if isinstance(value, Tensor)]
    if isinstance(error, RuntimeError) and tensors and re.search("dtype|scalar type|types other|implemented for", text):
        raise TypeError(_told(tensors, "tensors of one dtype that can be computed with", text)) from error
    if isinstance(error, RuntimeError) and tensors and re.search(_SHAPES, text):
        raise ValueError(_told(tensors, "shapes that fit together", text)) from error
    if isinstance(error, ArithmeticError | LinAlgError) or text.startswith("math "):
        numbers = tensors + [(name, value) for name, value in given if isinstance(value, int | float)]
        if not numbers:
            return
        raise ValueError(_told(numbers, "numbers that can be computed with", text)) from error


def _told(given: list[tuple[str, Any]], wanted: str, text: str) -> str:
    got = ", ".join(describe(value) for _, value in given)
    return f"{', '.join(name for name, _ in given)}: expected {wanted}, got {got} ({text.splitlines()[0]})"
