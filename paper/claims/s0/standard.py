"""S0, section 1: the standard layer's time, space and parameters."""

import torch

from ortho.attention import MECHANISMS
from ortho.cost import layer
from ortho.cost.big_o import H, N, d
from ortho.layers.multihead import MultiheadAttention
from paper.claims.figures import show
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, growth, printed
from paper.claims.verdicts import Finding

CHAPTER = "01-the-standard-layer"

STANDARD = layer(1, N, d, H, form="reference")
CORE = MECHANISMS["softmax"].cost(1, N, H, d / H, d / H, form="reference")


@evidence("S0.1.1a", chapter=CHAPTER)
def projections() -> Finding:
    four = STANDARD.forward - CORE.forward  # Q, K, V and the output projection, all alike
    return growth("N*d^2", 3 * four / 4)


@evidence("S0.1.1b", chapter=CHAPTER)
def attention_steps() -> Finding:
    # A width of zero on one side leaves the other product.
    scores, values = (
        MECHANISMS["softmax"].cost(1, N, H, *widths, form="reference") for widths in ((d / H, 0), (0, d / H))
    )
    return all_of(
        {
            "$QK^T$": growth("N^2*d", scores.forward),
            "softmax": growth("N^2", CORE.elementwise_forward),
            "times $V$": growth("N^2*d", values.forward),
        }
    )


@evidence("S0.1.1c", chapter=CHAPTER)
def time() -> Finding:
    total = STANDARD.forward + STANDARD.elementwise_forward
    return all_of(
        {"total": growth("N^2*d + N*d^2", total), "$N \\gg d$": growth("N^2*d", total, held=("d",))},
    )


@evidence("S0.1.2a", chapter=CHAPTER)
def space() -> Finding:
    kept = STANDARD.saved_bytes / STANDARD.itemsize
    fused = layer(1, N, d, H, form="fast")
    return all_of(
        {"total": growth("N^2 + N*d", kept), "$N \\gg d$": growth("N^2", kept, held=("d",))},
    ).noting(f"A fused kernel keeps {show(fused.saved_bytes / fused.itemsize)} numbers and no score matrix")


@evidence("S0.1.2b", chapter=CHAPTER)
def score_matrix() -> Finding:
    def megabytes(length: int) -> float:
        q = k = torch.empty(length, 64, dtype=torch.float16, device="meta")
        return (q @ k.mT).nbytes / 1e6

    figures = {4096: "33.5", 8192: "134", 16384: "536"}
    return printed(
        {f"$N = {length}$": text for length, text in figures.items()},
        {f"$N = {length}$": megabytes(length) for length in figures},
        unit=" MB",
    ).noting("This is one head's matrix")


@evidence("S0.1.3a", chapter=CHAPTER)
def parameters() -> Finding:
    def trained(d_model: int) -> int:
        module = MultiheadAttention(d_model, d_model // 64, device="meta")
        return sum(weight.numel() for weight in module.parameters())

    return counted(
        {"layer": "4*d^2", "$d = 768$": 2_359_296, "$d = 1024$": 4_194_304},
        {"layer": STANDARD.trained, "$d = 768$": trained(768), "$d = 1024$": trained(1024)},
    )
