"""Like statements have like verdicts, and no part of a verdict rests on a constant."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from paper.claims import ledger

FOLDER = Path(__file__).parents[2] / "paper" / "claims" / "evidence"
EVIDENCE = sorted({*FOLDER.glob("*.py")} - {FOLDER / "common.py"})  # its helpers are checked where they are called

# -------------------------------------------------------------------------------- the same statement, the same verdict

# Statements that several claims, or parts of them, make: (claim, label of the part).
SAME = {
    "the softmax of the scores takes O(N^2)": (
        ("S0.1.1b", "softmax"),
        ("S1.1.1a", "softmax"),
        ("S2.3.1a", "softmax, time"),
        ("S3.1d", "softmax"),
    ),
    "the products with N x N weights take O(N^2 d)": (
        ("S0.1.1b", "times $V$"),
        ("S1.1.1a", "$A V$"),
        ("S2.2.1a", "from the left"),
        ("S3.1d", "both products"),
        ("S4.2a", "with softmax"),
    ),
    "Q (K^T V) takes O(N d^2)": (
        ("S1.2.2a", "time"),
        ("S2.2.1a", "from the right"),
        ("S4.2a", "without"),
    ),
    "O(N d^2) is less than O(N^2 d), for long sequences alone": (
        ("S3.2c", "for all tokens, $d = 64$"),
        ("S4.2a", "lower, $d = 64$"),
    ),
    "linear attention keeps O(N d)": (("S0.3.1d", "space"), ("S1.2.2a", "space")),
    "scores take N^2": (("S1.1.1b", "scores"), ("S2.3.1a", "similarity, space")),
    "a window needs space for its pairs": (
        ("S1.2.3a", "space of the sparse matrix"),
        ("S1.2.4a", "space of the weights"),
        ("S1.4.2a", "space of the weights"),
    ),
    "sums over the past are products with a state": (
        ("S3.2a", "outputs that differ, in fractions"),
        ("S3.2b", "outputs that differ from the sums, in fractions"),
    ),
    "a window of w takes O(N w d)": (
        ("S1.2.3a", "time, local, $N = k + m$"),
        ("S1.4.2a", "time, $N = w + m$"),
        ("S2.2.3d", "local"),
    ),
    "pairs can be chosen by content": (
        ("S1.2.3b", "kept pairs that differ between two inputs"),
        ("S4.4a", "kept pairs that differ between two inputs"),
    ),
    "a pattern in tiles takes fewer products": (("S4.1b", "in parts"), ("S4.1c", "fewer products")),
    "Huber's loss errs less where there are outliers": (("S3.3g", "with outliers"), ("S3.3l", "others may be better")),
}


def verdict_of(claim_id: str, label: str) -> str:
    """The verdict of one part of a claim, as it is stored."""
    entry = ledger()[claim_id]
    parts = {name: verdict for name, verdict, *_ in entry.parts}
    assert label in parts, f"{claim_id}: expected one of {list(parts)}, got {label!r}"
    return parts[label]


def unlike(parts: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The verdicts of these parts, unless they are all the same."""
    found = {f"{claim_id}, {label}": verdict_of(claim_id, label) for claim_id, label in parts}
    return found if len(set(found.values())) > 1 else {}


@pytest.mark.parametrize("statement", SAME)
def test_like_statements_have_like_verdicts(statement):
    assert len(SAME[statement]) > 1
    assert unlike(SAME[statement]) == {}


def test_unlike_verdicts_are_noticed():
    parts = ("S3.1d", "softmax"), ("S3.1d", "both products")
    assert unlike(parts) == {"S3.1d, softmax": "corrected", "S3.1d, both products": "confirmed"}


def test_a_part_that_is_gone_is_noticed():
    with pytest.raises(AssertionError, match=r"S3\.1a: expected one of .*, got 'all three'"):
        verdict_of("S3.1a", "all three")


# ------------------------------------------------------------------------------------------ nothing rests on a constant

# Rules, and helpers that call them: their second argument must be computed; for `orders`, the second entry of a row.
MEASURED = {
    "printed", "counted", "growth", "bound", "holds", "region", "effect", "improves", "outperforms", "loses_nothing",
    "saves", "orders", "untestable", "without_records",
}  # fmt: skip
MISSING = ("untestable", "without_records")
SYMBOLS = "ortho.cost.big_o"  # a formula made of these alone counts as typed in, too


