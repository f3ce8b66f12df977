"""The arms of the learning experiments: models that differ in their heads or positions, and what they cost to train.

An arm is data, a name and the kinds of its heads (`kinds`), so that it can be sent to other processes and stored.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from ortho.checks import positive_int
from ortho.cost import Cost
from ortho.cost.layers import added
from ortho.cost.models import model
from ortho.layers.hybrid import HybridAttention
from ortho.models.language_model import LanguageModel
from paper.experiments.learning.kinds import kinds

MOST_LEARNED = 3  # heads beside those of another kind
BESIDE = ("stopped", "frozen", "positional", "window", "linear", "static random", "identity")
FROZEN = (
    *(f"{name}{how}" for name in ("frozen", "stopped") for how in ("", " Gaussian", " low-rank", " 4 x", " 1/4 x")),
    "learned low-rank",
    "learned 4 x",
    "tied",
    "frozen temperature",
    "stopped temperature",
)
EMBEDDED = ("learned", "frozen", "stopped", "linear")  # kinds that also come with embeddings of positions
OTHERS = (
    "random Synthesizer",
    "dense Synthesizer",
    *(f"{prefix}{name}" for prefix in ("", "frozen ") for name in ("linear", "FAVOR+", "delta", "window")),
)


@dataclass(frozen=True)
class Arm:
    """A model without its size: how many heads of which kinds, and how positions are embedded.

    `heads` are (kind, number) pairs, N is the number of tokens of the longest sequence, and `embeddings` of positions
    are 'learned', 'sinusoidal' or None: rotary heads and patterns know the order without them.
    """

    name: str
    N: int
    heads: tuple[tuple[str, int], ...]
    embeddings: str | None = None

    @property
    def num_heads(self) -> int:
        """Heads of a layer, of all kinds."""
        return sum(count for _, count in self.heads)

    @property
    def layer(self) -> dict[str, Any]:
        """The arguments of `TransformerBlock` that say what its attention is."""
        known = kinds(self.N)
        if len(self.heads) == 1:
            return {"layer": known[self.heads[0][0]].make}
        return {"layer": HybridAttention, "heads": [(known[kind].make, count) for kind, count in self.heads]}

    @property
    def model(self) -> dict[str, Any]:
        """The arguments of `LanguageModel` besides its sizes and the number of heads."""
        if self.embeddings is None:
            return {"max_length": None, **self.layer}
        return {"max_length": self.N, "positions": self.embeddings, **self.layer}

    def build(self, vocab_size: int, d_model: int, num_layers: int, **kwargs: Any) -> LanguageModel:
        """The untrained model; `kwargs` are `LanguageModel`'s (`d_ff`, `dropout`, `generator`, ...).

        Raises TypeError or ValueError as that does.
        """
        return LanguageModel(vocab_size, d_model, self.num_heads, num_layers, **self.model, **kwargs)

    def describe(self) -> dict[str, str | int | float]:
        """What the arm is, as flat JSON."""
        known = kinds(self.N)
        return {
            "arm": self.name,
            "N": self.N,
            "H": self.num_heads,
            "heads": " + ".join(f"{count} {kind}" for kind, count in self.heads),
            "embeddings": self.embeddings or "none",
            **{name: value for kind, _ in self.heads for name, value in known[kind].facts.items()},
        }

    def cost(self, B: int, N: int, d: int, H: int, **kwargs: Any) -> Cost:
        """A closed form of the attention layer, in FLOPs of matrix products and in trained parameters.

        Like those of `ortho.cost`, it can be passed to `ortho.cost.block`. The sums over heads of several kinds are not
        counted, as they are not products.
        """
        known = kinds(self.N)
        if len(self.heads) == 1:
            return known[self.heads[0][0]].cost(B, N, d, H, **kwargs)
        return added(*(known[kind].cost(B, N, d, n, head_dim=d // H, **kwargs) for kind, n in self.heads))


def baseline(H: int, N: int) -> Arm:
    """The strong baseline: all heads learned, with rotary positions."""
    return Arm("learned", N, (("learned", H),))


def by_position(H: int, N: int) -> dict[str, Arm]:
    """Learned heads that know the order in various ways, the baseline first; and other heads that have embeddings of
    positions, too."""
    found = (
        baseline(H, N),
        Arm("ALiBi", N, (("alibi", H),)),
        Arm("embeddings", N, (("softmax", H),), "learned"),
        Arm("sinusoids", N, (("softmax", H),), "sinusoidal"),
        *(Arm(f"{kind} + embeddings", N, ((kind, H),), "learned") for kind in EMBEDDED),
    )
    return {arm.name: arm for arm in found}


def by_freezing(H: int, N: int) -> dict[str, Arm]:
    """Arms with frozen, stopped or badly drawn matrices in all heads. 'frozen' is orthogonal random attention."""
    return {kind: Arm(kind, N, ((kind, H),)) for kind in FROZEN}


def mixed(H: int, N: int) -> dict[str, Arm]:
    """Up to 3 learned heads beside those of another kind; and alone, as wide as H heads, if their number divides H."""
    found = {}
    for k in range(min(MOST_LEARNED + 1, H)):
        for kind in BESIDE:
            name = f"{k} learned + {H - k} {kind}" if k else kind
            found[name] = Arm(name, N, ((("learned", k),) if k else ()) + ((kind, H - k),))
        if k and H % k == 0:
            found[f"{k} learned, wider"] = Arm(f"{k} learned, wider", N, (("learned", k),))
    return found


def others(H: int, N: int) -> dict[str, Arm]:
    """Other mechanisms in all heads, with learned and with frozen queries and keys, and Synthesizers."""
    return {kind: Arm(kind, N, ((kind, H),)) for kind in OTHERS}


def arms(H: int, N: int) -> dict[str, Arm]:
    """All arms by name, for H heads and sequences of at most N tokens. Raises TypeError or ValueError for sizes
    below 1."""
    positive_int("H", H)
    positive_int("N", N)
    return {name: arm for group in (by_position, by_freezing, mixed, others) for name, arm in group(H, N).items()}


def training_flop(arm: Arm, B: int, N: int, d: int, L: int, *, vocab_size: int, d_ff: int | None = None) -> int:
    """FLOPs of the matrix products of a training step on tokens (B, N), forward and backward, by closed forms, with the
    read-out and without the loss.

    Raises TypeError or ValueError for sizes below 1 or that do not fit the arm.
    """
    return int(_cost(arm, B, N, d, L, vocab_size, d_ff).step)


def matched_width(arm: Arm, like: Arm, d: int, L: int, *, d_ff: int | None = None) -> int:
    """The hidden width of the feed-forward networks, an integer, at which an arm's number of trained parameters comes
    nearest to that of the arm `like` with `d_ff`, by default 4 d.

    Raises TypeError or ValueError for sizes below 1, and ValueError if the arm has too many even without such networks.
    """
    d_ff = 4 * d if d_ff is None else d_ff
    own, wanted = (_cost(one, 1, 1, d, L, 1, d_ff).trained for one in (arm, like))
    width = d_ff + round((wanted - own) / (2 * d * L))
    if width < 1:
        raise ValueError(f"arm: expected fewer parameters than {like.name!r} has, {arm.name!r} has {own - wanted} more")
    return width


def matched_steps(
    arm: Arm, like: Arm, steps: int, B: int, N: int, d: int, L: int, *, vocab_size: int, d_ff: int | None = None
) -> int:
    """The number of steps, at least 1, in which an arm takes as many FLOPs as the arm `like` in `steps`.

    Raises TypeError or ValueError for sizes and steps below 1 or that do not fit the arms.
    """
    own, wanted = (training_flop(one, B, N, d, L, vocab_size=vocab_size, d_ff=d_ff) for one in (arm, like))
    return max(1, round(positive_int("steps", steps) * wanted / own))


@cache
def _cost(arm: Arm, B: int, N: int, d: int, L: int, vocab_size: int, d_ff: int | None) -> Cost:
    places = arm.N if arm.embeddings == "learned" else None  # others are not trained
    return model(B, N, d, arm.num_heads, L, vocab_size=vocab_size, max_length=places, layer=arm.cost, d_ff=d_ff)
