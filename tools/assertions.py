"""Which assertions of a notebook check something: those on what code computes, not on constants alone."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from IPython.core.inputtransformer2 import TransformerManager

MUTABLE = (ast.List, ast.Dict, ast.Set)  # code may fill them
UNKNOWN = ast.Call(ast.Name("unknown"), [], [])  # stands for a value that is not known to be constant
STOPWATCHES = frozenset(("measure", "perf_counter", "perf_counter_ns", "process_time", "process_time_ns"))


def parsed(source: str) -> ast.Module:
    """The syntax tree of a cell, its magics replaced by calls; empty if the cell is not Python."""
    try:
        return ast.parse(TransformerManager().transform_cell(source))
    except SyntaxError:
        return ast.Module([], [])


def takes_time(source: str) -> bool:
    """Whether a cell reads a clock, or measures an experiment."""
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
    """The last part of the name of the function that is called; empty if the node is not such a call."""
    return getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""


def constant(code: Iterable[ast.AST], fixed: set[str]) -> bool:
    """Whether code calls nothing and reads no names except those in `fixed`."""
    nodes = [node for tree in code for node in ast.walk(tree)]
    return not any(isinstance(n, ast.Call) or (isinstance(n, ast.Name) and n.id not in fixed) for n in nodes)


def constants(trees: Iterable[ast.AST]) -> set[str]:
    """Names that are bound to constants wherever they are bound."""
    values: dict[str, list[ast.AST]] = defaultdict(list)
    for name, value in (binding for tree in trees for node in ast.walk(tree) for binding in bindings(node)):
        values[name].append(value)
    fixed = set(values)
    while (kept := {name for name in fixed if constant(values[name], fixed)}) != fixed:
        fixed = kept
    return fixed


def bindings(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The names that a node binds, each with its value; for a loop variable, with what it runs through.

    An unknown value, or one that code may fill, counts as a call.
    """

    match node:
        case ast.Assign(targets=targets, value=value):
            pass
        case (
            ast.AnnAssign(target=target, value=ast.AST() as value)
            | ast.AugAssign(target=target, value=value)
            | ast.NamedExpr(target=target, value=value)
            | ast.For(target=target, iter=value)
            | ast.comprehension(target=target, iter=value)
        ):
            targets = [target]
        case ast.withitem(optional_vars=ast.AST() as target):
            targets, value = [target], UNKNOWN
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name, UNKNOWN
            return
        case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)) | ast.alias(name=str(name)):
            yield name.partition(".")[0], UNKNOWN
            return
        case _:
            return
    if any(isinstance(part, MUTABLE) for part in ast.walk(value)):
        value = UNKNOWN
    for part in (part for target in targets for part in ast.walk(target)):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.id, value
