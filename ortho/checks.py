"""The door: what would be wrong in silence is refused in one sentence, `name: expected <wanted>, got <got>`.

What PyTorch refuses clearly by itself is left to PyTorch.
"""

import operator
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from numbers import Real
from typing import Any

import torch
from torch import Tensor

FORMS = ("reference", "fast")  # of an attention function: as its formula reads, and as it is computed in practice
WHOLE = 12  # up to this many names are all listed, whatever is near

# Other names that the field has for ours or for related methods. If there are several, the first known one is meant.
ALIASES: dict[str, tuple[str, ...]] = {
    # mechanisms
    "bigbird": ("big-bird",), "block-local": ("blocked-window",), "deltanet": ("delta",), "dot-product": ("softmax",),
    "elu": ("linear",), "flash-attention": ("flash",), "forgetting": ("fox",), "forgetting-transformer": ("fox",),
    "full": ("softmax",), "gated-deltanet": ("gated-delta",), "gated-linear-attention": ("gla",),
    "gdn": ("gated-delta",), "heavy-hitters": ("importance",), "kimi": ("kda",), "kimi-delta-attention": ("kda",),
    "linear-transformer": ("linear",), "local": ("window",), "longformer": ("global-local",),
    "mamba": ("selective-scan", "ssd"), "mamba-2": ("ssd",), "performer": ("favor",),
    "random-fourier": ("rff",), "trigonometric": ("rff",), "relu": ("linear-relu",), "rfa": ("rff",),
    "rope": ("rotary",), "rotary-embedding": ("rotary",), "routing-transformer": ("routing",),
    "rwkv": ("vector-gated",), "rwkv-7": ("vector-gated",), "s6": ("selective-scan",),
    "scaled-dot-product": ("softmax",), "sdpa": ("softmax",), "sliding-window": ("window",),
    "sparse-transformer": ("strided",), "standard": ("softmax", "learned"), "state-space": ("ssd",),
    "state-space-duality": ("ssd",), "swa": ("window",), "test-time-training": ("ttt",), "vanilla": ("softmax",),
    # what makes queries and keys, and draws
    "detached": ("stopped",), "fixed": ("frozen",), "hadamard": ("structured",), "iid": ("gaussian",),
    "normal": ("gaussian", "iid"), "orthogonal": ("haar", "frozen"), "qr": ("haar",), "randn": ("gaussian", "iid"),
    "random": ("frozen", "gaussian"), "stop-gradient": ("stopped",), "trainable": ("learned",),
    "trained": ("learned",),
    # forms, positions, features, tasks
    "absolute": ("learned",), "chunked": ("fast",), "fused": ("fast",), "naive": ("reference",),
    "slow": ("reference",), "sincos": ("sinusoidal",), "associative-recall": ("mqar", "recall"),
    "cos-sin": ("rff",), "favor+": ("favor", "positive"), "fourier": ("rff",),
    "exponential": ("positive",), "gaussian": ("iid",),
}  # fmt: skip

# Where to find all names, for the arguments that have many.
LISTS = {"attention": "ortho.MECHANISMS", "projection": "ortho.PROJECTIONS"}


def describe(value: Any) -> str:
    """How a value is named in an error: a tensor by its dtype and shape, anything else by its type and repr."""
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}: {', '.join(map(describe, value))}"
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"


def expect(fits: Any, name: str, wanted: str, got: Any) -> None:
    """ValueError, `name: expected <wanted>, got <got>`, unless it `fits`."""
    if not fits:
        raise ValueError(f"{name}: expected {wanted}, got {got}")


