"""Closed forms of attention by a pattern: what a call costs, from the tiles and blocks that it goes through."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ortho._checks import checked
from ortho._typing import Size
from ortho.attention.mechanism import SOFTMAX_BACKWARD, SOFTMAX_FORWARD, AttentionCost
from ortho.attention.sparse.parts import Part

if TYPE_CHECKING:
    from ortho.attention.sparse.pattern import Pattern


class Work(NamedTuple):
    """What a part computes for one sequence: the tiles that read anything, of so many `queries`; the blocks that they
    read, of so many `keys`, counted once for each tile that reads them. Places without a token are computed too."""

    tiles: Size
    blocks: Size
    queries: Size
    keys: Size

    @property
    def pairs(self) -> Size:
        """The scores that are computed, of kept pairs and of others."""
        return self.blocks * self.queries * self.keys


def work_of(part: Part) -> Work:
    """Counted from the part's table; where each sequence has a table of its own, absent blocks are computed too."""
    Bq, Bk = part.queries.positions.shape[-1], part.keys.positions.shape[-1]
    if part.table.dim() == 3:
        _, T, W = part.table.shape
        return Work(T if W else 0, T * W, Bq, Bk)
    there = part.table >= 0
    return Work(int(there.any(1).sum()), int(there.sum()), Bq, Bk)


@checked
def pattern_cost(
    B: Size,
    N: Size,
    H: Size,
    K: Size,
    V: Size,
    *,
    pattern: "Pattern",
    form: str = "fast",
    causal: bool = False,
    qk_grad: bool = True,
    itemsize: int = 4,
) -> AttentionCost:
    """Closed form of one self-attention call, in either form; with symbols as `pattern.work` takes them.

    Half precision costs what float32 does. The positions and tables of the parts, some integers a
    token and a block, are not counted.
    """
    if form == "reference":
        return masked_cost(B * H, N, K, V, masks=1, qk_grad=qk_grad, itemsize=itemsize)
    work, last = (pattern.work(N, is_causal=causal, last=last) for last in (False, True))
    return parts_cost(B, N, H, K, V, work=work, last=last, qk_grad=qk_grad, itemsize=itemsize)


def parts_cost(
    B: Size,
    N: Size,
    H: Size,
    K: Size,
    V: Size,
    *,
    work: Sequence[Work],
    last: Sequence[Work],
    qk_grad: bool = True,
    itemsize: int = 4,
) -> AttentionCost:
    """Of `attention_by_parts` on B H sequences, in float32 at least, with the work of its parts; and with that of the
    parts for the last query alone. The keys are the state."""
    G, item, reach = B * H, max(itemsize, 4), int(qk_grad)
    rows, further = B * H * N, len(work) - 1
    pairs = G * sum(w.pairs for w in work)
    places = G * sum(w.tiles * w.queries for w in work)
    read = G * sum(w.blocks * w.keys for w in work)
    return AttentionCost(
        forward=2 * pairs * (K + V),
        backward=2 * pairs * (K + V + reach * (2 * K + V)),  # scores again, dV; dP, dQ, dK
        # Scaled queries; scores kept in range and hidden, maximum, subtract, exp2, sum; a row's maximum and sum
        # bounded, its quotients, its logarithm taken, added, bounded. A further part: difference, sigmoid in these
        # units, outputs between the two; logarithms added.
        elementwise_forward=rows * K + 6 * pairs + places * (V + 5) + further * rows * (V + 4),
        # Scores kept in range and hidden, subtract, exp2; what each tile adds to dV, and each further part. To reach q
        # and k: the row's term, sum_v do o; subtract and multiply; what is added to dK and dQ; a factor of each.
        elementwise_backward=4 * pairs
        + read * V
        + further * rows * V
        + reach * (2 * rows * V + 2 * pairs + read * K + 2 * further * rows * K + 2 * rows * K),
        saved_bytes=item * rows * (2 * K + V + 1),  # q, k, v, a logarithm
        decode=2 * G * (K + V) * sum(w.pairs for w in last),
        state_bytes=itemsize * rows * (K + V),
        output_bytes=item * rows * V,
    )


def masked_cost(
    G: Size, N: Size, K: Size, V: Size, *, masks: Size, qk_grad: bool = True, itemsize: int = 4
) -> AttentionCost:
    """Of `softmax_attention_reference` on G sequences under so many `masks` (N, N), made by index arithmetic.

    All pairs are computed, and blocked before the softmax and once more behind it.
    """
    rows, pairs, reach = G * N, G * N * N, int(qk_grad)
    return AttentionCost(
        forward=2 * pairs * (K + V),
        backward=2 * pairs * (V + reach * (2 * K + V)),
        elementwise_forward=pairs * (3 + SOFTMAX_FORWARD),  # scale, and block twice
        elementwise_backward=reach * pairs * (3 + SOFTMAX_BACKWARD),
        # Weights, and again before they are blocked; masks, a byte a pair.
        saved_bytes=max(itemsize, 4) * (pairs + reach * (pairs + rows * (2 * K + V))) + reach * masks * N * N,
        decode=2 * rows * (K + V),
        state_bytes=itemsize * rows * (K + V),
    )
