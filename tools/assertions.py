"""Which assertions of a notebook check something: those on what code computes, not on constants alone."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from IPython.core.inputtransformer2 import TransformerManager

MUTABLE = (ast.List, ast.Dict, ast.Set)  # code may fill them
STOPWATCHES = frozenset(("measure", "perf_counter", "perf_counter_ns", "process_time", "process_time_ns"))


def parsed(source: str) -> ast.Module:
    """The syntax tree of a cell, its magics replaced by calls; an empty one for what is not Python."""
    try:
        return ast.parse(TransformerManager().transform_cell(source))
    except SyntaxError:
        return ast.Module([], [])


def takes_time(source: str) -> bool:
    """Whether a cell reads a clock, or has an experiment measured."""
    return any(name_called(node) in STOPWATCHES for node in ast.walk(parsed(source)))


def assertions(sources: Sequence[str]) -> Iterator[tuple[int, str, bool]]:
    """The assertions of a notebook's code cells: the cell's place, the code, and whether it checks something.

    An assertion is an `assert` statement or a call of an `assert_…` function. It checks something if it calls a
    function, or reads a name that is bound to more than constants anywhere in the notebook.
    """
    trees = list(map(parsed, sources))
    fixed = constants(trees)
    for position, tree in enumerate(trees):
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                yield position, ast.unparse(node), not constant([node.test], fixed)
            elif isinstance(node, ast.Call) and name_called(node).startswith("assert_"):
                yield position, ast.unparse(node), not constant([*node.args, *node.keywords], fixed)


def name_called(node: ast.AST) -> str:
    """The last name of the function that a call names; empty where there is none."""
    return getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""


def constant(code: Iterable[ast.AST], fixed: set[str]) -> bool:
    """Whether code calls nothing and reads no names but these."""
    for node in (node for tree in code for node in ast.walk(tree)):
        if isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id not in fixed):
            return False
    return True


def constants(trees: Iterable[ast.AST]) -> set[str]:
    """Names that are bound to constants wherever they are bound."""
    values: dict[str, list[ast.AST]] = defaultdict(list)
    otherwise: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        otherwise.update(bound_otherwise(node))
        for target, value in bindings(node):
            names = set(stored_names(target))
            if any(isinstance(part, MUTABLE) for part in ast.walk(value)):
                otherwise |= names
            for name in names:
                values[name].append(value)
    fixed = values.keys() - otherwise
    while (kept := {name for name in fixed if constant(values[name], fixed)}) != fixed:
        fixed = kept
    return fixed


def bindings(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Targets, each with what it, or each item for which it stands in turn, is bound to."""
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case ast.AnnAssign(target=target, value=ast.AST() as value):
            yield target, value
        case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield target, value


def stored_names(target: ast.AST) -> Iterator[str]:
    """The names that a target binds, as opposed to those whose parts it changes."""
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def bound_otherwise(node: ast.AST) -> Iterator[str]:
    """Names of arguments, imports, definitions, errors and contexts."""
    match node:
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)) | ast.alias(name=str(name)):
            yield name.partition(".")[0]
        case ast.withitem(optional_vars=ast.AST() as target):
            yield from stored_names(target)
