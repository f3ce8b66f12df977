"""Faults that a function can have in one place: which there are, and a draw of some of them (for `tools.mutants`)."""

import ast
import copy
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("ortho", "paper")
SEED = "1"
# Parts of the package: their files, and how many mutants are drawn from these.
ROOMS: dict[str, tuple[str, int]] = {
    "attention": ("ortho/attention/**/*.py", 20),
    "projections": ("ortho/projections/*.py ortho/gates.py ortho/orthogonal.py", 5),
    "layers": ("ortho/layers/**/*.py ortho/models/*.py", 9),
    "adapters": ("ortho/adapters/*.py", 5),
    "cost": ("ortho/cost/*.py", 7),
    "theory": ("ortho/theory/*.py", 8),
    "claims": ("paper/claims/rules.py paper/claims/outcomes.py paper/claims/figures.py", 12),
    "experiments": ("paper/experiments/**/*.py", 7),
    "training": ("paper/training/*.py", 3),
    "tasks": ("paper/tasks/*.py", 4),
}
LONGEST = 120  # characters of an original: a short expression is found again after a change nearby
SWAPS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
INDEXED = {"arange", "tril", "triu", "split", "chunk", "narrow", "diagonal", "roll", "unfold"}
REPLACED = ast.expr | ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return | ast.Expr
Function = ast.FunctionDef | ast.AsyncFunctionDef
Fault = tuple[str, ast.expr, ast.expr]  # kind, expression, replacement


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function of a module with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        inner = f"{prefix}{node.name}." if isinstance(node, Function | ast.ClassDef) else prefix
        yield from functions(node, inner)


def own(node: ast.AST, above: tuple[ast.AST, ...] = ()) -> Iterator[tuple[Any, tuple[ast.AST, ...]]]:
    """The nodes of a function that do something, each with those above it: no annotations, texts or inner functions."""
    above = (*above, node)
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            apart = field in ("annotation", "returns") or isinstance(child, Function | ast.ClassDef)
            if (
                isinstance(child, ast.AST)
                and not apart
                and not isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr)
            ):
                yield child, above
                yield from own(child, above)


def verdicts(function: Function) -> list[ast.expr]:
    """Where a rule names a verdict."""
    return [n for n, _ in own(function) if isinstance(n, ast.Attribute) and ast.unparse(n).startswith("Verdict.")]


def _edited(node: Any, **fields: Any) -> Any:
    new = copy.copy(node)
    for field, value in fields.items():
        setattr(new, field, value)
    return new


