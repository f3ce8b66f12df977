"""Tests that a verdict rests on its evidence: it must change if the thing that the claim is about is broken.

A `Turn` breaks functions, closed forms, modules or records, never the evidence function or the rule, and says which
verdict must follow. The claim is judged by fresh copies of the evidence modules, whose constants and caches know only
the broken world. Evidence that always returned the same finding would keep its verdict, and so fail.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import pytest

import paper.claims
from paper.claims import Ledger, Verdict, catalogue, stored
from paper.claims.ledger import Entry, _ledger
from tools.notebooks import VERDICTS

_EVIDENCE = re.compile(r"paper\.claims\.evidence(\..+)?")
_JUDGES = re.compile(r"paper\.claims\.(?!evidence)")

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Turn:
    """The verdict in a broken world, and the changes that break it.

    `changes` maps a dotted name, with a key in brackets for an entry of a dictionary
    ('ortho.attention.MECHANISMS[gla]'), to a function that makes the broken thing from the sound one. Names of the
    library are changed before the evidence is imported anew, so that evidence that imports them finds the broken ones.
    Names in evidence modules are changed afterwards.
    """

    to: Verdict
    changes: Mapping[str, Change]


def constantly(value: Any) -> Change:
    """Replaces anything by this value."""
    return lambda _: value


def answering(value: Any) -> Change:
    """Replaces a function by one that returns this value for all arguments."""
    return lambda _: lambda *args, **kwargs: value


def giving(change: Change) -> Change:
    """Replaces a function by one that changes what the sound one returns."""
    return lambda sound: lambda *args, **kwargs: change(sound(*args, **kwargs))


def costing(**changes: Callable[..., Any]) -> Change:
    """Replaces a closed form by one with other costs: each field is computed from the sound cost and the arguments."""

    def broken(sound: Any) -> Any:
        def cost(*sizes: Any, **options: Any) -> Any:
            found = sound(*sizes, **options)
            return replace(found, **{field: change(found, *sizes) for field, change in changes.items()})

        return cost

    return broken


def check(claim_id: str, turn: Turn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that the broken world gives the turn's verdict, and that the stored verdict is another
    (`tests/book/test_verdicts.py` compares the stored verdict with the unbroken evidence)."""
    entry, _ = stored_verdicts()[claim_id]
    assert turn.to != entry.verdict, "a turn leads to another verdict"
    with monkeypatch.context() as patch:
        broken = judged_anew(claim_id, turn.changes, patch)
    assert broken.verdict == turn.to, f"in the broken world: {broken.ours}"


@cache
def stored_verdicts() -> dict[str, tuple[Entry, tuple[str, ...]]]:
    return stored(VERDICTS)


def judged_anew(claim_id: str, changes: Mapping[str, Change], monkeypatch: pytest.MonkeyPatch) -> Entry:
    """The claim, judged by evidence modules that are imported after the changes; `monkeypatch` undoes everything."""
    _ledger()._import()  # so that all modules come back
    home = _ledger()._evidence[claim_id][0].__module__
    anew = Ledger(catalogue())
    monkeypatch.setattr(sys.modules[Ledger.__module__], "_ledger", lambda: anew)
    # Without the checks of annotations, which would need each module to be compiled again.
    plain = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("jaxtyping")]
    monkeypatch.setattr(sys, "meta_path", plain)
    for name in [name for name in sys.modules if _EVIDENCE.fullmatch(name)]:
        monkeypatch.delitem(sys.modules, name)
        package, _, child = name.rpartition(".")
        if package == paper.claims.__name__:  # the new import replaces this attribute
            monkeypatch.setattr(paper.claims, child, getattr(paper.claims, child))
    late = [target for target in changes if _EVIDENCE.match(target)]
    for target in [target for target in changes if target not in late]:
        _change(target, changes[target], monkeypatch)
    import_module(home)
    functions = [function for function, _ in anew._evidence.values()]
    for target in late:
        assert resolve_name(target.partition("[")[0]) not in functions, f"{target}: expected no evidence function"
        _change(target, changes[target], monkeypatch)
    return anew.judge(claim_id)


def _change(target: str, change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, item = target.removesuffix("]").partition("[")
    owner, _, name = path.rpartition(".")
    place = resolve_name(path if item else owner)
    sound = place[item] if item else getattr(place, name)
    defined = f"{getattr(sound, '__module__', '')} {path}"
    assert not _JUDGES.search(defined), f"{target}: expected the subject of a claim, got what judges it"
    if item:
        monkeypatch.setitem(place, item, change(sound))
    else:
        monkeypatch.setattr(place, name, change(sound))
