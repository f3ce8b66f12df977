"""The code that a function depends on, by meaning: every definition that it can reach, each with a digest.

A definition is a top-level statement of one of the project's modules: a function, a class, an assignment. From a
function the names in its syntax tree are followed, through imports, to all definitions that it can reach. A name in the
tree counts even if a call never uses it: the set is too large rather than too small. A digest ignores docstrings,
comments, annotations and the decorator that enforces them, imports, the texts of errors, and the names and places of
modules: moving a definition or correcting a comment leaves it as it is; changing an operator does not.

A table that gives names to definitions, `{"name": function, ...}`, is taken entry by entry, so that one more entry
changes nothing for the others.
"""

import ast
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("ortho", "paper")
CHECKED = "checked"  # a decorator that refuses arguments, and changes nothing else
EFFECTS = "<module>"  # the statements of a module that define nothing: a switch, a registration

Code = dict[str, str]  # the place of a definition, such as 'ortho.layers.multihead:FeedForward', and its digest
_Place = tuple[str, str]  # a module and a name in it; the name '' is all of it
_Path = tuple[str, ...]  # a dotted name


def files(root: Path = ROOT) -> dict[str, bytes]:
    """The contents of the project's modules, by the modules' names."""
    found = {}
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_bytes()
    return found


def changes(before: Code, now: Code) -> list[str]:
    """The places of the definitions of `before` that `now` does not have anywhere; [] if it has all.

    Definitions that only `now` has do not count, as something that reaches them must have changed as well. The
    exception is what modules do when they are imported.
    """
    kept = set(now.values())
    lost = [place for place, digest in before.items() if digest not in kept]
    known = set(before.values())
    return lost + [place for place, digest in now.items() if place.endswith(EFFECTS) and digest not in known]


class Tree:
    """The modules of a project, each parsed when it is first asked for; `contents` is what `files` returns."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self.contents = contents
        self._modules: dict[str, _Module] = {}
        self._edges: dict[_Place, frozenset[_Place]] = {}

    def reached(self, start: Any) -> Code:
        """All definitions that a function can reach, with their digests, sorted by name.

        `start` may also be a class or a `partial`. The arguments of a `partial` count: functions and classes by what
        they reach, other values by what they are. Raises SyntaxError for a module that is not Python.
        """
        waiting, values = _live(start, self.contents)
        found = {name: _digest(text) for name, text in values.items()}
        seen: set[_Place] = set()
        while waiting:
            place = waiting.pop()
            if place not in seen:
                seen.add(place)
                waiting += self._named(place)
                if text := self._text(place):
                    found[":".join(place)] = _digest(text, *sorted(map(self._text, self._named(place))))
        return dict(sorted(found.items()))

    def _module(self, name: str) -> "_Module":
        if name not in self._modules:
            self._modules[name] = _Module(self.contents[name])
        return self._modules[name]

    def _text(self, place: _Place) -> str:
        """The tree of a definition, as text; '' for whole tables and whole modules, as they may be added to."""
        return self._module(place[0]).texts.get(place[1], "")

    def _named(self, place: _Place) -> frozenset[_Place]:
        """The definitions that a definition names, and what its module does besides."""
        if place not in self._edges:
            module, name = place
            known = self._module(module)
            within = known.texts if not name else known.tables.get(name, ())
            found = {(module, each) for each in within}
            found |= {target for path in known.names.get(name, ()) for target in self._resolve(module, path)}
            if EFFECTS in known.texts:
                found.add((module, EFFECTS))
            self._edges[place] = frozenset(found - {place})
        return self._edges[place]

    def _resolve(self, module: str, path: _Path) -> Iterator[_Place]:
        """The definition that a dotted name means in a module; nothing for a local name or another package's name."""
        known = self._module(module)
        first, *rest = path
        if first in known.texts or first in known.tables:
            yield module, first
        elif first in known.imports:
            here, name = known.imports[first]
            rest = [name, *rest] if name else rest
            while rest and f"{here}.{rest[0]}" in self.contents:
                here = f"{here}.{rest.pop(0)}"
            if here in self.contents:
                yield from self._resolve(here, tuple(rest)) if rest else [(here, "")]


class _Module:
    """What a module defines: the trees of its definitions as text, and the names in them."""

    def __init__(self, content: bytes) -> None:
        self.texts: dict[str, str] = {}
        self.names: dict[str, set[_Path]] = {}
        self.tables: dict[str, list[str]] = {}  # the names of their entries
        self.imports: dict[str, tuple[str, str]] = {}  # a name here -> (module, name there; '' for the module itself)
        tree = ast.parse(content)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    module = alias.name if alias.asname else alias.name.partition(".")[0]
                    self.imports[alias.asname or module] = (module, "")
            elif isinstance(node, ast.ImportFrom):
                self.imports |= {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
        for statement in _statements(tree.body):
            self._enter(statement)

    def _enter(self, statement: ast.stmt) -> None:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                self._define(name, statement)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ):
                if isinstance(value, ast.Dict) and _is_table(value):
                    self.tables[name] = []
                    for key, entry in zip(value.keys, value.values, strict=True):
                        self.tables[name].append(f"{name}[{ast.unparse(key or entry)}]")
                        self._define(self.tables[name][-1], entry)
                elif name != "__all__" and value is not None:
                    self._define(name, statement)
            case ast.Assign(targets=targets):
                for name in [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]:
                    self._define(name, statement)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case _:
                self._define(EFFECTS, statement)

    def _define(self, name: str, node: ast.AST) -> None:
        paths = set(_paths(node))
        # What a name of another package stands for, as no tree here shows it.
        outside = {path[0]: ".".join(filter(None, self.imports[path[0]])) for path in paths if self._is_outside(path)}
        # A name that is defined twice, in two branches or anew, has both texts.
        self.texts[name] = self.texts.get(name, "") + meaning(node) + repr(sorted(outside.items()))
        self.names.setdefault(name, set()).update(paths)

    def _is_outside(self, path: _Path) -> bool:
        return path[0] in self.imports and self.imports[path[0]][0].partition(".")[0] not in PACKAGES


