"""S1, section 3.2: activations that are computed again, in GPT-2 small's sizes."""

from ortho.cost import block
from ortho.cost.layers import RecomputedCost, recomputed
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, region
from paper.claims.verdicts import Finding

CHAPTER = "21-recomputation"

SIZES = {"B": 1, "N": 1024, "d": 768, "H": 12, "L": 12}
COMPUTE, MEMORY = (20, 30), (50, 70)  # per cent, as claimed
WAYS = {"each block": 12, "segments of 2 blocks": 6, "of 3": 4, "of 4": 3, "of 6": 2, "all in one": 1}


def found(segments: int, form: str = "fast") -> RecomputedCost:
    return recomputed(**SIZES, segments=segments, form=form)


def all_again(form: str = "fast") -> float:
    """Per cent of a step's FLOPs that all blocks' forward passes take."""
    one = block(*(SIZES[size] for size in ("B", "N", "d", "H")), form=form)
    return 100 * one.forward / (one.forward + one.backward)


def more(segments: int, form: str = "fast") -> int:
    """Per cent of a step's FLOPs without recomputation that come on top."""
    again, whole = found(segments, form).again, found(0, form).step
    return round(100 * again / whole)


def less(segments: int, form: str = "fast") -> int:
    """Per cent of the activations at the peak that are saved."""
    return round(100 - 100 * found(segments, form).peak_bytes / found(0, form).peak_bytes)


@evidence("S1.3.2a", chapter=CHAPTER)
def both() -> Finding:
    return all_of(
        {
            "compute, %": region(COMPUTE, {way: more(segments) for way, segments in WAYS.items()}),
            "less memory for activations, %": region(MEMORY, {way: less(segments) for way, segments in WAYS.items()}),
        }
    ).noting(
        f"GPT-2 small, {SIZES['N']:,} tokens, fused attention, to whole per cents as the source has them. All of the "
        f"forward pass again would be {all_again():.1f} % more; the last product of a segment is not needed again"
    )
