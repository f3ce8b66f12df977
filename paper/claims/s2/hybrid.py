"""S2, section 5.3: layers some of whose heads are frozen and orthogonal, and others learned."""

from ortho.cost import Cost, layer
from ortho.cost.layers import hybrid
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, region
from paper.claims.verdicts import Finding

CHAPTER = "26-heads-of-several-kinds"

D, H = 768, 12
LENGTHS = (512, 4096)
LEARNED = (1, 3, 6, 11)  # heads of the twelve


def mixed(N: int, learned: int, rest: str, *, causal: bool = False) -> Cost:
    """A layer with so many learned heads, whose others are of another kind."""
    return hybrid(1, N, D, H, heads={"learned": learned, rest: H - learned}, causal=causal)


def over_learned(quantity: str, N: int, learned: int, rest: str = "frozen") -> float:
    """What such a layer costs, over what one with learned heads alone does."""
    return float(getattr(mixed(N, learned, rest), quantity) / getattr(layer(1, N, D, H), quantity))


@evidence("S2.5.3a", chapter=CHAPTER)
def some_heads_learned() -> Finding:
    def label(learned: int) -> str:
        return f"{learned} of {H} learned"

    work = {f"{label(n)}, $N = {N:,}$": round(over_learned("step", N, n), 3) for N in LENGTHS for n in LEARNED}
    trained = {label(n): round(over_learned("trained", LENGTHS[0], n), 3) for n in LEARNED}
    stopped = [1 / over_learned("step", N, LEARNED[0], "structured-stopped") for N in LENGTHS]
    positional = [1 / over_learned("step", N, LEARNED[0], "positional") for N in LENGTHS]
    return all_of(
        {
            "FLOPs of the layer's training step, over those with learned heads alone": region((0, 1), work),
            "numbers that are trained, likewise": region((0, 1), trained),
        }
    ).noting(
        "An open question of the source's, answered here for what such a layer costs; what it learns is another "
        "matter. With gradients through the frozen heads little is saved. A step of one learned head beside stopped "
        f"ones takes {stopped[0]:.2f} and {stopped[1]:.2f} times fewer FLOPs at $N = {LENGTHS[0]:,}$ and "
        f"${LENGTHS[1]:,}$, beside positional ones {positional[0]:.2f} and {positional[1]:.2f} times"
    )
