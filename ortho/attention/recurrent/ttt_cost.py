"""Closed forms of `ortho.attention.recurrent.ttt`: what a call costs, with `eta` given and q and k normalised."""

from typing import NamedTuple

from ortho._checks import checked
from ortho._typing import Size
from ortho.attention.mechanism import AttentionCost
from ortho.attention.recurrent.delta_cost import Part, division_cost
from ortho.attention.recurrent.ttt_losses import TokenLoss


class _Sizes(NamedTuple):
    """N tokens in `parts` mini-batches: `whole` ones of `batch` tokens, and one of `rest` where that is not 0."""

    N: Size
    K: Size
    V: Size
    batch: int
    whole: Size
    rest: int

    @property
    def parts(self) -> Size:
        return self.whole + int(self.rest > 0)

    @property
    def last(self) -> int:
        """Tokens of the last mini-batch."""
        return self.rest or self.batch

    @property
    def later(self) -> Size:
        """Tokens after the first mini-batch."""
        return self.N - (self.batch if self.whole else self.rest)


@checked
def ttt_cost(
    B: Size,
    N: Size,
    H: Size,
    K: Size,
    V: Size,
    *,
    loss: TokenLoss,
    batch: int,
    form: str = "fast",
    causal: bool = False,
    qk_grad: bool = True,
    itemsize: int = 4,
) -> AttentionCost:
    """Closed form of one self-attention call with `eta` given, in either form.

    Half precision costs what float32 does. With symbols, N is a multiple of `batch`, and greater.
    """
    G, item, fast = B * H, max(itemsize, 4), form == "fast"
    back = int(loss.looks_back)
    whole, rest = divmod(N, batch) if isinstance(N, int) else (N / batch, 0)
    s = _Sizes(N, K, V, batch, whole, rest)
    core = (_by_mini_batches if fast else _by_tokens)(s, causal, qk_grad)

    def seen(tokens: Size) -> Size:
        """Values that a mini-batch's predictions see: each all of them; token after token, those up to its own."""
        return tokens**2 if fast else tokens * (tokens + 1) // 2

    pairs = whole * seen(batch) + seen(rest)
    psi = loss.cost(N, N if fast else pairs, pairs, V)
    # Without a gradient of k, the predictions of the first memory, which is empty, need none.
    unreached = 0 if qk_grad else loss.cost(0, 0, seen(N - s.later), V).into_predictions
    # A value that is handed to several tokens sums up the gradients from them.
    handed_on = 0 if fast else (pairs - N) * V
    values = (N if fast else pairs) * V
    total = core + division_cost(2 * N, K, 2 * N if qk_grad else 0)
    return AttentionCost(
        forward=G * (total.forward + psi.forward),
        backward=G * (total.backward + psi.backward - unreached),
        elementwise_forward=G * (total.elementwise_forward + psi.elementwise_forward),
        elementwise_backward=G * (total.elementwise_backward + psi.elementwise_backward + back * handed_on),
        saved_bytes=G * (item * (total.saved + psi.saved + back * values) + psi.saved_bytes),
        decode=G * _decode(s, loss, fast),
        state_bytes=G * (item * (K * V + s.last * (K + V)) + back * s.last * (item * V + 1)),
    )


def _decode(s: _Sizes, loss: TokenLoss, fast: bool) -> Size:
    """FLOPs of the last token, as a call of its own that starts from a state."""
    begun = s.last - 1 or (0 if s.N == 1 else s.batch)  # tokens of the state's mini-batch
    K, V = s.K, s.V
    predict = 2 * K * V + loss.cost(1, s.last, s.last, V).forward
    if fast:  # a full mini-batch is folded first
        return (2 * begun * K * V if s.last == 1 else 0) + predict + 2 * K * V + 2 * s.last * (K + V)
    return 2 * begun * K * V + predict + 4 * K * V


# Below: K V numbers are a memory, 2 K V FLOPs a product with one. The first memory is empty, and needs no gradient; q
# and k need one if `qk`. A gradient's sum over a broadcast axis is left out where its length is 1.


def _by_mini_batches(s: _Sizes, causal: bool, qk: bool) -> Part:
    N, K, V = s.N, s.K, s.V
    memory, pairs = K * V, s.whole * s.batch**2 + s.rest**2
    folds, folded = (s.parts - 1, N - s.last) if causal else (s.parts, N)
    core = Part(
        forward=2 * memory * (2 * N + folded),  # predict, read, fold
        # Into memories through predictions and readings, into steps through folds; into k by all three, and into q.
        backward=2 * memory * (s.later + (s.later if causal else N) + folded + (2 * N + folded if qk else 0)),
        elementwise_forward=N * V + folds * memory,  # steps, folds
        elementwise_backward=(2 + (V != 1)) * N * V  # steps
        + (folds + s.parts - 1) * memory  # folds; memories from predictions and folds
        + (folded * K if qk else 0),
        saved=N * (1 + V) + (2 * N * K if qk or folds else 0) + (N * V + (folds + 1) * memory if qk else 0),
    )
    if not causal:
        return core
    # What the mini-batch itself adds to a reading: pairs of its tokens, and their product with the steps.
    within = Part(
        forward=2 * pairs * (K + V),
        backward=2 * pairs * (V + (2 * K + V if qk else 0)),
        elementwise_forward=N * V,
        elementwise_backward=(N + folded) * V
        + (0 if s.parts == 1 else s.parts - 2) * memory
        + (2 * N * K if qk else 0),
        saved=pairs,
    )
    return core + within


def _by_tokens(s: _Sizes, causal: bool, qk: bool) -> Part:
    N, K, V = s.N, s.K, s.V
    memory = K * V
    return Part(
        forward=6 * N * memory,  # predict, write, read
        backward=2 * memory * (s.later + 2 * N + (3 * N if qk else 0)),
        elementwise_forward=N * (V + memory),
        # Steps, writing, memories from predictions, and from the next token and their reading
        elementwise_backward=(2 + (V != 1)) * N * V
        + memory * (N + s.later + (N - 1 if causal else 0))
        + (N * K if qk else 0),
        saved=N * (1 + V + 2 * K) + (N * V + ((N if causal else s.parts) + 1) * memory if qk else 0),
    )
