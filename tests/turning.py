"""Tests that a verdict rests on what its cell computes: it must change if the thing that the claim is about is broken.

A `Turn` breaks functions, closed forms, modules or records, never the rule, and says which verdict must follow. The
chapter's cell that judges the claim runs in the broken world, after those cells that define what it reads. A cell that
always came to the same finding would keep its verdict, and so fail.
"""

import ast
import builtins
import json
import re
import symtable
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import pytest

import paper.claims.shared
from paper.claims import Entry, Verdict, ledger
from paper.claims.gathered import ROOT, verdicts

_SHARED = re.compile(r"paper\.claims\.shared(\..+)?")
_JUDGES = re.compile(r"paper\.claims\.(?!shared)")

Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Turn:
    """The verdict in a broken world, and the changes that break it.

    `changes` maps a dotted name, with a key in brackets for an entry of a dictionary
    ('ortho.attention.MECHANISMS[gla]'), to a function that makes the broken thing from the sound one. Names of the
    library are changed before `paper.claims.shared` is imported anew, so that its modules find the broken ones. Names
    in these modules are changed afterwards, and names that cells define (without a dot) as soon as they are defined.
    """

    to: Verdict
    changes: Mapping[str, Change]


def constantly(value: Any) -> Change:
    """Replaces anything by this value."""
    return lambda _: value


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
    """Assert that the broken world gives the turn's verdict, and that the chapter's is another."""
    assert turn.to != ledger()[claim_id].verdict, "a turn leads to another verdict"
    with monkeypatch.context() as patch:
        broken = judged_anew(claim_id, turn.changes, patch)
    assert broken.verdict == turn.to, f"in the broken world: {broken.ours}"


def judged_anew(claim_id: str, changes: Mapping[str, Change], monkeypatch: pytest.MonkeyPatch) -> Entry:
    """The claim, judged by its cell after the changes; `monkeypatch` undoes everything."""
    _import_sound(claim_id)  # nothing must be imported for the first time, and so for good, in the broken world
    # Without the checks of annotations, which would need each module to be compiled again.
    plain = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("jaxtyping")]
    monkeypatch.setattr(sys, "meta_path", plain)
    for name in [name for name in sys.modules if _SHARED.fullmatch(name)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(paper.claims, "shared", paper.claims.shared)  # the new import replaces this attribute
    late = [target for target in changes if _SHARED.match(target)]
    here = {target: change for target, change in changes.items() if "." not in target}
    for target in [target for target in changes if target not in late and target not in here]:
        _change(target, changes[target], monkeypatch)
    for target in late:
        import_module(target.rpartition(".")[0])
        _change(target, changes[target], monkeypatch)
    return judged_by_cells(claim_id, here)


def judged_by_cells(claim_id: str, changes: Mapping[str, Change]) -> Entry:
    """The claim, judged by the cell of its chapter, after those cells that define what it reads. Names that cells
    define are changed as soon as they are defined."""
    chapter, sources = _cells(claim_id)
    wanted = [at := len(sources) - 1]
    reads = _reads(sources[at])
    for before in reversed(range(at)):
        if made := _makes(sources[before]) & reads:
            wanted.insert(0, before)
            reads = reads - made | _reads(sources[before])
    world: dict[str, Any] = {"__name__": "chapter"}
    left, shown = dict(changes), None
    for source in map(sources.__getitem__, wanted):
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.Expr):
                shown = eval(compile(ast.Expression(statement.value), chapter, "eval"), world)
            else:
                exec(compile(ast.Module([statement], []), chapter, "exec"), world)
            for target in [target for target in left if target.partition("[")[0] in world]:
                name, _, key = target.removesuffix("]").partition("[")
                if key:
                    world[name] = {**world[name], key: left.pop(target)(world[name][key])}
                else:
                    world[name] = left.pop(target)(world[name])
    assert not left, f"names that no cell defines: {list(left)}"
    (entry,) = (entry for entry in shown.entries if entry.id == claim_id)
    return entry


def _cells(claim_id: str) -> tuple[str, list[str]]:
    """The chapter that judges the claim, and its code cells up to the one that does."""
    row = verdicts()[claim_id]
    cells = json.loads((ROOT / "notebooks" / f"{row['chapter']}.ipynb").read_text(encoding="utf-8"))["cells"]
    code = {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}
    names = list(code)
    return row["chapter"], list(code.values())[: names.index(row["code"]) + 1]


def _import_sound(claim_id: str) -> None:
    """Import all that the cells up to the one that judges a claim import."""
    for source in _cells(claim_id)[1]:
        imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), claim_id, "exec"), {})


def _symbols(source: str) -> symtable.SymbolTable:
    return symtable.symtable(source, "cell", "exec")


def _makes(source: str) -> set[str]:
    """The names that a cell defines."""
    return {one.get_name() for one in _symbols(source).get_symbols() if one.is_assigned() or one.is_imported()}


def _reads(source: str) -> set[str]:
    """The names that a cell takes from cells before it: those that it reads, in functions too, before it defines
    them."""

    def read(table: symtable.SymbolTable) -> set[str]:
        own = {one.get_name() for one in table.get_symbols() if one.is_global() and one.is_referenced()}
        return own.union(*map(read, table.get_children()))

    top = _symbols(source)
    found = {one.get_name() for one in top.get_symbols() if one.is_referenced()}.union(*map(read, top.get_children()))
    return found - _makes(source) - set(dir(builtins))


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
