"""States that are written to, erased from and read. Flags are numbers, 0 or 1."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ortho._cost import Cost, product
from ortho._typing import Size
from ortho.attention.recurrence import CHUNK
from ortho.attention.recurrent.channels import chunk_width
from ortho.attention.recurrent.ttt import MINI_BATCH, SQUARED
from ortho.attention.recurrent.ttt_losses import Contrastive, Huber, TokenLoss
from ortho.cost.mechanisms.call import CostedCall, closed_form, equal_parts


def state_cost(
    call: CostedCall,
    chunk: Size,
    *,
    erase: int = 1,
    fades: int = 0,
    gated: int = 0,
    steps: Size = 1,
    k_grad: int | None = None,
) -> Cost:
    """The cost of one call by the one recurrence: `in_chunks` of at most `chunk` keys, or `token_by_token`.

    `fades`: whether what a key erases has faded before; `gated`: whether there are decays that need a gradient;
    `steps`: keys a token; `k_grad`: whether keys need a gradient, by default as queries do.
    """
    shared: dict[str, Any] = {"erase": erase, "steps": steps, "k_grad": k_grad}
    return memory_cost(call, partial(chunks_cost, chunk=chunk, gated=gated, **shared), fades=fades, **shared)


def memory_cost(call: CostedCall, in_chunks: Callable[[CostedCall], Cost], **recurring: Any) -> Cost:
    """The fast form's cost by `in_chunks`, the reference's by `recurrence_cost` with these arguments, and so that of a
    single token. Includes the state (K, V), and decoding one more token."""
    (G, _, K, V), chunked = call.sizes, call.form == "fast" and call.N != 1
    cost = in_chunks(call) if chunked else recurrence_cost(call, **recurring)
    token = recurrence_cost(call._replace(N=1, causal=True), **recurring)
    return replace(cost, decode=token.forward, state_bytes=call.item * G * K * V)


def recurrence_cost(
    call: CostedCall,
    *,
    erase: int = 1,
    fades: int = 0,
    steps: Size = 1,
    k_grad: int | None = None,
) -> Cost:
    """The cost of `token_by_token`."""
    (G, N, K, V), q_grad = call.sizes, call.reach
    k_grad = q_grad if k_grad is None else k_grad
    reads, rows = G * N, G * N * steps
    # What the state holds at a key, what is written; what is read
    products = product((1 + erase) * rows * K * V, 1 + k_grad) + product(reads * K * V, 1 + q_grad)
    # The first state needs no gradient, but its decay does.
    return products - Cost(backward=2 * erase * (1 - fades) * G * K * V)


def chunks_cost(
    call: CostedCall, *, chunk: Size, erase: int = 1, gated: int = 0, steps: Size = 1, k_grad: int | None = None
) -> Cost:
    """The cost of `in_chunks`, with the empty tokens of the last chunk."""
    (G, N, K, V), q_grad = call.sizes, call.reach
    width, number = equal_parts(N, chunk if steps == 1 else max(1, chunk // steps))  # of tokens
    k_grad = q_grad if k_grad is None else k_grad
    tokens, rows = G * number * width, G * number * width * steps
    seen = tokens * steps * width  # pairs of a token and a key of its chunk
    if not erase and not call.causal:
        return product(G * N * steps * K * V, 1 + max(k_grad, gated)) + product(G * N * K * V, 1 + q_grad)
    written = product(rows * K * V, 1 + max(k_grad, gated))
    if erase:
        # Erasing; products of keys, the inverse of their system, two products with it
        pairs = rows * steps * width
        written += product(rows * K * V, 1 + max(k_grad, gated)) + product(pairs * V)
        written += Cost(forward=pairs * (4 * K + width * steps), backward=k_grad * 2 * pairs * K)
    if not call.causal:
        return written + product(G * N * K * V, 1 + q_grad)
    further = max(q_grad, k_grad, gated)  # whether weights and readers need a gradient
    read = Cost(forward=2 * seen * K, backward=2 * seen * K * (q_grad + k_grad)) + product(seen * V, 1 + further)
    return written + read + product(tokens * K * V, 1 + max(q_grad, gated))


@closed_form
def delta_cost(call: CostedCall, *, gated: bool = False, chunk: int = CHUNK) -> Cost:
    """Closed form of one self-attention call with `beta` given, and if `gated` with `log_decay`, in either form.

    Half precision costs the same as float32. With symbols, N is a multiple of `chunk`.
    """
    return state_cost(call, chunk, gated=int(gated), fades=int(gated))


@closed_form
def delta_product_cost(call: CostedCall, *, num_householder: Size = 2, chunk: int = CHUNK) -> Cost:
    """Closed form of one self-attention call with `beta`, and with keys and values for `num_householder` steps a token.

    Those of the later steps come from gates and need a gradient, whether or not the projected queries and keys do
    (`call.qk_grad`). With symbols, N is a multiple of the tokens in a chunk.
    """
    return state_cost(call, chunk, steps=num_householder, k_grad=1)


@closed_form
def low_rank_cost(call: CostedCall, *, num_columns: Size = 2, chunk: int = CHUNK) -> Cost:
    """Closed form of one self-attention call with keys and values for `num_columns` columns a token, in either form.

    Those after the first come from gates and need a gradient, whether or not the projected queries and keys do
    (`call.qk_grad`). With symbols, N is a multiple of the tokens in a chunk.
    """
    return state_cost(call, chunk, erase=0, steps=num_columns, k_grad=1)


@closed_form
def ssd_cost(call: CostedCall, *, chunk: int = CHUNK) -> Cost:
    """Closed form of one self-attention call with `dt` and `A` given, in either form.

    Half precision costs the same as float32. With symbols, N is a multiple of `chunk`.
    """
    return state_cost(call, chunk, erase=0, gated=1)


@closed_form
def selective_scan_cost(call: CostedCall, *, chunk: int = CHUNK) -> Cost:
    """Closed form of one self-attention call with `dt` and `A` given, in either form: the products that read the state.
    All other work is element-wise, some $\\log_2$ `chunk` operations for each number of each token's state."""
    G, N, K, V = call.sizes
    return product(G * N * K * V, 1 + call.reach) + Cost(decode=2 * G * K * V, state_bytes=call.item * G * K * V)


