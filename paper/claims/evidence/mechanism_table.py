"""S2, section 4.4: its table of five mechanisms, what each computes with, costs, and can express."""

import re
from functools import partial

import sympy
import torch

from ortho.attention import MECHANISMS
from ortho.attention.positional.positional_attention import SEVEN, positional_attention
from ortho.cost import Cost, layer
from ortho.cost.big_o import H, N, d, m
from ortho.cost.layers import hybrid
from paper.claims.evidence.cheaper_heads import still_right
from paper.claims.evidence.low_resource import CHAPTER, fixed_gain, of_text
from paper.claims.figures import show
from paper.claims.ledger import catalogue, evidence
from paper.claims.outcomes import loses_nothing
from paper.claims.rules import all_of, contradiction, growth, holds, improves, region
from paper.claims.shared import lookup
from paper.claims.shared.common import without_records
from paper.claims.verdicts import Finding
from paper.elementwise import elementwise
from paper.memory import fitted

DRAWS = 4  # of frozen matrices


def near() -> Finding:
    """Whether linear attention and the Performer come near the baseline, as the source says."""
    statement, found = "near the baseline with little data", of_text(("linear", "FAVOR+"))
    if not found:
        return without_records(statement, "linear attention and FAVOR+ on little text")
    return loses_nothing(statement, found)


def expressive() -> dict[str, Finding]:
    """By a lookup, which content-dependent weights can solve: the least share of the target that a head misses."""
    width = lookup.D_MODEL // lookup.HEADS
    data = lookup.sequences(embedding := lookup.apart())
    standard = lookup.error(lookup.standard_solution(embedding)(data.x), data.target)
    frozen, output = lookup.frozen_solution()
    trained = lookup.error(output, lookup.sequences(frozen).target)
    missed = {
        "embeddings chosen for it": 0.0 if trained <= lookup.SOLVED else 100 * trained,
        f"the standard layer's, the best of {DRAWS} draws": round(100 * lookup.frozen_errors(draws=DRAWS)[0], 1),
    }
    at = f"a lookup among {lookup.ENTRIES} entries"
    return {
        "standard, full": holds("weights that a task asks for", standard, lookup.SOLVED, at=at),
        "fixed, limited": region(
            (1, 100), {at: round(100 * lookup.fixed_weights_error(lookup.ENTRIES), 1)}, unit=" % missed"
        ),
        "linear, full": holds(
            "weights that a task asks for",
            lookup.error(lookup.linear_solution(embedding)(data.x), data.target),
            lookup.SOLVED,
            at=f"{at}, {lookup.HEADS} heads of {width} features",
        ),
        "ORA, full": region((0, 100 * lookup.SOLVED), missed, unit=" % missed"),
    }


def frozen(claim_id: str, pattern: str) -> tuple[str, int]:
    """The projections that the source calls orthogonal, in the words of a claim, and how many matrices they are."""
    found = re.search(pattern, catalogue().claims[claim_id].quote)
    assert found, f"{claim_id}: no words like {pattern!r}"
    return f"orthogonal and frozen: {found[1]}", len(found[1].split("/"))


def fewer_trained() -> Finding:
    """Which of the four layers train fewer numbers than the standard one, by how many per cent."""
    standard = layer(1, N, d, H).trained
    trained = {
        "fixed": one_of_eight().trained,
        "linear": layer(1, N, d, H, attention="linear").trained,
        "Performer": layer(1, N, d, H, attention="favor", m=m).trained,
        "ORA": layer(1, N, d, H, projection="frozen").trained,
    }
    saved = {name: round(float(100 - 100 * sympy.simplify(ours / standard)), 1) for name, ours in trained.items()}
    return improves("fewer than many", saved, unit=" %")


def one_of_eight() -> Cost:
    """The source's fixed attention: seven positional heads and a learned one."""
    return hybrid(1, N, d, 8, heads={"learned": 1, "positional": 7})


def seven_heads() -> sympy.Expr:
    """Scalar operations of the seven positional heads of width d / 8."""

    def count(n: int, width: int, *_: int) -> int:
        return elementwise(partial(positional_attention, patterns=SEVEN), torch.zeros(1, 7, n, width))[0].total()

    return sympy.expand(fitted(count, N * d, N, d, sympy.Integer(1)).subs(d, d / 8))


@evidence("S2.4.4a", chapter=CHAPTER)
def mechanisms() -> Finding:
    core = {
        "standard": ("N^2*d", MECHANISMS["softmax"].cost(1, N, H, d / H, d / H, form="reference").forward),
        "fixed": ("N^2*d", sympy.expand(one_of_eight().forward).coeff(N, 2) * N**2),
        "linear": ("N*d^2", MECHANISMS["linear"].cost(1, N, H, d / H, d / H).forward),
        "Performer": ("N*m*d", MECHANISMS["favor"].cost(1, N, H, d / H, d / H, m=m).forward),
        "ORA": (
            "N^2*d",
            sympy.expand(layer(1, N, d, H, projection="frozen", form="reference").forward).coeff(N, 2) * N**2,
        ),
    }
    # Queries and keys that a training step changes.
    moved = {"inputs that are trained": 100 - still_right(True), "inputs as they are": 100 - still_right(False)}
    parts = {
        "weights, ORA, learned": region((100, 100), moved, unit=" % of queries and keys"),
        "projections, ORA": contradiction(
            frozen("S2.4.3d", r"作为(Q[/KV]*)投影矩阵"), frozen("S2.4.4a", r"(Q[/KV]*)投影.*\+冻结"), unit=" matrices"
        ),
        **{f"cost, {name}": growth(said, sympy.expand(ours)) for name, (said, ours) in core.items()},
        "trained parameters, beside standard": fewer_trained(),
        "little data, fixed": fixed_gain(),
        "little data, linear and Performer": near(),
        **{f"expressiveness, {name}": found for name, found in expressive().items()},
    }
    return all_of(parts).noting(
        "In the package ORA's values are trained. Costs are those of attention, without the projections. The fixed "
        f"heads alone take no $N^2 d$, but {show(seven_heads())} "
        "operations together; it is the learned head beside them that does. A single linear head misses "
        f"{100 * lookup.low_rank_error(lookup.ENTRIES, lookup.D_MODEL // lookup.HEADS):.0f} % of the lookup. What ORA "
        "does with little data, untested in the source, is S2.5.2a here"
    )