def one_of(name: str, value: Any, known: Collection[str]) -> str:
    """`value` if it is one of the known names, else ValueError that says which is near, or all."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(unknown(name, value, known))
    return value


def unknown(name: str, value: Any, known: Collection[str]) -> str:
    """The message for a value that is not among the known names; all are listed if they are few, or if none is near."""
    near = next(_near(value, known), None) if isinstance(value, str) else None
    names = ", ".join(map(repr, known))
    if near and len(known) > WHOLE:
        names = f"{len(known)} names (all: list({LISTS[name]}))" if name in LISTS else f"{len(known)} names"
    return f"{name}: expected one of {names}, got {value!r}" + (f"; did you mean {near!r}?" if near else "")


def _near(value: str, known: Collection[str]) -> Iterator[str]:
    """The known names that may be meant, the most likely first."""
    plain = {_plain(one): one for one in reversed(list(known))}
    asked = _plain(value)
    for one in (asked, asked.removesuffix("-attention")):
        if one in plain:
            yield plain[one]
        yield from (alias for alias in ALIASES.get(one, ()) if alias in known)
    yield from (plain[one] for one in get_close_matches(asked, plain, n=1))


def _plain(name: str) -> str:
    """A name in small letters, with one sign between words."""
    return "-".join(name.lower().replace("_", " ").replace("-", " ").split())


def untraced(what: str) -> None:
    """RuntimeError in `torch.jit.trace`, as in TensorBoard's `add_graph`, for `what` depends on values, or on sizes as
    integers: the graph would hold those of one call."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise RuntimeError(f"torch.jit.trace: expected a function that can be traced, got {what}")


def positive_int(name: str, value: Any) -> int:
    """`value` as an int if it is an integer of at least 1 (NumPy's too), else TypeError or ValueError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name}: expected an integer of at least 1, got {describe(value)}")
    expect(number >= 1, name, "an integer of at least 1", number)
    return number


def probability(name: str, value: Any) -> float:
    """`value` as a float if it is a number in [0, 1) (NumPy's too), else TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number in [0, 1), got {describe(value)}")
    number = float(value)
    expect(0 <= number < 1, name, "a number in [0, 1)", value)
    return number


def heads(d_model: Any, num_heads: Any) -> tuple[int, int]:
    """(d_model, num_heads) if they are positive integers and the heads divide the width."""
    d_model, num_heads = positive_int("d_model", d_model), positive_int("num_heads", num_heads)
    expect(d_model % num_heads == 0, "num_heads", f"a divisor of d_model = {d_model}", num_heads)
    return d_model, num_heads


def within(name: str, what: str, value: Tensor | None, least: float, most: float) -> None:
    """ValueError unless a tensor, which is `what`, lies within [least, most].

    Only numbers that are at hand are read: on an accelerator that would stall its queue, and while compiling, under a
    transform of `torch.func`, and for fake tensors there are none.
    """
    if value is None or not reads_values(value):
        return
    smallest, largest = value.detach().aminmax()  # NaN propagates, and lies nowhere
    low, high = float(smallest), float(largest)
    if not (least <= low and high <= most):
        raise ValueError(f"{name}: expected {what} within {least:.2g} and {most:.2g}, got {low:.2g} to {high:.2g}")


def reads_values(value: Tensor) -> bool:
    """Whether reading a tensor's numbers is possible and cheap."""
    if torch.compiler.is_compiling() or value.device.type != "cpu" or not value.numel():
        return False
    return type(value) in (Tensor, torch.nn.Parameter) and not torch._C._are_functorch_transforms_active()


def operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    attn_mask: Tensor | None,
    past: int = 0,
    bias: bool = False,
) -> None:
    """Raise unless q (..., N, K), k (..., M, K), v (..., M, V) and the mask (..., N, past + M) fit together.

    `past` is the number of keys of a state before k.
    """
    if not (q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and q.dim() > 1):
        got = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"q, k, v: expected shapes (..., N, K), (..., M, K), (..., M, V), got {got}")
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        got = ", ".join(str(x.dtype) for x in (q, k, v))
        raise TypeError(f"q, k, v: expected one floating-point dtype, got {got}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: expected width {q.shape[-1]} like q, got shape {tuple(k.shape)}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v: expected length {k.shape[-2]} like k, got shape {tuple(v.shape)}")
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"q, k: expected no empty axes, got {tuple(q.shape)} and {tuple(k.shape)}")
    if is_causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"is_causal: expected as many queries as keys, got {q.shape[-2]} and {k.shape[-2]}")
    if attn_mask is not None:
        mask(attn_mask, (*q.shape[:-1], past + k.shape[-2]), bias=bias)


