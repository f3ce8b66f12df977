"""The triangular system of a chunk, solved row by row: which errors are known, and which one is found from them."""

from fractions import Fraction
from typing import NamedTuple

from paper.interactive.markup import cells, decimal

__all__ = ["BETA", "KEYS", "START", "VALUES", "System", "chunk_solve", "solved"]

# Four tokens with unit keys of width 2 and values of one number; START is the memory before them.
KEYS = (
    (Fraction(1), Fraction(0)),
    (Fraction(3, 5), Fraction(4, 5)),
    (Fraction(0), Fraction(1)),
    (Fraction(4, 5), Fraction(3, 5)),
)
VALUES = (Fraction(3), Fraction(10), Fraction(4), Fraction(6))
BETA = (Fraction(1), Fraction(1, 2), Fraction(1), Fraction(1, 2))
START = (Fraction(2), Fraction(-1))


class System(NamedTuple):
    """$(I + M\\,\\mathrm{diag}(\\beta))\\,E = V - K S$ for one column, in fractions."""

    matrix: list[list[Fraction]]  # unit lower triangular
    right: list[Fraction]
    errors: list[Fraction]


def solved() -> System:
    """The system of the four tokens, and its solution from the first row to the last."""
    count = len(KEYS)
    matrix = [
        [Fraction(int(i == j)) if j >= i else _product(KEYS[i], KEYS[j]) * BETA[j] for j in range(count)]
        for i in range(count)
    ]
    right = [value - _product(key, START) for key, value in zip(KEYS, VALUES, strict=True)]
    errors: list[Fraction] = []
    for row, number in zip(matrix, right, strict=True):
        errors.append(number - _product(row, errors))
    return System(matrix, right, errors)


def chunk_solve() -> str:
    """The system, its solution, and each row's arithmetic; a script adds a control that goes row by row."""
    system = solved()
    rows = "".join(
        f'<tr><th scope="row">{i + 1}</th>{cells("td", map(decimal, row))}<td class="error">{decimal(error)}</td>'
        f'<td>{decimal(right)}</td><td class="how">{_how(system, i)}</td></tr>'
        for i, (row, error, right) in enumerate(zip(system.matrix, system.errors, system.right, strict=True))
    )
    columns = "".join(f'<th scope="col">{j + 1}</th>' for j in range(len(KEYS)))
    return (
        '<div class="stepper chunk-solve"><table><caption>A chunk of four tokens: the matrix <i>I</i> + <i>M</i> '
        "diag(<i>β</i>), the errors <i>E</i> and the right side, solved from the first row to the last</caption>"
        f'<thead><tr><th scope="col">row</th>{columns}<th scope="col"><i>E</i></th><th scope="col">right side</th>'
        f'<th scope="col">how its error is found</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _product(one: "list[Fraction] | tuple[Fraction, ...]", other: "list[Fraction] | tuple[Fraction, ...]") -> Fraction:
    """The inner product, over the length of the shorter one."""
    return sum((a * b for a, b in zip(one, other, strict=False)), Fraction(0))


def _how(system: System, i: int) -> str:
    """The arithmetic of row i, such as 7.6 = 8.6 - 0.6 · 1, without the terms that are 0."""
    known = zip(system.matrix[i][:i], system.errors, strict=False)
    terms = [f" − {decimal(a)} · {decimal(e) if e >= 0 else f'({decimal(e)})'}" for a, e in known if a]
    return f"{decimal(system.right[i])}{''.join(terms)} = {decimal(system.errors[i])}"