# --------------------------------------------------------------------------------------------- a decay for each channel


def power_chunks(length: Size, chunk: int) -> tuple[int, Size]:
    """(the width of these chunks, their number); a symbol stands for a multiple of `chunk`, a power of two."""
    whole = isinstance(length, int)
    width = chunk_width(length if whole else chunk, chunk)
    return width, -(-length // width) if whole else length / width


@closed_form
def channel_cost(call: CostedCall, *, erase: int, before_fading: int = 0, chunk: int = CHUNK) -> Cost:
    """Closed form of one self-attention call with its gates given, in either form.

    Half precision costs the same as float32. With symbols, `chunk` is a power of two, and N a larger multiple of it.
    """
    in_chunks = partial(_chunks_cost, chunk=chunk, erase=erase)
    return memory_cost(call, in_chunks, erase=erase, fades=1 - before_fading)


gla_cost, kda_cost = partial(channel_cost, erase=0), partial(channel_cost, erase=1)


def _chunks_cost(call: CostedCall, *, chunk: int, erase: int) -> Cost:
    C, n = power_chunks(call.N, chunk)
    cost = _merged(call, C, n, erase) + _passed_on(call, C, n, erase)
    if erase:
        cost += _solved(call, C, n)
    return cost if call.causal else cost + product(call.B * call.H * call.N * call.K * call.V, 1 + call.reach)


def _merged(call: CostedCall, C: int, n: Size, erase: int) -> Cost:
    """The cost of merging tokens into blocks of C."""
    (G, _, K, _), causal, reach = call.sizes, int(call.causal), call.reach
    rows, readers = G * n * C * K, causal + erase
    return Cost(
        forward=readers * rows * (C + 1),  # each pair of a reader and a key up to its own, once
        backward=2 * rows * (2 * causal * reach + erase * (1 + reach))  # own keys
        + readers * (2 * rows * (C - 1) - (0 if reach or C == 1 else rows)),
    )


def _passed_on(call: CostedCall, C: int, n: Size, erase: int) -> Cost:
    """The cost of what chunks find in the state and write to it; in a causal call also of what they answer."""
    (G, _, K, V), causal, reach = call.sizes, int(call.causal), call.reach
    rows, products = G * n * C, int(reach or C > 1)  # whether products with keys have a gradient
    heirs = n - 1  # chunks with another one after them
    writers = heirs if causal else n  # chunks whose state is read
    return Cost(
        forward=2 * rows * K * V * (1 + causal + erase) + 2 * causal * rows * C * V,
        backward=2 * G * C * K * V * (writers * (1 + products) + (causal + erase) * (n + heirs))
        + 2 * causal * rows * C * V * (1 + products),
    )


def _solved(call: CostedCall, C: int, n: Size) -> Cost:
    """The cost of solving the system of each chunk."""
    G, _, K, V = call.sizes
    rows = G * n * C
    return Cost(forward=rows * C * (K + V), backward=3 * rows * C * (K + V))


# --------------------------------------------------------------------------------------------------- test-time training


@closed_form
def ttt_cost(call: CostedCall, *, loss: TokenLoss = SQUARED, mini_batch_size: int = MINI_BATCH) -> Cost:
    """Closed form of one self-attention call with `eta` given, in either form.

    Half precision costs the same as float32. With symbols, N is a multiple of `mini_batch_size` and larger.
    """
    (G, N, K, V), fast, size = call.sizes, call.form == "fast", mini_batch_size
    whole, rest = divmod(N, size) if isinstance(N, int) else (N / size, 0)
    first, last = size if whole else rest, rest or size  # tokens of the first and the last mini-batch
    core = (_by_mini_batches if fast else _by_tokens)(call, N - first, last, whole * size**2 + rest**2)

    def seen(tokens: Size) -> Size:
        """Pairs of a prediction and a value that it sees: all in a mini-batch; token by token, those up to its own."""
        return tokens**2 if fast else tokens * (tokens + 1) // 2

    # If k needs no gradient, predictions from the first S, which is empty, need none.
    unreached = (1 - call.reach) * loss.into_predictions(seen(first), V)
    begun = last - 1 or (
        0 if N == 1 else size
    )  # tokens in the mini-batch of the state, from which the last token starts
    decode = 2 * K * V + loss.flops(last, V)[0]  # predict, then read
    if fast:  # a full mini-batch is folded first
        decode += (2 * begun * K * V if last == 1 else 0) + 2 * K * V + 2 * last * (K + V)
    else:
        decode += 2 * begun * K * V + 4 * K * V
    carried = call.item * (K * V + last * (K + V)) + int(loss.looks_back) * last * (call.item * V + 1)
    other = Cost(backward=-unreached, decode=decode, state_bytes=carried)
    return (core + Cost(*loss.flops(whole * seen(size) + seen(rest), V)) + other) * G


def _by_mini_batches(call: CostedCall, later: Size, last: Size, pairs: Size) -> Cost:
    (_, N, K, V), reach, causal = call.sizes, call.reach, call.causal
    folded = N - last if causal else N
    core = Cost(
        forward=2 * K * V * (2 * N + folded),  # predict, read, fold
        # Into states through predictions and readings, into steps through folds; into k by all three, and into q.
        backward=2 * K * V * (later + (later if causal else N) + folded + reach * (2 * N + folded)),
    )
    # What the mini-batch itself adds to what is read: pairs of its tokens, and their product with the steps.
    return core + product(pairs * K, 2 * reach) + product(pairs * V, 1 + reach) if causal else core


def _by_tokens(call: CostedCall, later: Size, _: Size, __: Size) -> Cost:
    (_, N, K, V) = call.sizes
    return Cost(forward=6 * N * K * V, backward=2 * K * V * (later + (2 + 3 * call.reach) * N))  # predict, write, read


COSTS = {
    "delta": delta_cost,
    "gated-delta": partial(delta_cost, gated=True),
    "delta-product": delta_product_cost,
    "low-rank": low_rank_cost,
    "ssd": ssd_cost,
    "selective-scan": selective_scan_cost,
    "gla": gla_cost,
    "kda": kda_cost,
    "vector-gated": partial(channel_cost, erase=1, before_fading=1),
    "ttt": ttt_cost,
    "ttt-huber": partial(ttt_cost, loss=Huber()),
    "ttt-contrastive": partial(ttt_cost, loss=Contrastive()),
}
