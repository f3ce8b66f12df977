"""Linear attention with any feature map, and Efficient Attention."""

from dataclasses import replace

from ortho import checks
from ortho._cost import Cost, product
from ortho._typing import Size
from ortho.attention.linear.feature_map import FeatureMap
from ortho.attention.linear.linear_attention import ELU
from ortho.attention.recurrence import CHUNK
from ortho.cost.mechanisms.call import CostedCall, closed_form, equal_parts
from ortho.cost.mechanisms.recurrent import gla_cost, power_chunks


@closed_form
def linear_attention_cost(
    call: CostedCall, *, feature_map: FeatureMap = ELU, chunk: int = CHUNK, m: Size = None
) -> Cost:
    """Closed-form cost of one self-attention call, in either form; `m` is the number of features, by default the map's.

    Half precision costs as much as float32. Drawing random features is left out: it is done once. A symbolic N stands
    for a multiple of `chunk` greater than `chunk`.
    """
    if call.causal and not feature_map.causal:
        raise ValueError("causal: expected False with a feature map that looks at the whole sequence, got True")
    (G, N, K, V), item, fast = call.sizes, call.item, call.form == "fast"
    reach = call.reach
    m = feature_map.width(K) if m is None else m
    mapped = Cost(*feature_map.flops(G, N, N, K, m))
    recurrent = fast and feature_map.causal  # else the keys are kept, and mapped anew for each query
    decoded = feature_map.flops(G, 1, 1 if recurrent else N, K, m)[0]
    gathered = 2 * G * m * (V + 1) * (1 if recurrent else N)
    state = item * G * (m * (V + 1) + int(feature_map.scales_keys)) + 8 * int(feature_map.positional)
    return _products(call, m, chunk) + Cost(
        forward=mapped.forward,
        backward=reach * mapped.backward,
        decode=decoded + (gathered + 2 * G * m * (V + 1) if fast else 2 * G * N * (m + V)),
        state_bytes=state if recurrent else call.itemsize * G * N * (K + V),
    )


def _products(call: CostedCall, m: Size, chunk: int) -> Cost:
    """The products with m features, and with values beside a column of ones."""
    (G, N, _, V), reach = call.sizes, call.reach
    if call.form == "reference":
        return call.attending(G * N * N, m)
    in_chunks = call.causal and N != 1
    width, number = equal_parts(N, chunk) if in_chunks else (N, 1)
    rows = G * number * width  # with the padding past the end
    # The memory: gather and read S and z. In a chunk: weights, outputs.
    memory = product(2 * rows * m * (V + 1), 1 + reach)
    return memory + call._replace(V=V + 1).attending(rows * width, m) if in_chunks else memory


@closed_form
def efficient_cost(call: CostedCall) -> Cost:
    """Closed-form cost of one self-attention call, in either form; decoding keeps the keys and reads all of them.

    Raises ValueError for a causal call, which the mechanism does not serve.
    """
    checks.expect(not call.causal, "causal", "False (`efficient-causal` serves causal calls)", call.causal)
    (G, N, K, V), held = call.sizes, call.held_keys()
    if call.form == "reference":
        return call.attending(G * N * N) + held
    return product(2 * G * N * K * V, 1 + call.reach) + replace(held, decode=2 * (N + 1) * G * K * V)


@closed_form
def causal_efficient_cost(call: CostedCall, *, chunk: int = CHUNK) -> Cost:
    """Closed-form cost of one self-attention call, in either form. Half precision costs as much as float32.

    A symbolic N stands for a multiple of `chunk`, a power of two, greater than `chunk`. Raises ValueError for a call
    that is not causal.
    """
    checks.expect(call.causal, "causal", "True", call.causal)
    (G, N, K, V), item = call.sizes, call.item
    if call.form == "reference":
        held = Cost(decode=2 * G * N * V, state_bytes=call.itemsize * G * N * (K + V))
        return product(G * N * N * V, 1 + call.reach) + held
    width, number = power_chunks(N, chunk)
    core = replace(call._replace(qk_grad=True).by(gla_cost, chunk=chunk), state_bytes=G * K * (item * V + 8))
    if call.qk_grad:
        return core
    # Values alone: within the chunks, and from chunks to later ones.
    return replace(core, backward=2 * G * number * width**2 * V + 4 * G * (number - 1) * width * K * V)


COSTS = {"efficient": efficient_cost, "efficient-causal": causal_efficient_cost}
