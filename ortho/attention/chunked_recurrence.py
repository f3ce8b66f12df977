r"""The recurrence of `ortho.attention.recurrence` by matrix products over chunks of tokens, with a backward pass.

Let $\gamma_i$ be the sum of the logarithms of a chunk's decays up to token i, $\Gamma_{ij} = e^{\gamma_i
- \gamma_j}$ for $j \le i$, and S the state before the chunk. What is written, U, solves

$$\begin{aligned} (I + \mathrm{diag}(\beta)\, M)\, U &= \mathrm{diag}(\beta)\, (V - \mathrm{diag}(e^\gamma) K S), \\
M &= \mathrm{tril}(K K^T, -1) \circ \Gamma \end{aligned}$$

(the UT transform of Yang et al. 2024, arXiv:2406.06484, section 3.2; with decays arXiv:2412.06464, section 3.3), or
without erasing $U = \mathrm{diag}(\beta) V$. Then

$$\begin{aligned} O &= \mathrm{diag}(e^\gamma) Q S + (\mathrm{tril}(Q K^T) \circ \Gamma)\, U, \\
S &\leftarrow e^{\gamma_C} S + K^T \mathrm{diag}(e^{\gamma_C - \gamma})\, U . \end{aligned}$$

All of this but the products with S is computed for all chunks at once.
"""

from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

import torch
from torch.autograd import Function
from torch.nn.functional import pad

from ortho import checks
from ortho._typing import Float, Tensor
from ortho.attention.backward import once
from ortho.attention.recurrence import default_chunk, token_by_token

# Chunks processed together on a CPU: their operands, some MB, stay in its cache from one product to the next.
TILE = 32


