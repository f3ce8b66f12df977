r"""The work of `channel_gates` within a chunk, and from chunk to chunk.

What reader i finds of the key of token j fades by $\prod_{s=j+1}^{i} a_s$, one factor for each channel of the keys. As
a quotient of products from the chunk's start it would be a matrix product of $q_i b_i$ and $k_j / b_j$, but the latter
overflows. Yang et al. (2023, arXiv:2312.06635, section 4.3) divide by the product at the start of the reader's
sub-block instead, and leave pairs within a sub-block to sums over channels. Here a chunk is merged out of single
tokens: of two neighbouring blocks, the readers of the second meet the keys of the first at the boundary between them.
Each factor is so the product of decays that all lie between a key and its reader: none exceeds 1, nothing is divided,
a decay of 0 takes no digit from those beside it, and each pair of tokens is part of one matrix product.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Blocks(NamedTuple):
    """Tokens in b blocks of h each, along two axes. A reader is a vector that a memory or a key is multiplied with."""

    fade: Tensor  # (..., b, 1, K), what is left of an earlier memory at the end of the block
    keys: Tensor  # (..., b, h, K), times what is left of each at the end of the block
    readers: tuple[Tensor, ...]  # (..., b, h, K) each, times what is left for it of a memory before the block
    weights: tuple[Tensor, ...]  # (..., b, h, h) each, what a reader finds of the keys of its block up to its own


def chunk_width(length: int, chunk: int) -> int:
    """The largest power of two that is at most `chunk`, or the least one that holds a shorter sequence."""
    return 1 << min(chunk.bit_length() - 1, (length - 1).bit_length())


def tokens(decay: Tensor, k: Tensor, *readers: Tensor) -> Blocks:
    """Tokens (..., C, K) as C blocks of one. A reader finds its own token's key as it was written."""
    decay, k, *rows = (x[..., None, :] for x in (decay, k, *readers))
    return Blocks(decay, k, tuple(x * decay for x in rows), tuple(x @ k.mT for x in rows))


def merged(x: Blocks) -> Blocks:
    """Each two neighbouring blocks as one."""
    (fade_1, fade_2), (keys_1, keys_2) = _pairs(x.fade), _pairs(x.keys)
    readers, weights = [], []
    for reader, weight in zip(x.readers, x.weights, strict=True):
        (reader_1, reader_2), (weight_1, weight_2) = _pairs(reader), _pairs(weight)
        readers.append(torch.cat([reader_1, reader_2 * fade_1], -2))
        across = torch.cat([reader_2 @ keys_1.mT, weight_2], -1)
        weights.append(torch.cat([pad(weight_1, (0, weight.shape[-1])), across], -2))
    keys = torch.cat([keys_1 * fade_2, keys_2], -2)
    return Blocks(fade_1 * fade_2, keys, tuple(readers), tuple(weights))


def _pairs(x: Tensor) -> tuple[Tensor, ...]:
    """The first and the second of each two blocks: (..., b, h, ·) -> two of (..., b/2, h, ·)."""
    return x.unflatten(-3, (-1, 2)).unbind(-3)


def in_chunks(
    q: Tensor | None, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor, S: Tensor
) -> tuple[list[Tensor], Tensor]:
    r"""(the answers (..., C, V) of each chunk, none without queries; the memory after the last key).

    Operands are (..., n, C, ·): n chunks of C tokens, a power of two; the memory S before them is (..., K, V). With
    `beta` (..., n, C, 1) keys erase what they find: what is written at key i is $u_i = \beta_i (v_i - S_{i-1}^T
    \mathrm{Diag}(a_i) k_i)$. With $\beta_i k_i$ as a reader, faded R and with the weights L below the diagonal, this is
    the system $(I + L)\, U = \mathrm{diag}(\beta) V - R S$, whose two right sides are solved for all chunks at once.
    """
    readers = [x for x in (q, None if beta is None else k * beta) if x is not None]
    x = tokens(decay, k, *readers)
    while x.fade.shape[-3] > 1:
        x = merged(x)
    fade, keys = x.fade.squeeze(-3), x.keys.squeeze(-3)
    readers, weights = ([y.squeeze(-3) for y in each] for each in (x.readers, x.weights))
    erased: tuple[Tensor, ...] = ()
    if beta is not None:
        right = torch.cat([v * beta, readers.pop()], -1)
        solved = torch.linalg.solve_triangular(weights.pop(), right, upper=False, unitriangular=True)
        v, R = solved.split([v.shape[-1], k.shape[-1]], -1)
        erased = R.unbind(-3)
    answers, read = [], [x.unbind(-3) for x in (*readers, *weights)]
    for i, (left, key, new) in enumerate(zip(*(x.unbind(-3) for x in (fade, keys, v)), strict=True)):
        if erased:
            new = new - erased[i] @ S
        if read:
            reader, weight = (x[i] for x in read)
            answers.append(reader @ S + weight @ new)
        S = left.mT * S + key.mT @ new
    return answers, S
