"""What the experiment attention-speed compares: attention functions by name, their definitions, and their costs.

An arm's name begins with that of a mechanism, or with 'sdpa' for PyTorch's fused softmax attention with nothing around
it, or with 'materialised' for softmax attention as it is defined. Then follows what is special about the arm: 'linear
causal', 'linear recurrent', 'sdpa cudnn' for a kernel by its name.
Gates are operands of an arm like q, k and v, and have gradients like them.
"""

from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from math import inf
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ortho.attention import MECHANISMS
from ortho.attention.linear.feature_map import EluPlusOne
from ortho.attention.mechanism import Mechanism
from ortho.attention.sparse.block_sparse import Blocks
from ortho.attention.sparse.pattern import Pattern
from ortho.attention.sparse.window import Window
from ortho.cost import Cost
from paper.experiments.engine.records import Case
from paper.experiments.speed.benchmark import assert_all_close, dtype, rounding_error

YARDSTICK, MATERIALISED, FLEX = "sdpa", "materialised", "flex"
BACKENDS = {
    "math": SDPBackend.MATH,  # the definition, materialised
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,  # from xFormers
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
KERNELS = (*BACKENDS, FLEX)
COMPILED_PATTERNS = ("window", "block-sparse", "dilated", "local-strided", "fixed")
SETS = {
    "exact": (YARDSTICK, "sdpa causal", "flash", "flash causal", MATERIALISED, "materialised causal"),
    "kernels": tuple(
        f"{YARDSTICK}{kernel}{way}" for way in ("", " causal") for kernel in ("", *(f" {kernel}" for kernel in KERNELS))
    ),
    "main": (YARDSTICK, "sdpa causal", "linear", "linear causal", "favor", "favor causal"),
    "recurrent": (YARDSTICK, "sdpa causal", "linear causal", "linear recurrent"),
    "family": (YARDSTICK, "sdpa causal"),
    "delta": (YARDSTICK, "sdpa causal", "delta causal", "gated-delta causal"),
    "delta alone": ("delta causal", "gated-delta causal"),
    "memories": (YARDSTICK, "sdpa causal", "delta causal"),
    "window alone": ("window", "window causal"),
    "patterns": (YARDSTICK, "sdpa causal", "sdpa masked"),
    "compiled patterns": (
        YARDSTICK,
        "sdpa causal",
        *(f"{name} {FLEX}{way}" for way in ("", " causal") for name in COMPILED_PATTERNS),
    ),
    "dynamic": (YARDSTICK, "sdpa causal"),
}
# Sets that also contain every other mechanism of a family, except these arms: another set times them, or they are one
# of two heads that 'local-strided' and 'fixed' time together.
FAMILIES = {
    "family": ("linear", SETS["main"]),
    "memories": ("recurrent", SETS["delta"]),
    "patterns": ("sparse", ("strided", "fixed-columns")),
    "dynamic": ("dynamic_sparse", ()),
}
# Arms of a family that keep more than 512 MiB for the backward pass from this length on are left out; the channels'
# decays only with heads of 128.
TOO_LARGE = {"taylor": 4096, "kda": 4096, "vector-gated": 4096, "sparse-linear": 16384}

SEED = 0
EVERYWHERE = 2**30  # the width of a window that leaves nothing out
CHECKED_LENGTH = 1024  # at least: more than a window; the definitions materialise N x N weights
# Successive results from q to its gradient, each rounded once: scaled, projected, its exponential, the product with k,
# with v, the division; and back.
STAGES = 12

Attention = Callable[..., Tensor]
Operands = tuple[Tensor, ...]  # q, k, v, and the gates of an arm


def arms_of(case: Case) -> tuple[str, ...]:
    """The arms of a case: those of its set; mechanisms with a causal form have it, too."""
    arms = SETS[case["arms"]]
    family, left_out = FAMILIES.get(case["arms"], ("", ()))
    named = {arm.split()[0] for arm in left_out}
    others = [m for m in MECHANISMS.values() if m.family == family and m.name not in named]
    served = [m for m in others if not _too_large(m.name, case)]
    return *arms, *(f"{m.name}{way}" for m in served for way in _ways(m))


def _too_large(name: str, case: Case) -> bool:
    wide = case["arms"] != "memories" or case["K"] >= 128
    return wide and case["N"] >= TOO_LARGE.get(name, inf)


def _ways(mechanism: Mechanism) -> list[str]:
    """The ways to call a mechanism that are measured. Memories: causal only, else all queries read the last state."""
    served = {"": mechanism.bidirectional and mechanism.family != "recurrent", " causal": mechanism.causal}
    return [way for way, is_served in served.items() if is_served]


def function(arm: str, chunk: int) -> Attention:
    """What an arm runs, f(q, k, v, *gates); causal mechanisms with chunks use chunks of at most `chunk`."""
    name, causal = _parts(arm)
    kernel = by_name(arm)
    if kernel == FLEX:
        pattern = Window(EVERYWHERE) if name == YARDSTICK else _pattern(name)
        return partial(flex, pattern=pattern, is_causal=causal)
    if name == YARDSTICK:
        if kernel:
            return partial(by_kernel, kernel=kernel, is_causal=causal)
        return masked if "masked" in _words(arm) else partial(scaled_dot_product_attention, is_causal=causal)
    if "recurrent" in _words(arm):
        return recurrent
    if name == MATERIALISED:
        return partial(_mechanism(arm).reference, is_causal=causal)
    mechanism = _mechanism(arm)
    options: dict[str, Any] = _chunk(mechanism, causal, chunk)
    return _with_gates(arm, partial(mechanism.fast, is_causal=causal, **options))


def by_kernel(q: Tensor, k: Tensor, v: Tensor, *, kernel: str, is_causal: bool) -> Tensor:
    """PyTorch's fused attention by the kernel of this name; RuntimeError for a call that the kernel does not serve."""
    with sdpa_kernel(BACKENDS[kernel]):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's fused attention with the pattern 'window' as a mask, which is made beforehand, as a user would do."""
    return scaled_dot_product_attention(q, k, v, attn_mask=_window(q.shape[-2], q.device))


@cache
def _window(N: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it outlives the call
        return _pattern("window").mask(N, device=device)


def _pattern(name: str) -> Pattern:
    """The pattern of a sparse mechanism."""
    return cast(Pattern, MECHANISMS[name].make())


def flex(q: Tensor, k: Tensor, v: Tensor, *, pattern: Pattern, is_causal: bool) -> Any:
    """Attention over a pattern's pairs by PyTorch's compiled FlexAttention (Dong et al. 2024, arXiv:2412.05496)."""
    if q.device.type == "cpu" and q.requires_grad:
        raise ValueError("q: expected no need of a gradient, which FlexAttention does not have on a CPU")
    return _flex_kernel()(q, k, v, block_mask=_flex_mask(pattern, is_causal, q.shape[-2], q.device))


@cache
def _flex_kernel() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


@cache
def _flex_mask(pattern: Pattern, is_causal: bool, N: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    # The rule is traced, so it cannot read numbers, such as how many blocks there are, from positions.
    table = pattern.mask(N, is_causal=is_causal, device=device) if isinstance(pattern, Blocks) else None

    def kept(_: Tensor, __: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return pattern.rule(is_causal)(i, j) if table is None else table[i, j]

    with torch.inference_mode(False):  # it outlives the call
        return create_block_mask(kept, None, None, N, N, device=str(device))


def definition(arm: str) -> Attention:
    """What an arm must compute: the mechanism's reference."""
    if "masked" in _words(arm):
        return MECHANISMS["window"].reference
    return _with_gates(arm, partial(_mechanism(arm).reference, is_causal=alike(arm) != YARDSTICK))


def _with_gates(arm: str, call: Callable[..., Tensor]) -> Attention:
    """The call with its gates as arguments after q, k and v."""
    names = tuple(_mechanism(arm).gates)
    return lambda q, k, v, *gates: call(q, k, v, **dict(zip(names, gates, strict=True)))


def _chunk(mechanism: Mechanism, causal: bool, chunk: int) -> dict[str, int]:
    """The chunk as an option, if the mechanism has this option."""
    return {"chunk": chunk} if causal and "chunk" in signature(mechanism.fast).parameters else {}


def by_name(arm: str) -> str | None:
    """The kernel that an arm asks for by name, else None; the kernel may not serve the call."""
    return next((word for word in _words(arm) if word in KERNELS), None)


def known(arm: str) -> bool:
    """Whether there is such an arm; earlier records hold some of mechanisms that are no longer there."""
    return _parts(arm)[0] in (YARDSTICK, MATERIALISED, *MECHANISMS)


def gated(arm: str) -> bool:
    """Whether an arm has gates among its operands."""
    return bool(_mechanism(arm).gates)


def alike(arm: str) -> str:
    """The fused softmax attention that sees the same keys as an arm does."""
    return "sdpa causal" if {"causal", "recurrent"} & {*_words(arm)} else YARDSTICK


def declared(case: Case, arm: str) -> Cost:
    """The closed form of an arm at a case's sizes.

    The recurrence counts like the form that is not causal: it makes the same sums, one term at a time, and reads them
    as often.
    """
    name, causal = _parts(arm)
    chunk = {} if name in (YARDSTICK, MATERIALISED) else _chunk(_mechanism(arm), causal, case["chunk"])
    sizes = (case[size] for size in ("B", "N", "H", "K", "K"))
    itemsize = dtype(case).itemsize
    form = "reference" if name == MATERIALISED else "fast"
    cost: Cost = _mechanism(arm).cost(*sizes, form=form, causal=causal, itemsize=itemsize, **chunk)
    return cost


def recurrent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    r"""Causal linear attention as its recurrence reads (Katharopoulos et al. 2020, arXiv:2006.16236, equations 18-20).

    $S_t = S_{t-1} + \phi(k_t) v_t^T$, $z_t = z_{t-1} + \phi(k_t)$, $o_t = S_t^T \phi(q_t) / z_t^T \phi(q_t)$: one token
    after the other, q, k (..., N, K), v (..., N, V) -> (..., N, V), in plain tensor operations and autograd's gradient.
    The tokens are unbound at once: to take each by its index would make the backward pass quadratic. Half precision is
    summed in float32.
    """
    dtype, working = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(working) for x in (q, k, v))
    features = EluPlusOne()(q, k)
    S = v.new_zeros(*v.shape[:-2], k.shape[-1], v.shape[-1])
    z = torch.zeros_like(k[..., 0, :])
    rows = []
    for query, key, value in zip(*(x.unbind(-2) for x in (features.q, features.k, v)), strict=True):
        S = S + key[..., :, None] * value[..., None, :]
        z = z + key
        total = (query * z).sum(-1, keepdim=True)
        rows.append((query[..., None, :] @ S)[..., 0, :] / total)
    return torch.stack(rows, -2).to(dtype)


def draw(case: Case, arm: str = YARDSTICK) -> tuple[Operands, Tensor]:
    """(q, k, v) and the gradient of the output, (B, H, N, K) each; after v come an arm's gates, as an untrained layer
    would make them from random tokens.

    Queries and keys are such that $q K^{-1/4}$ has a squared norm of 1 on average: estimated kernels are then accurate,
    and a sum of weights of either sign stays away from 0.
    """
    generator = torch.Generator().manual_seed(SEED)
    shape = [case[name] for name in ("B", "H", "N", "K")]
    q, k, v, upstream = (torch.randn(shape, generator=generator) for _ in range(4))
    q, k = (x * case["K"] ** -0.25 for x in (q, k))
    B, H, N, K = shape
    tokens = torch.randn(B, N, H * K, generator=generator)
    with torch.no_grad():
        gates = [make(H * K, H, generator=generator)(tokens) for make in _mechanism(arm).gates.values()]
    operands = [x.to(case["device"], dtype(case)) for x in (q, k, v, *gates, upstream)]
    return tuple(x.requires_grad_() for x in operands[:-1]), operands[-1]


def check(case: Case, arm: str, call: Attention) -> None:
    """Raise AssertionError unless a call gives what the definition does, output and all gradients, on a short sequence.

    The definition runs on the same numbers, in float32 at least, and no more precisely: some random features are fitted
    to the eigenvectors of their input, which may come out differently in another precision.
    """
    small = {**case, "B": 1, "N": min(case["N"], max(CHECKED_LENGTH, 2 * case["chunk"]))}
    operands, upstream = draw(small, arm)
    working = torch.promote_types(upstream.dtype, torch.float32)
    exact = tuple(x.detach().to(working).requires_grad_() for x in operands)
    want = _results(arm, definition(arm), exact, upstream.to(working))
    bound = tolerance(small) + tolerance({**small, "dtype": "float32"})
    assert_all_close(arm, _results(arm, call, operands, upstream), want, bound)


def tolerance(case: Case) -> float:
    """The relative error that rounding alone may cause in a computation of a case; the longest sum is over keys, or
    over the features of 'taylor'."""
    terms = max(case["N"], 1 + case["K"] + case["K"] ** 2)
    return rounding_error(STAGES, terms, dtype(case))


def _parts(arm: str) -> tuple[str, bool]:
    """The name, and whether the arm is causal by chunks."""
    return arm.split()[0], "causal" in _words(arm)


def _words(arm: str) -> list[str]:
    """The words of an arm's name after the first: what is special about it."""
    return arm.split()[1:]


def _mechanism(arm: str) -> Mechanism:
    name = _parts(arm)[0]
    return MECHANISMS["softmax" if name in (YARDSTICK, MATERIALISED) else name]


def _results(arm: str, call: Any, operands: Operands, upstream: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of all operands."""
    o = call(*operands)
    names = (f"gradient of {x}" for x in ("q", "k", "v", *_mechanism(arm).gates))
    gradients = torch.autograd.grad(o, operands, upstream)
    return {"output": o.detach(), **dict(zip(names, gradients, strict=True))}
