"""Centroids, and the tokens that are near them: what `ortho.attention.selected.routing` makes its clusters of."""

import torch
from torch.nn.functional import one_hot

from ortho import _checks
from ortho._autocast import no_autocast
from ortho._checks import checked
from ortho._typing import Float, Int, Tensor
from ortho.attention.operands import working
from ortho.attention.selected.selection import drawn_once

CLUSTERS, WIDTH = 16, 64
SEED = 2003_05997  # of the default centroids, the same in every call; a number that nobody seeds data with
DECAY = 0.999
TINY = 1e-6  # beside a variance


@checked(shapes=False)
def is_balanced(balanced: bool | None, is_causal: bool) -> bool:
    """Whether clusters are, by default in calls that are not causal; TypeError for what says neither."""
    if balanced is not None and not isinstance(balanced, bool):
        raise TypeError(f"balanced: expected True, False or None, got {_checks.describe(balanced)}")
    return not is_causal if balanced is None else balanced


@checked
def draw_centroids(
    K: int, *, count: int = CLUSTERS, generator: torch.Generator | None = None
) -> Float[Tensor, "clusters K"]:
    """Normalised standard normal vectors, as the authors' code draws them."""
    shape = (_checks.positive_int("count", count), _checks.positive_int("K", K))
    return normalised(torch.randn(shape, generator=generator, dtype=torch.float64))


@checked(shapes=False)
def normalised(x: Float[Tensor, "*batch N K"]) -> Float[Tensor, "*batch N K"]:
    """Layer normalisation without a trained part; a row whose numbers are equal becomes 0."""
    x = x - x.mean(-1, keepdim=True)
    return x * (x.square().mean(-1, keepdim=True) + TINY).rsqrt()


@checked
def nearest(x: Float[Tensor, "*batch N K"], centroids: Float[Tensor, "... clusters K"]) -> Int[Tensor, "*batch N"]:
    """The cluster of each row: that of the centroid with the highest product."""
    return products(x, centroids).argmax(-1)


@checked
def update_centroids(
    centroids: Float[Tensor, "... clusters K"],
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    *,
    decay: float = DECAY,
) -> Float[Tensor, "... clusters K"]:
    r"""$\lambda \mu + (1 - \lambda)\, m$ with m the mean of the normalised queries and keys nearest to a centroid.

    Centroids (clusters, K) are shared by all sequences; (H, clusters, K) are those of each head of (B, H, N, K). One
    that is nearest to nothing stays as it is. (The paper adds (1 - lambda)/2 times the *sums* of queries and keys, so
    that centroids would grow with the batch; its code divides by their number, as this does.)
    """
    if not isinstance(decay, int | float) or not 0 <= decay <= 1:
        raise ValueError(f"decay: expected a number from 0 to 1, got {_checks.describe(decay)}")
    centroids = given_centroids(centroids, q)
    with torch.no_grad():
        x = torch.cat([working(q), working(k)], -2)
        chosen = one_hot(nearest(x, centroids), centroids.shape[-2]).to(x)
        x = normalised(x)
        sums, counts = chosen.mT @ x, chosen.sum(-2)[..., None]  # (*batch, clusters, K or 1)
        lead = centroids.shape[:-2]
        sums, counts = (each.reshape(-1, *lead, *each.shape[-2:]).sum(0) for each in (sums, counts))
        return torch.where(counts > 0, decay * centroids + (1 - decay) * sums / counts.clamp(min=1), centroids)


def given_centroids(centroids: Tensor | None, q: Tensor) -> Float[Tensor, "... clusters K"]:
    """The centroids, or the default ones, in the dtype of the work."""
    if centroids is None:
        return drawn_once("routing", lambda K: draw_centroids(K, generator=torch.Generator().manual_seed(SEED)), q)
    _checks.float_tensor("centroids", centroids)
    shape, lead = tuple(centroids.shape), tuple(q.shape[:-2])
    fits = centroids.dim() >= 2 and shape[-1] == q.shape[-1] and 0 not in shape
    if not fits or shape[:-2] != lead[len(lead) - len(shape) + 2 :]:
        wanted = f"(clusters, {q.shape[-1]}), with leading axes like the last of {lead} or none"
        raise ValueError(f"centroids: expected shape {wanted}, got {shape}")
    _checks.finite("centroids", centroids)
    return centroids.detach().to(q.device, torch.promote_types(q.dtype, torch.float32))


def products(x: Float[Tensor, "*batch N K"], centroids: Float[Tensor, "... c K"]) -> Float[Tensor, "*batch N c"]:
    """Of each normalised row with each centroid."""
    with torch.no_grad(), no_autocast(x):
        x = normalised(working(x))
        return x @ centroids.to(x).mT
