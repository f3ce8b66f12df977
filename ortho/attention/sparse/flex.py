"""Patterns through PyTorch's FlexAttention (Dong et al. 2024, arXiv:2412.05496), which skips blocks without a pair.

This kernel is not a form of any mechanism: users call it explicitly, and calls that it cannot serve raise an error.
"""

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ortho import _checks
from ortho._checks import checked, prepend_state
from ortho._typing import Bool, Float, State, Tensor
from ortho.attention.sparse.block_sparse import Blocks
from ortho.attention.sparse.pattern import Pattern

if TYPE_CHECKING:  # PyTorch's module imports the compiler and its dependencies: only once somebody calls it
    from torch.nn.attention.flex_attention import BlockMask
else:
    BlockMask = Any

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of the compiled kernels
KERNELS = 64  # the most that a process may compile; PyTorch's own limit is 8
WHOLE: Any = {"fullgraph": True, "dynamic": False}  # too many kernels raise an error, not fall back silently


@checked(shapes=False)
def flex_pattern_attention(
    q: Float[Tensor, "*batch N K"],
    k: Float[Tensor, "*batch M K"],
    v: Float[Tensor, "*batch M V"],
    *,
    pattern: Pattern,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    compiled: bool = True,
) -> Float[Tensor, "*batch N V"]:
    """The result of `pattern_attention`, without masks and states, in the operands' precision.

    Unless `compiled`, it runs FlexAttention's own definition, with all N x M scores, for comparison. The mask of blocks
    is made once for each pattern and pair of lengths, from all N x M pairs. Each pattern, shape and dtype is compiled
    anew, which takes seconds.

    Raises ValueError, naming the argument, for a mask, for a state, and for operands that need a gradient on a CPU,
    where FlexAttention has no backward pass; if `compiled`, TypeError for a dtype other than float32, float16 and
    bfloat16, and RuntimeError if compilation fails, for example without a compiler. torch.OutOfMemoryError is passed
    on.
    """
    for name, value in (("attn_mask", attn_mask), ("initial_state", initial_state), ("return_state", return_state)):
        if value is not None and value is not False:
            raise ValueError(
                f"{name}: expected none, which FlexAttention has no place for, got {_checks.describe(value)}"
            )
    prepend_state(q, k, v, is_causal, None, None)
    _checks.scale_factor(scale)
    if q.device.type == "cpu" and torch.is_grad_enabled():
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.requires_grad:
                raise ValueError(f"{name}: expected no need of a gradient, which FlexAttention does not have on a CPU")
    if compiled and q.dtype not in DTYPES:
        raise TypeError(f"q: expected one of {', '.join(map(str, DTYPES))}, for compiled FlexAttention, got {q.dtype}")
    pairs = _block_mask(pattern, is_causal, q.shape[-2], k.shape[-2], q.device)
    flat_q, flat_k, flat_v = (x.reshape(1, -1, *x.shape[-2:]) for x in (q, k, v))
    o = (_compiled if compiled else _eager)(flat_q, flat_k, flat_v, pairs, scale)
    return o.reshape(*q.shape[:-1], v.shape[-1])


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # the cache would keep inference tensors, useless in training
def _block_mask(pattern: Pattern, is_causal: bool, queries: int, keys: int, device: torch.device) -> BlockMask:
    # The rule is traced, so it cannot read numbers, such as how many blocks there are, from positions.
    allowed = pattern.known(queries, keys, device) if isinstance(pattern, Blocks) else pattern.allowed

    def kept(_: Tensor, __: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return allowed(i, j) & (j <= i) if is_causal else allowed(i, j)

    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(kept, None, None, queries, keys, device=str(device))


def _compiled(q: Tensor, k: Tensor, v: Tensor, pairs: BlockMask, scale: float | None) -> Tensor:
    from torch._dynamo import config as dynamo_config

    try:
        with dynamo_config.patch(recompile_limit=KERNELS):
            return _kernel()(q, k, v, block_mask=pairs, scale=scale)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise RuntimeError(f"compiled: expected a call that FlexAttention compiles, got {reason:.300}") from error


@lru_cache(maxsize=1)
def _kernel() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, **WHOLE)


def _eager(q: Tensor, k: Tensor, v: Tensor, pairs: BlockMask, scale: float | None) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")  # intended here
        return flex_attention(q, k, v, block_mask=pairs, scale=scale)