def mask(value: Any, shape: tuple[int, ...], name: str = "attn_mask", *, bias: bool = False) -> None:
    """Raise, naming the argument, unless `value` is a boolean tensor that broadcasts to `shape`, or with `bias` one of
    numbers to be added to the scores."""
    if not isinstance(value, Tensor) or not (value.dtype == torch.bool or (bias and value.is_floating_point())):
        raise TypeError(f"{name}: expected a boolean tensor (True = attend), got {describe(value)}")
    try:
        fits = torch.broadcast_shapes(value.shape, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: expected a shape that broadcasts to {shape}, got {tuple(value.shape)}")


def sequence(name: str, x: Tensor, width: int) -> None:
    """ValueError unless x is a tensor (B, N, width) with B, N >= 1: heads of anything else would mix its axes."""
    if x.is_nested:
        raise ValueError(
            f"{name}: expected a padded tensor (B, N, {width}) and a key_padding_mask, got a nested tensor"
        )
    if x.dim() != 3 or x.shape[-1] != width or 0 in x.shape:
        raise ValueError(f"{name}: expected shape (B, N, {width}) with B, N >= 1, got {tuple(x.shape)}")


def layer_mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    batch: int,
    heads: int,
    queries: int,
    keys: int | None,
    name: str = "attn_mask",
) -> Tensor | None:
    """The two masks of a layer combined: None, or a mask that broadcasts to (B, H, N, M), True = attend; numbers, which
    are added to the scores, stay numbers.

    Raises ValueError for a padding mask that is not (B, M), with any M if `keys` is None; and for an `attn_mask`, by
    its `name`, whose first axis is ambiguous.
    """
    if attn_mask is not None:
        shape = tuple(attn_mask.shape)
        if len(shape) == 2 and shape[0] == batch == queries > 1:
            raise ValueError(
                f"{name}: expected four axes where B = N = {batch}, got {shape}: "
                "write (N, M) as mask[None, None], and padded keys (B, M) as a key_padding_mask"
            )
        if len(shape) == 3 and shape[0] == batch == heads > 1:
            raise ValueError(
                f"{name}: expected four axes where B = H = {batch}, got {shape}: "
                "write (H, N, M) as mask[None], and (B, N, M) as mask[:, None]"
            )
    if key_padding_mask is None:
        return attn_mask
    if not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool:
        got = describe(key_padding_mask)
        raise TypeError(f"key_padding_mask: expected a boolean tensor (True = padding), got {got}")
    shape = tuple(key_padding_mask.shape)
    if len(shape) != 2 or shape[0] != batch or (keys is not None and shape[1] != keys):
        raise ValueError(f"key_padding_mask: expected shape ({batch}, {keys or 'M'}), got {shape}")
    padding = key_padding_mask[:, None, None]  # (B, 1, 1, M)
    if attn_mask is None:
        return ~padding
    mask(attn_mask, (batch, heads, queries, shape[1]), name, bias=True)
    return attn_mask & ~padding if attn_mask.dtype == torch.bool else attn_mask.masked_fill(padding, -torch.inf)


def mask_of_keys(attn_mask: Tensor, keys: int) -> None:
    """ValueError for a mask that is not the same for all queries."""
    if attn_mask.dim() > 1 and attn_mask.shape[-2] != 1:
        shape = tuple(attn_mask.shape)
        raise ValueError(f"attn_mask: expected a mask of keys, of shape (..., 1, {keys}), got {shape}")


def state(value: Any, *names: str) -> tuple[Tensor, ...]:
    """An `initial_state` as a tuple of tensors, one for each of `names`, else TypeError or ValueError."""
    if not isinstance(value, tuple | list) or len(value) != len(names) or not all(map(torch.is_tensor, value)):
        raise ValueError(f"initial_state: expected a tuple of tensors ({', '.join(names)}), got {describe(value)}")
    return tuple(value)


def carried(name: str, value: Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """`value` if this part of an `initial_state` has this shape, with dtype and device of `like`; else ValueError."""
    if value.shape != shape or value.dtype != like.dtype or value.device != like.device:
        wanted = f"{name} {like.dtype} of shape {tuple(shape)} on {like.device}"
        raise ValueError(f"initial_state: expected {wanted}, got {describe(value)} on {value.device}")
    return value


def gate(name: str, value: Tensor | None, shape: tuple[int, ...], like: str = "keys") -> None:
    """ValueError unless a gate is None or a tensor of that shape, `like` others'."""
    if value is not None and value.shape != shape:
        raise ValueError(f"{name}: expected shape {tuple(shape)} like the {like}, got {tuple(value.shape)}")
