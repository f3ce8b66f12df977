"""Calls of the package's public functions and classes, drawn from their signatures, with one argument replaced.

Annotations and the tables of `fuzz_targets` give a valid call of each. `outcome` says how a call ended. Run as a
script, this counts the outcomes of all calls. With words, it counts only functions that have one of the words in their
names, and prints each call with a wrong outcome.
"""

import inspect
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from types import UnionType
from typing import Any, NamedTuple

import torch
import torch._dynamo  # takes seconds, which must not count as a call's
from fuzz_targets import BY_FUNCTION, BY_NAME, SIZES, targets
from fuzz_values import Odd, odd_values
from torch import nn

SECONDS = 5  # of processor time for one call; no call should take more than a hundredth of this
FINE = ("works", "refused", "refused by another name")  # if two arguments do not fit together, either may be named

# (odd value, word): an annotation with this word allows this value besides the valid one.
ALLOWED = (("None", "None"), ("None", "Optional"), ("tensor", "Tensor"), ("list", "Sequence"), ("module", "Callable"))
# Calls that may work though the value looks odd, and why.
MAY = (
    r"^theory\.associativity\..*=nested",  # entries are whatever can be added and multiplied
    r"^attention\.untrained\..*\(name=|Source\(name=",  # any name will do
    r"sorted_chunks_mask\(buckets=|counter_operands\(numbers=",  # any integers will do
    # The layer that makes these calls has checked the numbers.
    r"^(.* projection\.forward|write strength\.forward|experts\.route|.*\.normalised)\(.*=(nan|inf)\)",
)


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
    """The types of a union; any other annotation alone."""
    return getattr(annotation, "__args__", ()) if isinstance(annotation, UnionType) else (annotation,)


def tensor(annotation: Any) -> torch.Tensor | None:
    """A tensor that fits an annotation of a shape; None for any other annotation, and for a tensor without a shape."""
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
    """A valid value of a parameter; None if none is known."""
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


def calls(label: str, function: Callable[..., Any]) -> Iterator[Call]:
    """The valid call of a function, with '' as the name of its odd argument, then every call with one argument
    replaced."""
    parameters = inspect.signature(function).parameters.values()
    plain = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    needed = {p.name: valid(label, p) for p in plain if p.default is p.empty} | BY_FUNCTION.get(label, {})
    yield Call(label, function, needed, "", Odd("valid", None, False))
    for p in plain:
        for odd in odd_values(p.name, valid(label, p), p.default):
            call = Call(label, function, needed | {p.name: odd.value}, p.name, odd)
            allowed = any(odd.label == label and word in str(p.annotation) for label, word in ALLOWED)
            if not allowed and not any(re.search(one, str(call)) for one in MAY):
                yield call


@contextmanager
def in_time() -> Iterator[None]:
    """Raise TimeoutError if the block takes longer than `SECONDS`."""

    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def outcome(call: Call) -> str:
    """How a call ends: 'works', 'refused', or what is wrong."""
    arguments = {n: deepcopy(v) if isinstance(v, nn.Module) else v for n, v in call.arguments.items()}
    try:
        with in_time():
            call.function(**arguments)
    except TimeoutError:
        return "hangs"
    except Exception as error:
        return refusal(call, error)
    return "accepted nonsense" if call.odd.nonsense else "works"


def refusal(call: Call, error: Exception) -> str:
    """'refused' if an error says which argument came and what was expected, else what is wrong with it."""
    text = str(error)
    if not call.name:
        return f"refused though valid: {text}"
    if type(error) not in (TypeError, ValueError):
        return type(error).__name__
    if re.search("unexpected keyword argument '(no such|3)'", text):
        return "refused"  # by Python, of options that go on to another function
    if not re.match(r"[^:]*: .*\bexpected\b.*\bgot\b", text, re.DOTALL):
        return f"{type(error).__name__} of no argument"
    named = re.match(rf"([\w\[\]\" ,.'-]+: )?[^:]*\b{re.escape(call.name)}\b", text)
    return "refused" if named else "refused by another name"


def main(words: list[str]) -> None:
    counts: Counter[str] = Counter()
    for label, function in targets().items():
        if words and not any(word in label for word in words):
            continue
        for call in calls(label, function):
            found = outcome(call)
            counts[found] += 1
            if words and found not in FINE:
                print(f"{found:28} {call}")
    print(*(f"{count:7} {found}" for found, count in counts.most_common()), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
