"""Calls of the package's public functions and classes, drawn from their signatures, with one argument replaced.

A valid call of each comes from annotations and from tables of values: by the argument's name, and by the function's
where that is not enough. `outcome` says what became of a call; run as a script, this prints how many calls of all
have which, and with names of functions what they are.
"""

import inspect
from copy import deepcopy
import re
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import UnionType
from typing import Any, NamedTuple

import torch
from torch import nn
from fuzz_values import Odd, odd_values
from fuzz_targets import BY_FUNCTION, BY_NAME, SIZES, targets

ALLOWED = (("None", "None"), ("tensor", "Tensor"), ("list", "Sequence"), ("module", "Callable"))  # by annotations
SECONDS = 5  # for one call; nothing here should take more than a hundredth of it


class Call(NamedTuple):
    """A call of a function with one argument that is odd."""

    label: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    name: str
    odd: Odd

    def __str__(self) -> str:
        return f"{self.label}({self.name}={self.odd.label})"


def kinds(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the one that there is."""
    return getattr(annotation, "__args__", ()) if isinstance(annotation, UnionType) else (annotation,)


def tensor(annotation: Any) -> torch.Tensor | None:
    """What fits an annotation of a tensor's shape; None for another annotation, and for one without a shape."""
    for one in kinds(annotation):
        axes = getattr(one, "dim_str", "...").split()
        if "..." in axes[:1] and len(axes) == 1:
            continue
        shape: list[int] = []
        for axis in axes:
            lead = [2, 2] if axis in ("*batch", "*heads") else [] if axis == "..." else None
            shape += [SIZES.get(axis, int(axis) if axis.isdigit() else 3)] if lead is None else lead
        generator = torch.Generator().manual_seed(len(shape))
        found = " ".join(map(str, one.dtypes))
        if "float" in found:
            return torch.rand(shape, generator=generator, dtype=torch.float64)
        return torch.randint(2, shape, generator=generator) if "int" in found else torch.ones(shape, dtype=torch.bool)
    return None


def valid(label: str, parameter: inspect.Parameter) -> Any:
    """A valid value of a parameter; None where nothing says one."""
    own, name, types = BY_FUNCTION.get(label, {}), parameter.name, kinds(parameter.annotation)
    if name in own:
        return own[name]
    if parameter.default is not None and parameter.default is not parameter.empty:
        return parameter.default
    if (found := tensor(parameter.annotation)) is not None:
        return found
    known = BY_NAME.get(name)
    for kind, other in ((int, SIZES.get(name, 3)), (float, 0.5), (bool, False)):
        if kind in types:
            return known if type(known) is kind else other
    return torch.Generator() if torch.Generator in types else known


def calls(label: str, function: Callable[..., Any], *, whole: bool = False) -> Iterator[Call]:
    """All calls of a function; with `whole` the valid one alone."""
    parameters = inspect.signature(function).parameters.values()
    plain = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    own = BY_FUNCTION.get(label, {})
    needed = {p.name: valid(label, p) for p in plain if p.default is p.empty} | own
    if whole:
        yield Call(label, function, needed, "", Odd("", None, False))
        return
    for p in plain:
        base, allowed = valid(label, p), str(p.annotation)
        for odd in odd_values(p.name, base, p.default):
            if any(odd.label == label and word in allowed for label, word in ALLOWED):
                continue
            yield Call(label, function, needed | {p.name: odd.value}, p.name, odd)


@contextmanager
def in_time() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(call: Call) -> str:
    """'works', 'refused', or what is wrong."""
    arguments = {n: deepcopy(v) if isinstance(v, nn.Module) else v for n, v in call.arguments.items()}
    try:
        with in_time():
            result = call.function(**arguments)
            if inspect.isgenerator(result):
                list(result)
    except (TypeError, ValueError) as error:
        if type(error) not in (TypeError, ValueError):
            return type(error).__name__
        text = str(error)
        if re.match(rf"([\w\[\]\" ,.'-]+: )?[^:]*\b{re.escape(call.name)}\b", text) and "got" in text:
            return "refused"
        if re.match(r"[\w, ']+: expected .* got ", text, re.DOTALL):
            return "refused by another name"
        return f"{type(error).__name__} of no argument"
    except TimeoutError:
        return "hangs"
    except Exception as error:
        return type(error).__name__
    return "accepted nonsense" if call.odd.nonsense else "works"


FINE = ("works", "refused")


def main(names: list[str]) -> None:
    counts: Counter[str] = Counter()
    for label, function in targets().items():
        if names and not any(name in label for name in names):
            continue
        for call in calls(label, function, whole=True):
            try:
                with in_time():
                    function(**call.arguments)
            except Exception as error:
                print("INVALID", label, {n: type(v).__name__ for n, v in call.arguments.items()}, type(error).__name__, str(error)[:200])
                continue
        for call in calls(label, function):
            found = outcome(call)
            counts[found] += 1
            if names or "-v" in sys.argv:
                if found not in FINE:
                    print(f"{found:28} {call}")
    print(*(f"{count:7} {found}" for found, count in counts.most_common()), sep="\n")


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if not name.startswith("-")])
