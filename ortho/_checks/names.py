"""The message for a name that is not known: it lists the known names or counts them, and says which one is near."""

from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import Any

WHOLE = 12  # up to this many names are all listed, whatever is near

# Other names that the field has for ours or for related methods. If there are several, the first known one is meant.
ALIASES: dict[str, tuple[str, ...]] = {
    # mechanisms
    "bigbird": ("big-bird",), "block-local": ("blocked-window",), "deltanet": ("delta",), "dot-product": ("softmax",),
    "elu": ("linear",), "flash-attention": ("flash",), "forgetting": ("fox",), "forgetting-transformer": ("fox",),
    "full": ("softmax",), "gated-deltanet": ("gated-delta",), "gated-linear-attention": ("gla",),
    "gdn": ("gated-delta",), "heavy-hitters": ("importance",), "kimi": ("kda",), "kimi-delta-attention": ("kda",),
    "linear-transformer": ("linear",), "local": ("window",), "longformer": ("global-local",),
    "mamba": ("ssd",), "mamba-2": ("ssd",), "performer": ("favor",),
    "random-fourier": ("rff",), "relu": ("linear-relu",), "rfa": ("rff",),
    "rope": ("rotary",), "rotary-embedding": ("rotary",), "routing-transformer": ("routing",),
    "rwkv": ("vector-gated",), "rwkv-7": ("vector-gated",),
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


def unknown(name: str, value: Any, known: Collection[str], beside: str = "") -> str:
    """The message for a value that is not among the known names, nor what `beside` adds to them.

    All names are listed if they are few, or if none is near.
    """
    near = nearest(value, known)
    names = ", ".join(map(repr, known))
    if near and len(known) > WHOLE:
        names = f"{len(known)} names (all: list({LISTS[name]}))" if name in LISTS else f"{len(known)} names"
    return f"{name}: expected one of {names}{beside}, got {value!r}" + (f"; did you mean {near!r}?" if near else "")


def nearest(value: Any, known: Collection[str]) -> str | None:
    """The known name that is most likely meant, if any is near."""
    return next(_near(value, known), None) if isinstance(value, str) else None


def _near(value: str, known: Collection[str]) -> Iterator[str]:
    plain = {_plain(one): one for one in reversed(list(known))}
    asked = _plain(value)
    for one in (asked, asked.removesuffix("-attention")):
        yield from (plain[one] for _ in range(one in plain))
        yield from (alias for alias in ALIASES.get(one, ()) if alias in known)
    yield from (plain[one] for one in get_close_matches(asked, plain, n=1))


def _plain(name: str) -> str:
    """A name in small letters, with one sign between words."""
    return "-".join(name.lower().replace("_", " ").replace("-", " ").split())