def _integer(node: Any) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def _numeric(node: ast.expr) -> bool:
    return not isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp) and not (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _shifted(node: Any, by: int = 1) -> ast.expr:
    if _integer(node):
        return ast.Constant(node.value + by)
    return ast.BinOp(node, ast.Add() if by > 0 else ast.Sub(), ast.Constant(1))


def _of_comparison(node: ast.Compare) -> Iterator[Fault]:
    if len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield "comparison", node, _edited(node, ops=[SWAPS[type(node.ops[0])]()])


def _of_arithmetic(node: ast.BinOp) -> Iterator[Fault]:
    if not (_numeric(node.left) and _numeric(node.right)):
        return
    match node.op, node.right:
        case ((ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Pow()), _):
            yield "factor", node, node.left
            if _integer(node.right):
                yield "factor", node, _edited(node, right=_shifted(node.right))
            if _integer(node.left):
                yield "factor", node, _edited(node, left=_shifted(node.left))
        case ((ast.Add() | ast.Sub()), ast.Constant(value=1)):
            yield "off by one", node, node.left
        case ((ast.Add() | ast.Sub()), _):
            yield "sign", node, _edited(node, op=ast.Sub() if isinstance(node.op, ast.Add) else ast.Add())


def _of_negation(node: ast.UnaryOp) -> Iterator[Fault]:
    if isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "sign", node, node.operand


def _of_index(node: ast.Subscript) -> Iterator[Fault]:
    if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        return
    for index in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
        ends = (index.lower, index.upper) if isinstance(index, ast.Slice) else (index,)
        for end in ends:
            if end is not None and (_integer(end) or isinstance(index, ast.Slice)):
                yield "off by one", end, _shifted(end)


def _of_call(node: ast.Call) -> Iterator[Fault]:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if called == "detach" and isinstance(node.func, ast.Attribute):
        yield "gradient", node, node.func.value
    if called == "no_grad":
        yield "gradient", node, _edited(node, func=_edited(node.func, attr="enable_grad"))
    for argument in (*node.args, *(k.value for k in node.keywords if k.arg == "diagonal")):
        if _integer(argument) and called in INDEXED | {"range"}:
            yield "off by one", argument, _shifted(argument)
        elif called == "range" and not isinstance(argument, ast.Starred):
            yield "off by one", argument, _shifted(argument, -1)


def _of_branch(node: Any) -> Iterator[Fault]:
    if isinstance(node, ast.BoolOp):
        yield "condition", node, _edited(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        return
    for test in node.ifs if isinstance(node, ast.comprehension) else [node.test]:
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
            yield "raise", test, ast.Constant(False)
        else:
            negated = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else None
            yield "condition", test, negated or ast.UnaryOp(ast.Not(), test)


FAULTS: dict[type, Callable[[Any], Iterator[Fault]]] = {
    ast.Compare: _of_comparison,
    ast.BinOp: _of_arithmetic,
    ast.UnaryOp: _of_negation,
    ast.Subscript: _of_index,
    ast.Call: _of_call,
    **dict.fromkeys((ast.If, ast.IfExp, ast.comprehension, ast.BoolOp), _of_branch),
}


def _of_threshold(node: ast.AST) -> Iterator[Fault]:
    if isinstance(node, ast.Compare) and isinstance(node.ops[-1], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
        right = node.comparators[-1]
        far = _shifted(right) if _integer(right) else ast.BinOp(ast.Constant(2), ast.Mult(), right)
        yield "threshold", node, _edited(node, comparators=[*node.comparators[:-1], far])
    for default in node.kw_defaults if isinstance(node, ast.arguments) else []:
        if isinstance(default, ast.Constant) and isinstance(default.value, float):
            yield "threshold", default, ast.Constant(2 * default.value)


class _Swap(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def _place(known: list[str], old: ast.expr, new: ast.expr, above: tuple[ast.AST, ...]) -> tuple[str, str] | None:
    """Original and replacement as text, widened to the smallest expression or statement that the function has once."""
    for target in (old, *(n for n in reversed(above) if isinstance(n, REPLACED))):
        before = ast.unparse(target)
        if known.count(before) == 1 and len(before) <= LONGEST:
            try:
                ast.parse(before)
            except SyntaxError:  # a slice cannot stand alone
                continue
            return before, ast.unparse(_Swap(old, new).visit(copy.deepcopy(target, {id(old): old})))
    return None


def possible(name: str, function: Function, *, rules: bool) -> Iterator[tuple[str, str, str]]:
    """(kind, original, replacement) of every fault a function can have; `rules`: its thresholds decide verdicts."""
    if name.endswith("repr"):
        return
    said = {ast.unparse(n) for n in verdicts(function)} if rules else set()
    for verdict in sorted(said) if len(said) > 1 else []:
        yield "constant verdict", "Verdict.*", verdict
    known = [ast.unparse(n) for n, _ in own(function) if isinstance(n, REPLACED)]
    for node, above in own(function):
        found = list(FAULTS.get(type(node), lambda _: iter(()))(node)) + (list(_of_threshold(node)) if rules else [])
        for kind, old, new in found:
            if place := _place(known, old, new, above if old is node else (*above, node)):
                yield kind, *place


def _digest(*texts: str) -> str:
    return hashlib.sha1("\n".join([SEED, *texts]).encode()).hexdigest()[:6]


def draw(root: Path, rejected: dict[str, str]) -> list[dict[str, str]]:
    """The mutants of every room: its kinds in turn, one mutant a function, none of those that were rejected.

    They come in the order of digests, which changes elsewhere in the package leave as it is.
    """
    drawn = []
    for room, (patterns, count) in ROOMS.items():
        kinds: dict[str, list[dict[str, str]]] = {}
        for file in sorted({file for pattern in patterns.split() for file in root.glob(pattern)}):
            where = file.relative_to(root).as_posix()
            for name, function in functions(ast.parse(file.read_text())):
                for kind, original, replacement in possible(name, function, rules=room == "claims"):
                    entry = {"file": where, "function": name, "kind": kind}
                    entry |= {"original": original, "replacement": replacement}
                    kinds.setdefault(kind, []).append({"id": f"{room}-{_digest(*entry.values())}"} | entry)
        order = sorted(kinds, key=lambda kind: _digest(room, kind))
        order += [kind for kind in ("threshold", "constant verdict") if kind in kinds]  # these, twice
        chosen: list[dict[str, str]] = []
        for turn in range(10 * count):
            taken = {(entry["file"], entry["function"]) for entry in chosen}
            for entry in sorted(kinds[order[turn % len(order)]], key=lambda entry: entry["id"]):
                if entry["id"] not in rejected and (entry["file"], entry["function"]) not in taken:
                    chosen.append(entry)
                    break
        drawn += chosen[:count]
    return drawn