def in_chunks(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    beta: Float[Tensor, "*batch M"] | None,
    log_decay: Float[Tensor, "*batch M"] | None,
    S: Float[Tensor, "*batch K V"],
    *,
    is_causal: bool,
    erase: bool = True,
    steps: int = 1,
    chunk: int | None = None,
) -> tuple[Float[Tensor, "*batch N V"], Float[Tensor, "*batch K V"]]:
    """`token_by_token` by matrix products over chunks, with one decay a token; time and memory linear in N.

    Chunks have whole tokens and at most `chunk` keys, or one token; by default 64, on a GPU more where there would be
    over 128 chunks. Kept for the backward pass are one state per chunk and, per token, some vectors of widths K, V and
    `chunk`. A single token takes a step of the formula. This form cannot be differentiated twice; the definition can.
    """
    if k.shape[-2] == steps:
        return token_by_token(q, k, v, beta, log_decay, S, is_causal=is_causal, erase=erase, steps=steps)
    chunk = default_chunk(k) if chunk is None else checks.positive_int("chunk", chunk)
    tokens = chunks(k.shape[-2] // steps, max(1, chunk // steps))[0]  # of a chunk
    width = tokens * steps
    if not is_causal and not erase:
        S = _sum(k, v, beta, log_decay, S)
        return q @ S, S
    strengths = None if beta is None else cut(beta[..., None], width)
    rates = None if log_decay is None else cut(log_decay[..., None], width)[..., 0]
    queries = cut(q, tokens) if is_causal else None
    flat_S = S.reshape(-1, *S.shape[-2:])
    o, after = _Chunks.apply(queries, cut(k, width), cut(v, width), strengths, rates, flat_S, erase, steps)
    after = after.view(S.shape)
    if not is_causal:
        return q @ after, after
    return o.reshape(*q.shape[:-2], -1, v.shape[-1])[..., : q.shape[-2], :], after


def _sum(k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, S: Tensor) -> Tensor:
    """The state after the last key if nothing is erased: one product."""
    v = v if beta is None else v * beta[..., None]
    if log_decay is None:
        return S + _Product.apply(k, v)
    left = pad(log_decay, (0, 1)).flip(-1).cumsum(-1).flip(-1).exp()  # from before each token to the end
    return left[..., :1, None] * S + _Product.apply(k * left[..., 1:, None], v)


class _Product(Function):
    """K^T V. Autograd would transpose the gradient of K, and all that comes before K would read it across its rows."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(k, v)
        return k.mT @ v

    @staticmethod
    @once
    def backward(ctx: Any, d_S: Tensor) -> tuple[Tensor | None, Tensor]:
        k, v = ctx.saved_tensors
        return v @ d_S.mT if ctx.needs_input_grad[0] else None, k @ d_S


def chunks(length: int, chunk: int) -> tuple[int, int]:
    """(the width of the fewest equal chunks of at most `chunk` tokens, the tokens by which they exceed `length`)."""
    number = -(-length // chunk)
    width = -(-length // number)
    return width, number * width - length


def cut(x: Tensor, width: int) -> Tensor:
    """Chunks (G, n, width, K) of x (..., N, K), with G sequences in all; the last chunk is padded with zeros."""
    behind = -x.shape[-2] % width
    x = pad(x, (0, 0, 0, behind)) if behind else x
    return x.reshape(-1, x.shape[-2] // width, width, x.shape[-1])


def _tiles(G: int, n: int, whole: bool) -> Iterator[tuple[slice, slice]]:
    """Tiles (sequences, chunks) of about `TILE` chunks, contiguous in (G, n, ...); a single tile if `whole`."""
    if whole or G * n <= TILE:
        yield slice(0, G), slice(0, n)
    elif n <= TILE:
        for start in range(0, G, TILE // n):
            yield slice(start, min(G, start + TILE // n)), slice(0, n)
    else:
        for sequence in range(G):
            for start in range(0, n, TILE):
                yield slice(sequence, sequence + 1), slice(start, min(n, start + TILE))


def _flat(tile: tuple[slice, slice], *tensors: Tensor | None) -> list[Any]:
    """The tile of each tensor, as a view with sequences and chunks in one axis."""
    return [None if x is None else x[tile].flatten(0, 1) for x in tensors]


class _Decays(NamedTuple):
    within: Tensor  # Gamma, (G, n, C, C), 0 for the future
    from_start: Tensor  # exp(gamma), (G, n, C, 1)
    to_end: Tensor  # exp(gamma_C - gamma), (G, n, C, 1)


def _decays(log_decay: Tensor | None) -> _Decays | tuple[None, None, None]:
    """The decays of chunks (G, n, C), from sums of only the terms between two tokens: after a very strong decay,
    differences of two sums from the chunk's start would lose all digits of the later terms."""
    if log_decay is None:
        return None, None, None
    C = log_decay.shape[-1]
    ones = torch.ones(C, C, dtype=torch.bool, device=log_decay.device)
    between = log_decay[..., :, None].expand(*log_decay.shape, C).masked_fill(ones.triu(), 0)  # x_s where s > j
    within = between.cumsum(-2).masked_fill_(ones.triu(1), -inf).exp_()
    from_start = log_decay.cumsum(-1).exp_()
    return _Decays(within, from_start[..., None], within[..., -1, :, None])


class _Chunks(Function):
    """(O (G, n, tokens, V), the last state (G, K, V)) by the formulas at the top of this file, for G sequences of n
    chunks: q (G, n, tokens, K) or None, k (G, n, C, K), v (G, n, C, V), beta (G, n, C, 1) or None, log_decay (G, n, C)
    or None, and the state S (G, K, V) before them, where C is `steps` times the tokens of a chunk.

    Names that end in `t` belong to one tile: some chunks of some sequences.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None,
        log_decay: Tensor | None,
        S: Tensor,
        erase: bool,
        steps: int,
    ) -> tuple[Tensor | None, Tensor]:
        ctx.erase, ctx.steps = erase, steps
        decays = _decays(log_decay)
        if erase:
            beta = torch.ones_like(k[..., :1]) if beta is None else beta
            solved = _solved(k, v, beta, decays)
            written, before, S = _write_erasing(k, beta, S, decays, solved)
        else:
            solved = ()
            written = v if beta is None else v * beta
            before, S = _write_adding(k, written, S, decays)
        o = weights = None
        if q is not None:
            o, weights = _read(q, k, written, before, decays, steps)
        ctx.save_for_backward(q, k, v, beta, written, before, weights, *decays, *solved)
        return o, S

    @staticmethod
    @once
    def backward(ctx: Any, d_o: Tensor | None, d_S: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, written, before, weights, within, from_start, to_end, *solved = ctx.saved_tensors
        decays = within, from_start, to_end
        of_q, of_k, _, of_beta, of_decay, *_ = ctx.needs_input_grad
        G, n, C, _ = k.shape
        d_q = q.new_empty(q.shape) if of_q else None
        fresh = torch.empty_like if q is not None and d_o is not None else torch.zeros_like  # queries fill all of it
        d_k = fresh(k) if of_k else None
        d_gamma = k.new_zeros(G, n, C, 1) if of_decay else None
        d_written, d_before = fresh(written), fresh(before)
        if q is not None and d_o is not None:
            gradients = d_o.contiguous(), d_q, d_k, d_gamma, d_written, d_before
            _read_backward(q, k, written, before, weights, decays, ctx.steps, *gradients)
        # `d_before` becomes the gradient of the state after each chunk, `d_S` that of the state before them all.
        d_errors = written.new_empty(written.shape) if ctx.erase else None
        for i in reversed(range(n)):
            d_after = d_S
            d_S = d_before[:, i] + (d_S if from_start is None else d_S * from_start[:, i, -1:])
            d_before[:, i] = d_after
            if d_errors is not None:
                keys = k[:, i] if to_end is None else k[:, i] * to_end[:, i]
                d_written[:, i].baddbmm_(keys, d_after)
                d_errors[:, i] = d_written[:, i] * beta[:, i]
                d_S.baddbmm_(solved[2][:, i].mT, d_errors[:, i], alpha=-1)
        d_v = d_written if beta is None else v.new_empty(v.shape)  # without strengths, what is written are the values
        d_beta = beta.new_empty(beta.shape) if of_beta else None
        for tile in _tiles(G, n, k.is_cuda):
            kt, vt, bt, ut, St, d_ut, d_et, d_St, d_vt = _flat(
                tile, k, v, beta, written, before, d_written, d_errors, d_before, d_v
            )
            gt, d_kt, d_bt, d_gt = _flat(tile, from_start, d_k, d_beta, d_gamma)
            wt, endt = _flat(tile, within, to_end)
            if ctx.erase:
                _solve_backward(kt, bt, St, d_ut, d_et, d_vt, _flat(tile, *solved), wt, gt, d_kt, d_bt, d_gt)
            else:
                d_ut.baddbmm_(kt if endt is None else kt * endt, d_St)
                torch.mul(d_ut, 1 if bt is None else bt, out=d_vt)
                if d_bt is not None:
                    torch.sum(d_ut * vt, -1, keepdim=True, out=d_bt)
            if d_kt is None and d_gt is None:
                continue
            by_writing = torch.bmm(ut, d_St.mT)
            if endt is not None:
                by_writing.mul_(endt)
            if d_gt is not None:
                at_end = (kt * by_writing).sum(-1, keepdim=True)
                d_gt.sub_(at_end)
                d_gt[:, -1].add_(at_end.sum(-2)).add_((St * d_St).sum((-1, -2))[:, None] * gt[:, -1])
            if d_kt is not None:
                d_kt.add_(by_writing)
        if d_gamma is not None:  # of sums from the chunk's start
            d_gamma = d_gamma[..., 0].flip(-1).cumsum(-1).flip(-1)
        return d_q, d_k, d_v, d_beta, d_gamma, d_S, None, None


def _write_adding(k: Tensor, written: Tensor, S: Tensor, decays: Any) -> tuple[Tensor, Tensor]:
    """(the state before each chunk, the state after the last)."""
    _, from_start, to_end = decays
    (G, n, _, K), V = k.shape, written.shape[-1]
    before = written.new_empty(G, n, K, V)
    for tile in _tiles(G, n, k.is_cuda):
        kt, ut, St, endt = _flat(tile, k, written, before, to_end)
        torch.bmm((kt if endt is None else kt * endt).mT, ut, out=St)
    for i in range(n):
        added = before[:, i].clone()
        before[:, i] = S
        S = added.add_(S if from_start is None else S * from_start[:, i, -1:])
    return before, S


def _solved(k: Tensor, v: Tensor, beta: Tensor, decays: Any) -> tuple[Tensor, ...]:
    r"""(M, T, T diag(e^gamma) K, T V), where T is the inverse of I + M diag(beta): the errors E = U / beta are then
    T V - T diag(e^gamma) K S."""
    within, from_start, _ = decays
    G, n, C, _ = k.shape
    identity = torch.eye(C, dtype=k.dtype, device=k.device)
    products, inverse = k.new_empty(G, n, C, C), k.new_empty(G, n, C, C)
    erased, errors = k.new_empty(k.shape), v.new_empty(v.shape)
    for tile in _tiles(G, n, k.is_cuda):
        kt, vt, bt, Mt, Tt, Wt, et = _flat(tile, k, v, beta, products, inverse, erased, errors)
        wt, gt = _flat(tile, within, from_start)
        torch.bmm(kt, kt.mT, out=Mt).tril_(-1)
        if wt is not None:
            Mt.mul_(wt)
            kt = kt * gt
        system = Mt * bt.mT
        torch.linalg.solve_triangular(system, identity.expand_as(system), upper=False, unitriangular=True, out=Tt)
        torch.bmm(Tt, kt, out=Wt)
        torch.bmm(Tt, vt, out=et)
    return products, inverse, erased, errors


def _write_erasing(
    k: Tensor, beta: Tensor, S: Tensor, decays: Any, solved: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """(what is written, the state before each chunk, the state after the last); completes the errors in `solved`."""
    _, from_start, to_end = decays
    _, _, erased, errors = solved
    (G, n, _, K), V = k.shape, errors.shape[-1]
    written, before = errors.new_empty(errors.shape), errors.new_empty(G, n, K, V)
    for i in range(n):
        before[:, i] = S
        errors[:, i].baddbmm_(erased[:, i], S, alpha=-1)
        written[:, i] = errors[:, i] * beta[:, i]
        keys = k[:, i] if to_end is None else k[:, i] * to_end[:, i]
        S = torch.baddbmm(S if from_start is None else S * from_start[:, i, -1:], keys.mT, written[:, i])
    return written, before, S


def _solve_backward(
    k: Tensor,
    beta: Tensor,
    S: Tensor,
    d_written: Tensor,
    d_errors: Tensor,
    d_v: Tensor,
    solved: list[Tensor],
    within: Tensor | None,
    from_start: Tensor | None,
    d_k: Tensor | None,
    d_beta: Tensor | None,
    d_gamma: Tensor | None,
) -> None:
    """Through the system of a tile: fills `d_v` and `d_beta`, adds to `d_k` and `d_gamma`."""
    products, inverse, _, errors = solved
    torch.bmm(inverse.mT, d_errors, out=d_v)
    d_M = torch.bmm(d_v, errors.mT).neg_()  # so far the gradient of M diag(beta)
    if d_beta is not None:
        torch.sum(d_written * errors, -1, keepdim=True, out=d_beta).add_((d_M * products).sum(-2)[..., None])
    if d_k is None and d_gamma is None:
        return
    d_M.mul_(beta.mT)
    by_erasing = torch.bmm(d_v, S.mT).neg_()
    if from_start is not None:
        by_erasing.mul_(from_start)
    if d_gamma is not None:
        d_gamma.add_(_of_gamma(d_M, products)).add_((k * by_erasing).sum(-1, keepdim=True))
    if d_k is not None:
        d_M = d_M.tril_(-1) if within is None else d_M.mul_(within).tril_(-1)
        d_k.baddbmm_(d_M + d_M.mT, k).add_(by_erasing)


def _read(q: Tensor, k: Tensor, written: Tensor, before: Tensor, decays: Any, steps: int) -> tuple[Tensor, Tensor]:
    """(O, the weights tril(Q K^T) o Gamma); a query reads after every `steps` keys."""
    within, from_start, _ = decays
    G, n, tokens, _ = q.shape
    C, read = k.shape[-2], slice(steps - 1, None, steps)
    weights, o = q.new_empty(G, n, tokens, C), written.new_empty(G, n, tokens, written.shape[-1])
    future = _future(tokens, steps, q.device)
    for tile in _tiles(G, n, q.is_cuda):
        qt, kt, ut, St, at, ot, wt, gt = _flat(tile, q, k, written, before, weights, o, within, from_start)
        torch.bmm(qt, kt.mT, out=at)
        if wt is None:
            at.tril_() if steps == 1 else at.masked_fill_(future, 0)
        else:
            at.mul_(wt[:, read])
            qt = qt * gt[:, read]
        torch.bmm(qt, St, out=ot).baddbmm_(at, ut)
    return o, weights


def _read_backward(
    q: Tensor,
    k: Tensor,
    written: Tensor,
    before: Tensor,
    weights: Tensor,
    decays: Any,
    steps: int,
    d_o: Tensor,
    d_q: Tensor | None,
    d_k: Tensor | None,
    d_gamma: Tensor | None,
    d_written: Tensor,
    d_before: Tensor,
) -> None:
    """Fills the gradients, each of which may be None."""
    within, from_start, _ = decays
    G, n, tokens, _ = q.shape
    read, future = slice(steps - 1, None, steps), _future(tokens, steps, q.device)
    for tile in _tiles(G, n, q.is_cuda):
        qt, kt, ut, St, at, d_ot, d_ut, d_St = _flat(tile, q, k, written, before, weights, d_o, d_written, d_before)
        wt, gt, d_qt, d_kt, d_gt = _flat(tile, within, from_start, d_q, d_k, d_gamma)
        torch.bmm(at.mT, d_ot, out=d_ut)
        torch.bmm((qt if gt is None else qt * gt[:, read]).mT, d_ot, out=d_St)
        if d_qt is None and d_kt is None and d_gt is None:
            continue
        d_at = torch.bmm(d_ot, ut.mT)
        by_reading: Any = None
        if d_qt is not None or d_gt is not None:
            by_reading = torch.bmm(d_ot, St.mT)
            if gt is not None:
                by_reading.mul_(gt[:, read])
        if d_gt is not None:
            rows, columns = _sums(d_at, at)
            d_gt[:, read].add_(rows).add_((qt * by_reading).sum(-1, keepdim=True))
            d_gt.sub_(columns)
        if wt is not None:
            d_at.mul_(wt[:, read])
        else:
            d_at.tril_() if steps == 1 else d_at.masked_fill_(future, 0)
        if d_qt is not None:
            torch.bmm(d_at, kt, out=d_qt).add_(by_reading)
        if d_kt is not None:
            torch.bmm(d_at.mT, qt, out=d_kt)


def _future(tokens: int, steps: int, device: torch.device) -> Any:
    """True for keys after a query's own; None if `tril` says the same."""
    if steps == 1:
        return None
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1).repeat_interleave(steps, 1)


def _sums(d_weights: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """What the rows' and the columns' gamma get from weights that have the factor exp(gamma_i - gamma_j)."""
    both = d_weights * weights
    return both.sum(-1, keepdim=True), both.sum(-2)[..., None]


def _of_gamma(d_weights: Tensor, weights: Tensor) -> Tensor:
    """The gradient of gamma (G, C, 1) if rows and columns are the same tokens."""
    rows, columns = _sums(d_weights, weights)
    return rows - columns