def constants(tree: ast.Module) -> dict[str, ast.expr]:
    """The values that a module names at its top level, and the symbols that it imports."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
        elif isinstance(node, ast.ImportFrom) and node.module == SYMBOLS:
            found |= {name.asname or name.name: ast.Constant(name.name) for name in node.names}
    return found


def typed(node: ast.expr, known: dict[str, ast.expr]) -> bool:
    """Whether an expression is made only of literals, of symbols, and of names of such expressions."""
    if isinstance(node, ast.Name):
        return node.id in known and typed(known[node.id], {name: x for name, x in known.items() if name != node.id})
    if isinstance(node, ast.Dict):
        return bool(node.values) and all(typed(value, known) for value in node.values)
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return all(typed(x, known) for x in node.elts)
    if isinstance(node, ast.BinOp):
        return typed(node.left, known) and typed(node.right, known)
    if isinstance(node, ast.UnaryOp):
        return typed(node.operand, known)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict.fromkeys":
        return len(node.args) == 1 or typed(node.args[1], known)
    return isinstance(node, ast.Constant)


def measured(call: ast.Call, name: str) -> ast.expr | None:
    """The argument of a rule that holds our figure; None if it is not in its place."""
    if name != "orders":
        return call.args[1] if len(call.args) > 1 else None
    rows = call.args[0].values if isinstance(call.args[0], ast.Dict) else [call.args[0]]
    return ast.Tuple([row.elts[1] if isinstance(row, ast.Tuple) else row for row in rows])


BRANCHES = ast.If | ast.IfExp | ast.For | ast.comprehension


def always(function: ast.AST, call: ast.Call) -> bool:
    """Whether a function always reaches a call: no branch contains it, and none returns before it."""
    body = getattr(function, "body", [])
    for statement in body if isinstance(body, list) else [body]:
        if any(node is call for node in ast.walk(statement)):
            above = [node for node in ast.walk(statement) if isinstance(node, BRANCHES)]
            return not above
        if isinstance(statement, BRANCHES) and any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            return False
    return True


def faults(source: str) -> Iterator[str]:
    """The calls of rules whose measured side is typed in, or is the same as the side it is compared with.

    Code may say in typed words that something is missing, if it says so only after finding it missing.
    """
    tree = ast.parse(source)
    known = constants(tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func).rpartition(".")[2]
        if name == "relative_error" and len(call.args) == 2 and ast.dump(call.args[0]) == ast.dump(call.args[1]):
            yield f"line {call.lineno}: compares {ast.unparse(call.args[0])} with itself"
        if name not in MEASURED or not call.args:
            continue
        found = measured(call, name)
        if found is None:
            yield f"line {call.lineno}: {name} is passed by keyword"
        elif name in MISSING:
            within = [function for function in functions if any(node is call for node in ast.walk(function))]
            if typed(found, known) and all(always(function, call) for function in within):
                yield f"line {call.lineno}: is untestable whatever there is"
        elif typed(found, known):
            yield f"line {call.lineno}: {name} gets {ast.unparse(found)}, which nothing computes"
        elif name != "orders" and ast.dump(found) == ast.dump(call.args[0]):
            yield f"line {call.lineno}: {name} compares {ast.unparse(found)} with itself"


@pytest.mark.parametrize("path", EVIDENCE, ids=lambda path: path.stem)
def test_evidence_is_computed(path):
    assert list(faults(path.read_text("utf-8"))) == []


HEAD = "from ortho.cost.big_o import N, d\nFIXED = {'': 7}\n"


@pytest.mark.parametrize(
    ("evidence", "fault"),
    [
        ("def f(): return counted({'': 7}, {'': 7})", "which nothing computes"),
        ("def f(): return counted({'': 7}, FIXED)", "which nothing computes"),
        ("def f(): return counted({'': 7}, dict.fromkeys(names, 7))", "which nothing computes"),
        ("def f(): return counted({'': 7}, ours={'': made()})", "by keyword"),
        ("def f(): return growth('N', 3 * N * d)", "which nothing computes"),
        ("def f(): return holds('a property', 0.0, EXACT)", "which nothing computes"),
        ("def f(): return region((0, 1), {'a': 1 / 2})", "which nothing computes"),
        ("def f(): return orders({'a': ('N', N)})", "which nothing computes"),
        ("def f(): return counted(found(), found())", "compares found() with itself"),
        ("def f(): return holds('equal', relative_error(o, o), EXACT)", "compares o with itself"),
        ("def f(): return untestable('a thing', {'what it needs': None})", "whatever there is"),
        ("f = lambda: untestable('a thing', dict.fromkeys(names))", "whatever there is"),
        ("def f():\n    if g(): h()\n    return untestable('a thing', {'a': None})", "whatever there is"),
        ("def f():\n    if g(): return h()\n    return untestable('a thing', {'a': None})", ""),
        ("def f(): return untestable('a thing', {'a': None}) if g() else h()", ""),
        ("def f(): return untestable('a thing', {'a': made(), 'b': None})", ""),
        ("def f(): return counted({'': 7}, {'': made()})", ""),
        ("def f(): return counted(FIXED, {'': made()})", ""),
        ("def f(): return growth('N', COST.forward)", ""),
        ("def f(): return orders({'a': ('N', COST)})", ""),
        ("def f(): return holds('equal', relative_error(o, p), EXACT)", ""),
    ],
)
def test_constant_evidence_is_noticed(evidence, fault):
    found = list(faults(HEAD + evidence))
    assert bool(found) == bool(fault)
    assert all(fault in text for text in found)