def meaning(node: Any) -> str:
    """A syntax tree as text, the same in every version of Python, without what `_parts` leaves out."""
    if isinstance(node, list):
        return f"[{','.join(map(meaning, node))}]"
    if isinstance(node, ast.AST):
        return f"{type(node).__name__}({','.join(f'{name}={meaning(part)}' for name, part in _parts(node))})"
    return f"{type(node).__name__}:{node!r}"


def _parts(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """The fields of a node that mean something when it runs."""
    for name, part in ast.iter_fields(node):
        if name in ("annotation", "ctx", "kind", "msg", "returns", "simple", "type_comment", "type_params"):
            continue
        if name == "exc" and isinstance(part, ast.Call):
            part = part.func  # the text of an error is for people
        if name == "decorator_list":
            part = [one for one in part if getattr(getattr(one, "func", one), "id", "") != CHECKED]
        if isinstance(part, list) and part and isinstance(part[0], ast.stmt):
            part = list(_statements(part, fields=isinstance(node, ast.ClassDef)))
        if part is not None and part != []:
            yield name, part


def _statements(body: list[ast.stmt], *, fields: bool = True) -> Iterator[ast.stmt]:
    """The statements that do something: not docstrings, `...`, `pass` or imports. A name with nothing but an annotation
    counts only as a field of a class."""
    for statement in body:
        match statement:
            case ast.Pass() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
                continue
            case ast.AnnAssign(value=None) if not fields:
                continue
            case ast.AnnAssign(target=target, value=ast.expr() as value) if not fields:
                yield ast.Assign(targets=[target], value=value)
            case _:
                yield statement


def _paths(node: Any) -> Iterator[_Path]:
    """The dotted names in a tree, each as long as it is written: `a.b.c` is one."""
    if isinstance(node, list):
        for part in node:
            yield from _paths(part)
    elif isinstance(node, ast.AST):
        path: list[str] = []
        inner = node
        while isinstance(inner, ast.Attribute):
            path.insert(0, inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            yield inner.id, *path
        else:
            for _, part in _parts(inner):
                yield from _paths(part)


def _is_table(node: ast.Dict) -> bool:
    """Whether a dictionary gives names to definitions; if it holds settings, it may be read as a whole."""
    return all(any(isinstance(part, ast.Name) for part in ast.walk(value)) for value in node.values) and bool(node.keys)


def _live(start: Any, modules: Mapping[str, bytes]) -> tuple[list[_Place], dict[str, str]]:
    """What belongs to a function and is bound to it: definitions of these modules, and the texts of other values."""
    home = getattr(start, "__module__", "__main__")  # of a function that a notebook or a test defines
    places: list[_Place] = []
    values: dict[str, str] = {}
    waiting: list[tuple[str, Any]] = [("run", start)]
    seen: set[int] = set()
    while waiting:
        label, thing = waiting.pop()
        if isinstance(thing, FunctionType | type) and thing.__module__ in modules:
            places.append((thing.__module__, thing.__qualname__.partition(".")[0]))
        elif not isinstance(thing, FunctionType) or id(thing) not in seen:
            seen.add(id(thing))
            values[label] = _text(thing, home)
            waiting += [(label + name, part) for name, part in _bound(thing, home)]
    return places, values


def _bound(thing: Any, home: str) -> list[tuple[str, Any]]:
    """The parts that a value holds, as pairs of name and part."""
    match thing:
        case partial():
            return [("", thing.func), (".args", thing.args), (".keywords", thing.keywords)]
        case MethodType():
            return [("", thing.__func__), (".self", thing.__self__)]
        case FunctionType() if thing.__module__ == home:
            cells = [(f".closure.{i}", cell.cell_contents) for i, cell in enumerate(thing.__closure__ or ())]
            return [(f".{name}", thing.__globals__.get(name)) for name in thing.__code__.co_names] + cells
        case Mapping():
            return [(f"[{name}]", part) for name, part in thing.items()]
        case list() | tuple():
            return [(f"[{i}]", part) for i, part in enumerate(thing)]
        case _ if is_dataclass(thing) and not isinstance(thing, type):
            return [("", type(thing)), *((f".{field.name}", getattr(thing, field.name)) for field in fields(thing))]
    return []


def _text(thing: Any, home: str) -> str:
    """A text that distinguishes a value from others, apart from its parts."""
    match thing:
        case str() | int() | float() | None:
            return repr(thing)
        case list() | tuple():
            return f"{len(thing)} of"
        case FunctionType() if thing.__module__ == home:
            return _bytecode(thing.__code__)
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}"


def _bytecode(code: CodeType) -> str:
    constants = [_bytecode(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
