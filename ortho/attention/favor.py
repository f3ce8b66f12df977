r"""FAVOR+: softmax attention with its kernel estimated by positive random features (Choromanski et al. 2021).

$\exp(x^T y) = E\, \phi(x)^T \phi(y)$ for $\phi(x) = m^{-1/2} \exp(\Omega x - |x|^2/2)$ with $\Omega$'s rows each
$N(0, I_K)$ (arXiv:2009.14794, lemma 1); with $x = q K^{-1/4}$ and $y = k K^{-1/4}$ this is the softmax kernel. For
independent rows the relative error has variance $(e^{|x + y|^2} - 1) / m$ (lemma 2), which grows fast with the norms:
with standard normal q and k of width 16 or more, and m = 256, a plain average of the values is nearer to softmax
attention than the estimate is.
"""

from concurrent.futures import ThreadPoolExecutor
from math import sqrt

import torch

from ortho import _checks
from ortho._typing import Bool, Float, Size, State, Tensor
from ortho.attention.factored import (
    CHUNK,
    FeatureMap,
    Features,
    feature_attention,
    feature_attention_reference,
)
from ortho.attention.factored_cost import feature_cost
from ortho.attention.feature_draws import orthogonal_features
from ortho.attention.linear import root_scale
from ortho.attention.mechanism import AttentionCost, Mechanism

FEATURES = 256  # the default m, that of the authors' code; K ln K, the order of their theorem 4, is 266 at K = 64
# Of the default features, the same in every call. A number that nobody seeds data with: features drawn from the seed of
# q and k would be aligned with them.
SEED = 2009_14794


_drawn: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def _default_features(K: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The features of a call that brings none, drawn once for each width, dtype and device.

    A thread of its own draws them: no mode of the caller (inference, a default device, operation counting) may reach
    what outlives the call. `torch.compile` breaks its graph there, unless an earlier call has drawn them.
    """
    key = (K, dtype, device)
    if key not in _drawn:

        def draw() -> Tensor:
            generator = torch.Generator().manual_seed(SEED)
            return orthogonal_features(FEATURES, K, generator=generator, dtype=torch.float64).to(device, dtype)

        with ThreadPoolExecutor(1) as thread:
            _drawn[key] = thread.submit(draw).result()
    return _drawn[key]


def _favor_features(features: Tensor | None, scale: float | None) -> FeatureMap:
    """`positive_features`, but each token's divided by its own largest one.

    A query's divisor cancels in the attention, a key's goes into `log_k`. Neither looks at another token, so nothing
    leaks from the future, and nothing is added that would not cancel. Since the result does not depend on the divisors,
    they are constants to autograd.
    """

    def feature_map(q: Tensor, k: Tensor) -> Features:
        K = q.shape[-1]
        square = 1 / sqrt(K) if scale is None else scale
        omega = _default_features(K, q.dtype, q.device) if features is None else features.to(q)
        omega = omega * root_scale(square)
        q, projected = q @ omega.mT, k @ omega.mT  # (..., N, m), (..., M, m)
        half = (k * k).sum(-1, keepdim=True) * (square / 2)  # |y|^2 / 2
        top = projected.detach().amax(-1, keepdim=True)
        lift = half.detach() - half - top  # its value is that of -top, its gradient that of -|y|^2 / 2
        phi_q = (q - q.detach().amax(-1, keepdim=True)).exp()
        phi_k = (projected + lift).exp()
        return Features(phi_q, phi_k, (top - half.detach())[..., 0])

    return feature_map


def favor_attention_reference(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    features: Float[Tensor, "m K"] | None = None,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    r"""Attention with the weights $\phi(x_i)^T \phi(y_j)$ divided by their row sums, for x and y the scaled q and k.

    Arguments and errors as in `softmax_attention_reference`, and `features`, the rows of $\Omega$ (m, K): the same
    256 in every call by default. On the CPU, norms so large that a row's weights leave the range of the dtype raise
    ValueError.
    """
    return feature_attention_reference(
        _favor_features(_checked(features, q), scale),
        q,
        k,
        v,
        is_causal=is_causal,
        attn_mask=attn_mask,
        initial_state=initial_state,
        return_state=return_state,
    )


def favor_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    features: Float[Tensor, "m K"] | None = None,
    chunk: int = CHUNK,
) -> Float[Tensor, "*batch N V"] | tuple[Float[Tensor, "*batch N V"], State]:
    """`favor_attention_reference` in time and memory linear in N; a causal call goes in chunks of at most `chunk`.

    The state is (S (..., m, V), z (..., m), largest s (...)), and holds for the same `features` only. Errors also as in
    `feature_attention`: a mask can only hide keys.
    """
    return feature_attention(
        _favor_features(_checked(features, q), scale),
        q,
        k,
        v,
        is_causal=is_causal,
        attn_mask=attn_mask,
        initial_state=initial_state,
        return_state=return_state,
        chunk=chunk,
    )


def _checked(features: Tensor | None, q: Tensor) -> Tensor | None:
    if features is not None:
        _checks.float_tensor("features", features)
        if isinstance(q, Tensor) and (features.dim() != 2 or features.shape[-1:] != q.shape[-1:]):
            got = tuple(features.shape)
            raise ValueError(f"features: expected shape (m, {q.shape[-1]}), as wide as q, got {got}")
    return features


def favor_cost(
    B: Size,
    N: Size,
    H: Size,
    K: Size,
    V: Size,
    *,
    form: str = "fast",
    causal: bool = False,
    qk_grad: bool = True,
    itemsize: int = 4,
    m: Size = FEATURES,
    chunk: int = CHUNK,
) -> AttentionCost:
    """Closed form of one self-attention call with m features, in either form; what comes after them is `feature_cost`.

    Drawing the features is left out: it is done once.
    """
    rest, rows = feature_cost(
        B, N, H, m, V, form=form, causal=causal, qk_grad=qk_grad, itemsize=itemsize, chunk=chunk, log_k=True
    )
    projections = 4 * rows * K * m
    fast = form == "fast"
    return AttentionCost(
        forward=rest.forward + projections,
        backward=rest.backward + (projections if qk_grad else 0),
        # the scaled rows of Omega; |k|^2; per token its half, the lift and log_k; per feature the maximum, sum and exp
        elementwise_forward=rest.elementwise_forward + m * K + 2 * rows * K + 4 * rows + 6 * rows * m,
        elementwise_backward=rest.elementwise_backward + (rows * (3 * m + 4 * K + 2) if qk_grad else 0),
        saved_bytes=rest.saved_bytes + (max(itemsize, 4) * (m * K + rows * K) if qk_grad else 0),
        decode=rest.decode + 2 * B * H * K * m * (2 if fast else N + 1),
        state_bytes=rest.state_bytes if fast else itemsize * B * H * N * (K + V),
    )


MECHANISM = Mechanism(
    name="favor",
    family="kernel",
    source="Choromanski et al. 2021, arXiv:2009.14794",
    reference=favor_attention_reference,
    fast=favor_attention,
    causal=True,
    exact=False,
    cost=favor_cost,
)
