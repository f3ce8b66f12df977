"""S2, section 4.4: its table of five mechanisms, what each computes with, costs, and can express."""

import sympy

from ortho.attention import MECHANISMS
from ortho.cost import layer
from ortho.cost.attention import positional_attention
from ortho.cost.big_o import H, N, d, m
from paper.claims.evidence import lookup
from paper.claims.evidence.common import without_records
from paper.claims.evidence.frozen_layer import train_once
from paper.claims.evidence.low_resource import CHAPTER, fixed_gain, of_text
from paper.claims.ledger import evidence
from paper.claims.outcomes import loses_nothing
from paper.claims.rules import all_of, counted, growth, holds, region, untestable
from paper.claims.verdicts import Finding

DRAWS = 4  # of frozen matrices


def near() -> Finding:
    """Linear attention and the Performer, of which the source says that they come near the baseline."""
    statement, found = "near the baseline with little data", of_text(("linear", "FAVOR+"))
    if not found:
        return without_records(statement, "linear attention and FAVOR+ on little text")
    return loses_nothing(statement, found)


def expressive() -> dict[str, Finding]:
    """By a lookup, which weights that depend on content solve: the least share of the target that a head misses."""
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
            lookup.low_rank_error(lookup.ENTRIES, width),
            lookup.SOLVED,
            at=f"{at}, heads of {width} features",
        ),
        "ORA, full": region((0, 100 * lookup.SOLVED), missed, unit=" % missed"),
        "Performer, nearly full": untestable("nearly full expressiveness", {"what is nearly": None}),
    }


@evidence("S2.4.4a", chapter=CHAPTER)
def mechanisms() -> Finding:
    core = {
        "standard": ("N^2*d", MECHANISMS["softmax"].cost(1, N, H, d / H, d / H, form="reference").forward),
        "fixed": ("N^2*d", positional_attention(1, N, d / 8).elementwise_forward),
        "linear": ("N*d^2", MECHANISMS["linear"].cost(1, N, H, d / H, d / H).forward),
        "Performer": ("N*m*d", MECHANISMS["favor"].cost(1, N, H, d / H, d / H, m=m).forward),
    }
    sides = [layer(1, N, d, H, projection=side, form="reference") for side in ("learned", "frozen")]
    parts = {
        **{f"cost, {name}": growth(said, sympy.expand(ours)) for name, (said, ours) in core.items()},
        "cost, ORA as standard": counted({"": sides[0].forward}, {"": sides[1].forward}),
        # products of 64 numbers of size 1/8 at most, rounded, of matrices orthogonal to a few roundings of QR
        "ORA's queries and keys": holds("frozen and orthogonal", train_once("frozen").orthogonality, 1e-13),
        "little data, fixed": fixed_gain(),
        "little data, linear and Performer": near(),
        **{f"expressiveness, {name}": found for name, found in expressive().items()},
    }
    return all_of(parts).noting(
        "ORA's values are trained. What it does with little data, untested in the source, is S2.5.2a here"
    )
