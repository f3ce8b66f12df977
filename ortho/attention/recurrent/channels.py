r"""The recurrence with a decay for each channel of the keys, by matrix products over chunks: without a division; and
the gate that makes such decays."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from ortho import checks
from ortho._typing import Float
from ortho.attention.recurrence import default_chunk, token_by_token
from ortho.gates import Gate


def by_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    S: Tensor,
    *,
    is_causal: bool,
    chunk: int | None = None,
    erase: bool = True,
    before_fading: bool = False,
) -> tuple[Tensor, Tensor]:
    """`token_by_token` by matrix products over chunks, with a decay per channel; time and memory linear in N.

    The length of a chunk is the largest power of two that is at most `chunk`: by default 64, on a GPU more from 16,257
    tokens. Kept for the backward pass are one state per chunk and, for each token, a few vectors for each time that a
    chunk can be halved. A single token takes a step of the formula.
    """
    if k.shape[-2] == 1:
        own: dict[str, bool] = {"is_causal": is_causal, "erase": erase, "before_fading": before_fading}
        return token_by_token(q, k, v, beta, log_decay, S, **own)
    width = chunk_width(k.shape[-2], default_chunk(k) if chunk is None else checks.positive_int("chunk", chunk))
    behind = -k.shape[-2] % width
    if erase and beta is None:
        beta = torch.ones_like(k[..., 0])

    def cut(tensor: Tensor) -> Tensor:  # (..., N, ·) -> (..., n, C, ·)
        return pad(tensor, (0, 0, 0, behind)).unflatten(-2, (-1, width))

    log_decay = cut(torch.zeros_like(k) if log_decay is None else log_decay)
    strengths = None if beta is None else cut(beta[..., None])
    queries = cut(q) if is_causal else None
    answers, S = in_chunks(queries, cut(k), cut(v), strengths, log_decay, S, before_fading=before_fading)
    if not is_causal:
        return q @ S, S
    answers[-1] = answers[-1][..., : width - behind, :]
    return torch.cat(answers, -2), S


# Within a chunk, and from chunk to chunk.
#
# Until reader i finds it, the key of token j fades by $\prod_{s=j+1}^{i} a_s$, one factor for each channel of the keys.
# Written as a quotient of products from the chunk's start, this is a matrix product of $q_i b_i$ and $k_j / b_j$, but
# the latter overflows. Yang et al. (2023, arXiv:2312.06635, section 4.3) divide by the product at the start of the
# reader's sub-block instead, and compute pairs within a sub-block by sums over channels. Here a chunk is merged from
# single tokens: of two neighbouring blocks, the readers of the second meet the keys of the first at the boundary
# between them. So each factor is a product of decays that all lie between a key and its reader: none exceeds 1,
# nothing is divided, a decay of 0 costs the decays beside it no precision, and each pair of tokens is part of one
# matrix product. Such a factor is the exponential of a sum: a product of factors near 1, such as (1 - 1e-5)^2, would
# lose the same digits in each pair of tokens, which adds up over a long sequence.


class Blocks(NamedTuple):
    """Tokens in b blocks of h each, along two axes. A reader is a vector that multiplies a state or a key."""

    log_fade: Tensor  # (..., b, 1, K), the logarithm of what is left of an earlier state at the end of the block
    keys: Tensor  # (..., b, h, K), each times what is left of it at the end of the block
    readers: tuple[Tensor, ...]  # (..., b, h, K) each, times what is left of an earlier state when it reads
    weights: tuple[Tensor, ...]  # (..., b, h, h) each, what a reader finds of the keys of its block up to its own


def chunk_width(length: int, chunk: int) -> int:
    """The largest power of two that is at most `chunk`, or the smallest that holds the sequence if this is shorter."""
    checks.untraced("a decay for each channel, in chunks")
    return 1 << min(chunk.bit_length() - 1, (length - 1).bit_length())


def tokens(log_decay: Tensor, k: Tensor, readers: Sequence[Tensor], early: Sequence[Tensor] = ()) -> Blocks:
    """Tokens (..., C, K) as C blocks of one. A reader finds its own token's key as it was written, and the state after
    its own token has faded it. `early` readers, listed after the others, find the state before that fading."""
    log_decay, k, *rows = (x[..., None, :] for x in (log_decay, k, *readers, *early))
    decay = log_decay.exp()
    faded = tuple(x * decay if i < len(readers) else x for i, x in enumerate(rows))
    return Blocks(log_decay, k, faded, tuple(x @ k.mT for x in rows))


def merged(x: Blocks) -> Blocks:
    """Each pair of neighbouring blocks, merged into one."""
    (log_1, log_2), (keys_1, keys_2) = _pairs(x.log_fade), _pairs(x.keys)
    fade_1, fade_2 = log_1.exp(), log_2.exp()
    readers, weights = [], []
    for reader, weight in zip(x.readers, x.weights, strict=True):
        (reader_1, reader_2), (weight_1, weight_2) = _pairs(reader), _pairs(weight)
        readers.append(torch.cat([reader_1, reader_2 * fade_1], -2))
        across = torch.cat([reader_2 @ keys_1.mT, weight_2], -1)
        weights.append(torch.cat([pad(weight_1, (0, weight.shape[-1])), across], -2))
    keys = torch.cat([keys_1 * fade_2, keys_2], -2)
    return Blocks(log_1 + log_2, keys, tuple(readers), tuple(weights))


def _pairs(x: Tensor) -> tuple[Tensor, ...]:
    """The first and the second of each pair of blocks: (..., b, h, ·) -> two of (..., b/2, h, ·)."""
    return x.unflatten(-3, (-1, 2)).unbind(-3)


def in_chunks(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor,
    S: Tensor,
    *,
    before_fading: bool = False,
) -> tuple[list[Tensor], Tensor]:
    r"""(the answers (..., C, V) of each chunk, none without queries; the state after the last key).

    Operands are (..., n, C, ·): n chunks of C tokens, a power of two; the state S before them is (..., K, V). With
    `beta` (..., n, C, 1) keys erase what they find: what is written at key i is $u_i = \beta_i (v_i - S_{i-1}^T
    \mathrm{Diag}(a_i) k_i)$. Let the $\beta_i k_i$ be readers, R after fading, with the weights L below the diagonal.
    Then $(I + L)\, U = \mathrm{diag}(\beta) V - R S$, which is solved for V and R in all chunks at once.
    `before_fading` leaves out $\mathrm{Diag}(a_i)$.
    """
    queries, erasers = ([] if q is None else [q]), ([] if beta is None else [k * beta])
    x = tokens(log_decay, k, queries, erasers) if before_fading else tokens(log_decay, k, queries + erasers)
    while x.log_fade.shape[-3] > 1:
        x = merged(x)
    fade, keys = x.log_fade.exp().squeeze(-3), x.keys.squeeze(-3)
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


class ChannelDecay(Gate):
    r"""$\log a = \log \sigma(x W_1^T W_2^T + b) / 16$, at most 0: one decay per channel of the keys, through a
    bottleneck of 16 numbers (Yang et al. 2023, arXiv:2312.06635, section 4.4)."""

    rank: ClassVar[int | None] = 16
    per_channel = True
    trained = 1
    temperature: ClassVar[int] = 16

    def _make(self, generator: torch.Generator | None, kind: dict[str, Any]) -> None:
        super()._make(generator, kind)
        self.bias = nn.Parameter(torch.zeros(self.num_heads, 1, self.head_dim, **kind))

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B H N K"]:
        return softplus(-(self._vectors(x).contiguous() + self.bias)) * (-1 / self.temperature)
