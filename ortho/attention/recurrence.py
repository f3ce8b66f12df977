r"""One recurrence for all linear states, token by token; `chunked_recurrence` has it by matrix products.

A state is a matrix S (K, V) that answers a query with $o = S^T q$. Token t lets it fade, by one factor $a_t$ or by one
for each channel of the keys, and writes a value at its key with strength $\beta_t$:

$$S_t = \mathrm{Diag}(a_t)\, S_{t-1} + \beta_t k_t u_t^T, \qquad o_t = S_t^T q_t .$$

Linear attention, FAVOR+ and state-space duality write the value, $u_t = v_t$. The delta rules *erase*: they write what
the state lacks, $u_t = v_t - a_t S_{t-1}^T k_t$. Attention that is divided by its weights' sum is the same with a
column of ones beside the values. In a call that is not causal every query reads the state after the last key.
"""

import torch

from ortho._typing import Float, Tensor

# Within chunks of C tokens the weights are materialised, N C numbers; from chunk to chunk a state is carried, N K V / C
# numbers. The two are equal at C = sqrt(K V), which is 64 for heads of width 64; at K = 256, 64 was also the fastest.
CHUNK = 64


def token_by_token(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    beta: Float[Tensor, "*batch M"] | None,
    log_decay: Float[Tensor, "..."] | None,
    S: Float[Tensor, "*batch K V"],
    *,
    is_causal: bool,
    erase: bool = True,
    before_fading: bool = False,
    steps: int = 1,
) -> tuple[Float[Tensor, "*batch N V"], Float[Tensor, "*batch K V"]]:
    """(o, the state after the last key) by the formula, with one query after every `steps` keys.

    `log_decay` is (..., M), or (..., M, K) for a decay per channel. Without `erase` a key only adds to the state. With
    `before_fading` a key replaces what the state held before it faded.
    """
    # Unbound at once: indexing each token would make the backward pass quadratic.
    rows = []
    queries = q[..., None, :].unbind(-3) if is_causal else ()
    strengths = None if beta is None else beta[..., None, None].unbind(-3)
    decays = None
    if log_decay is not None:
        a = log_decay.exp()
        decays = (a[..., None] if a.dim() == k.dim() else a[..., None, None]).unbind(-3)  # (..., K or 1, 1)
    for t, (key, value) in enumerate(zip(k[..., None, :].unbind(-3), v[..., None, :].unbind(-3), strict=True)):
        old = S
        if decays is not None:
            S = decays[t] * S
        new = value - key @ (old if before_fading else S) if erase else value  # (..., 1, V)
        if strengths is not None:
            new = strengths[t] * new
        S = S + key.mT @ new
        if is_causal and (t + 1) % steps == 0:
            rows.append(queries[t // steps] @ S)
    return torch.cat(rows, -2) if is_causal else q @ S, S


def default_chunk(k: Tensor) -> int:
    """`CHUNK`; on a GPU, where passing on each state takes a launch, larger if there were over 128 chunks."""
    return max(CHUNK, -(-k.shape[-2] // 128)) if k.is_cuda else CHUNK
