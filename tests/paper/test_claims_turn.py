"""A claim's verdict changes if the thing that the claim is about is broken.

For a refuted claim, what refutes it is changed towards the world that the source describes. Contradictions of the
source's own table remain, and so do other parts that hold only in some settings or are not decided.
"""

import re
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from turning import Change, Turn, answering, check, constantly, costing, giving

from ortho.attention import MECHANISMS
from ortho.attention.linear.efficient import efficient_attention
from ortho.attention.linear.feature_maps import CosFormer
from ortho.attention.linear.linear_attention import kernel_weights
from ortho.attention.linear.random_features import iid_features
from ortho.attention.softmax.softmax_attention import softmax_attention_reference
from ortho.cost import Cost
from ortho.cost.big_o import H, N, d, m
from ortho.projections import LearnedProjection
from paper.claims import Verdict, catalogue

CONFIRMED, CORRECTED, REFUTED = Verdict.CONFIRMED, Verdict.CORRECTED, Verdict.REFUTED
INCONSISTENT, CONDITIONAL, UNTESTABLE = Verdict.INCONSISTENT, Verdict.CONDITIONAL, Verdict.UNTESTABLE
SHARED = "paper.claims.shared"
FIXED = "7 fixed + 1 learned"

# Evidence modules are imported anew; checkers take their classes for the old ones, which have the same names.
pytestmark = pytest.mark.unchecked

# --------------------------------------------------------------------------------------------------- costs that differ


def layers(change):
    """The closed form of a layer with other costs: `change` takes the cost, the standard layer's, N, d, and whether
    the layer's queries and keys are frozen."""

    def broken(sound):
        def layer(B, N, d, H, **options):
            cost, standard = (sound(B, N, d, H, **given) for given in (options, options | {"projection": "learned"}))
            return change(cost, standard, N, d, options.get("projection", "learned") != "learned")

        return layer

    return {"ortho.cost.layer": broken}


def ora(change):
    """Other costs of a layer with frozen queries and keys: `change` makes them of its cost and the standard layer's."""
    return layers(lambda cost, standard, N, d, frozen: change(cost, standard) if frozen else cost)


def mechanism(name, cost):
    """A mechanism with another closed form, which `cost` makes of the sound one."""
    return {f"ortho.attention.MECHANISMS[{name}]": lambda sound: replace(sound, cost=cost(sound.cost))}


def by_one_head(sound):
    """One head of the whole width in place of H heads."""
    return lambda B, N, H, K, V, **options: sound(B, N, 1, H * K, H * V, **options)


def quadratic(_):
    """The closed form of softmax attention in place of a mechanism's own."""
    return lambda *sizes, m=None, **options: MECHANISMS["softmax"].cost(*sizes, **options | {"form": "reference"})


def narrow(sound):
    """Queries, keys and values a hundredth as wide as the heads, for symbolic and for integer widths."""
    return lambda B, N, H, *widths, **options: sound(
        B, N, H, *(x // 100 if isinstance(x, int) else x / 100 for x in widths), **options
    )


def materialised(sound):
    """A fused kernel that keeps its scores."""
    return lambda *sizes, **options: sound(*sizes, **options | {"form": "reference"})


def as_claimed(sound):
    """Recomputation that adds a quarter to the work of a step."""

    def recomputed(*, segments, **sizes):
        whole = sound(segments=0, **sizes)
        return whole + Cost(backward=whole.step / 4) if segments else whole

    return recomputed


def every_constant_1(cost, standard, N, d, frozen):
    """The source's orders of growth, read as numbers."""
    linear, square = N * d**2, N**2 * d
    return replace(cost, forward=linear + square, backward=linear if frozen else linear + square)


# Projections that are computed for each pair of tokens, in place of each token.
PER_PAIR = {
    "ortho.cost.layers.projection_cost": costing(
        forward=lambda cost, name, B, N, *_: N * cost.forward, backward=lambda cost, name, B, N, *_: N * cost.backward
    )
}
ONE_HEAD = mechanism("softmax", by_one_head)
# What is counted from running code, as if there were one head.
COUNTED_ONE_HEAD = {
    "paper.memory.formula": lambda sound: lambda **kind: sound(**kind).subs(H, 1),
    "paper.memory.kept": lambda sound: lambda *given: sound(*given).subs(H, 1),
    "paper.elementwise.formulas": lambda sound: lambda *given: [each.subs(H, 1) for each in sound(*given)],
}
KEEPS_SCORES = {"paper.memory.formula": lambda sound: lambda **kind: sound(**kind | {"form": "reference"})}
EVERY_CONSTANT_1 = layers(every_constant_1)
HALF = ora(lambda cost, standard: replace(cost, forward=standard.forward / 2, backward=standard.backward / 2))
# A layer that maps tokens by W_V before it averages them, whatever order is asked for.
VALUES_FIRST = {f"{SHARED}.frozen_layer.ValuesLast": constantly(lambda layer: layer)}
# A backward pass of frozen layers that costs nothing leaves room for every speed-up that is claimed.
FREE_BACKWARD = ora(lambda cost, standard: replace(cost, backward=0))
# An optimiser that takes no time leaves what the products allow.
FREE_UPDATE = {"UPDATE_BYTES": constantly(0)}


def free_backward_of(name):
    """The backward pass of one published model, if frozen, costs nothing."""

    def broken(sound):
        def cost(self, B, *, projection="learned", **options):
            found = sound(self, B, projection=projection, **options)
            return replace(found, backward=0) if (self.name, projection) == (name, "frozen") else found

        return cost

    return {"ortho.cost.configurations.Configuration.cost": broken}


# A Synthesizer that has W_Q and W_K as well.
PROJECTING_SYNTHESIZER = {
    "ortho.cost.synthesizer": costing(
        forward=lambda cost, B, N, d, H: cost.forward + 4 * N * d**2, trained=lambda cost, B, N, d, H: 4 * d**2
    )
}

# -------------------------------------------------------------------------------------------------- layers that differ

# Frozen queries and keys that are trained after all, in the layer and in its closed form.
NOTHING_FROZEN = {
    "ortho.projections.PROJECTIONS[frozen]": constantly(LearnedProjection),
    "ortho.cost.layers.projection_cost": lambda sound: lambda _, *sizes, **options: sound("learned", *sizes, **options),
}


def blind(sound):
    """Softmax attention whose weights do not depend on queries and keys."""
    return replace(sound, reference=lambda q, k, v, **options: sound.reference(0 * q, 0 * k, v, **options))


def the_latest(q, k, **_):
    """The pairs of a fixed window."""
    return torch.ones(len(q), len(k), dtype=torch.bool).tril().triu(-3)


def hidden(scores, mask):
    """A mask whose zeros hide."""
    return scores.masked_fill(mask == 0, -torch.inf)


def wide_heads(sound):
    """Layers whose heads have memories of the whole width, and twice as large ones for DeltaProduct."""

    def layer(B, N, d, H, *, attention="softmax", **options):
        cost = sound(B, N, d, H, attention=attention, **options)
        return replace(cost, state_bytes=H * H * cost.state_bytes * (1 + (attention == "delta-product")))

    return layer


class Forgetful:
    """A cache that keeps only the latest token."""

    def __init__(self, *_):
        pass

    def attend(self, *qkv):
        return qkv[-1]


def hundredfold(scenarios):
    """Models that read a hundred times as many tokens."""
    return {name: replace(at, length=100 * at.length) for name, at in scenarios.items()}


ONE_KEY_MORE = {
    "ortho.attention.sparse.window.Window.allowed": lambda _: lambda self, i, j: (i - j).abs() <= self.width,
    "ortho.attention.sparse.global_local.GlobalLocal.allowed": lambda sound: (
        lambda self, i, j: sound(self, i, j) | ((i - j).abs() == self.width)
    ),
}


@torch.no_grad()
def without_queries(model):
    """The model with all W_Q set to 0."""
    for name, weight in model.named_parameters():
        if name.endswith("weight_q"):
            weight.zero_()
    return model


def lucky(sound):
    """The second draw of a frozen layer has the matrices that solve the lookup."""

    def drawn(projection, *, draw=0, **options):
        if draw != 1:
            return sound(projection, draw=draw, **options)
        lookup = import_module(f"{SHARED}.lookup")  # the one that is imported anew
        return lookup.standard_solution(lookup.apart())

    return drawn


# ------------------------------------------------------------------------------------------------- records that differ


def records(change: Change, *names: str) -> dict[str, Change]:
    """`change` edits every record of these experiments in place when it is read; all experiments if none is named."""

    def broken(load):
        def loaded(asked):
            found = load(asked)
            for record in found if asked in names or not names else ():
                change(record)
            return found

        return loaded

    return {"paper.experiments.load": broken}


def times(arm, like, factors):
    """Sets an arm's times to those of another, times a factor for each phase."""

    def edit(record):
        arms = record["repetitions"]
        for phase, factor in factors.items():
            for clock in {f"{phase}_s", f"{phase}_cpu_s"} & set(arms[like]):  # GPUs' have no time of a processor
                arms[arm][clock] = [factor * seconds for seconds in arms[like][clock]]

    return edit


def errors(names, factor):
    """Multiplies what runs of these arms get wrong, in tests and on the validation part."""

    def scaled(quantity, value):
        if isinstance(value, list):
            return [scaled(quantity, one) for one in value]
        if quantity.endswith("_fraction"):  # of right answers
            return max(0.0, 1 - factor * (1 - value))
        return factor * value if quantity.endswith("_nats") else value

    def edit(record):
        if record["configuration"]["arm"] in names:
            for test in (*record["repetitions"].values(), *record["facts"]["validation"]):
                test |= {quantity: scaled(quantity, value) for quantity, value in test.items()}

    return edit


def on_a_gpu(record):
    """As from a GPU on which materialised scores take four times as long as fused ones; these take 70 % less memory."""
    record["device"] = "gpu-made-up"
    for way in ("", " causal") if "materialised" in record["repetitions"] else ():
        times(f"materialised{way}", f"sdpa{way}", {"forward": 4, "backward": 4})(record)
        record["facts"][f"materialised{way}"]["peak_bytes"] = record["facts"]["sdpa"]["peak_bytes"] / 0.3


def reached(quantity: str, factor: float, *arms: str) -> Change:
    """Multiplies what runs of these arms reach in every test by a factor."""

    def change(record):
        if record["configuration"]["arm"] in arms:
            for found in record["repetitions"].values():
                found[quantity] = [factor * value for value in found[quantity]]

    return change


def enlarged(record):
    """Gradients that each block of learned heads enlarges tenfold."""
    stages = record["facts"]["gradients"]
    for stage, sizes in stages.items() if record["configuration"]["arm"] == "learned" else ():
        stages[stage] = [10**i * size for i, size in enumerate(sizes)]


def in_the_standard_scenario(record):
    """As many pairs as the source's standard scenario has, and the same scores."""
    record["configuration"]["pairs"] *= 290


def some_frozen_heads_do_better(record):
    """Layers with some learned and some frozen heads have next to no loss."""
    if re.fullmatch(r"\d learned \+ \d (frozen|stopped)", record["configuration"]["arm"]):
        reached("loss_nats", 0.1, record["configuration"]["arm"])(record)


def translated(factor: float, arm: str) -> Change:
    """Multiplies an arm's score, or how many of its n-grams are right, by a factor."""

    def change(record):
        if record["configuration"]["arm"] == arm:
            for found in record["repetitions"].values():
                for name in filter(re.compile("bleu_fraction|right_._count").fullmatch, found):
                    found[name] = [factor * value for value in found[name]]

    return change


def explained(record):
    """The weights of encoders' heads depend on positions alone, and all heads can be removed."""
    for look in record["facts"].get("validation", ()):
        for layer in look.get("heads", ()):
            for head in layer:
                head["absolute"] = 1.0
    for figures in record["repetitions"].values():
        figures |= {"faultless_fraction": [1.0]}


def slow_blocks_on_a_gpu(record):
    """As from a GPU on which each pattern is one kernel, and blocks take ten times as long."""
    record["device"] = "gpu-made-up"
    timed(10, "block-sparse", "block-sparse causal")(record)
    if record["configuration"]["arms"] == "patterns":
        record["configuration"]["arms"] = "compiled patterns"
        for kind in ("repetitions", "facts"):
            record[kind] = {in_one_kernel(arm): measured for arm, measured in record[kind].items()}


def in_one_kernel(arm: str) -> str:
    """The name of a pattern's arm that FlexAttention compiles: `window flex causal` for `window causal`."""
    name, *way = arm.split()
    return arm if name == "sdpa" else " ".join([name, "flex", *way])


def timed(factor: float, *arms: str) -> Change:
    """Multiplies all times of these arms by a factor."""

    def change(record):
        for arm in arms:
            for quantity, values in record["repetitions"].get(arm, {}).items():
                record["repetitions"][arm][quantity] = [factor * value for value in values]

    return change


# ------------------------------------------------------------------------------------------- other changes


class Exact:
    """Features whose products are the softmax kernel."""

    def __init__(self, x):
        self.x, self.mT = x, self

    def __matmul__(self, other):
        return (self.x @ other.x.mT).exp()


def undivided(q, k, v, *, feature_map, **_):
    """Linear attention whose weights are not divided by their sum."""
    return kernel_weights(feature_map, q, k) @ v


def without_values(layer):
    """The layer with all W_V set to 0."""
    with torch.no_grad():
        layer.weight_v.zero_()
    return layer


def as_cited(_, field):
    """The bibliography as the source has it."""
    cited = {"booktitle": "International Conference on Learning Representations", "year": "2021"}
    return {"title": "Efficient Attention: A Study of Linear Time Transformers", **cited}[field]


def padding_left_out(q, k, v, kv_mask=None, *, axes="b"):
    """The attention of Shen et al. (2021), with the arguments of the source's code."""
    if kv_mask is not None:
        kv_mask = kv_mask[:, None] if axes == "b" else kv_mask[:, None, None]
    return efficient_attention(q, k, v, attn_mask=kv_mask)


DOUBLED = giving(lambda o: 2 * o)  # outputs of weights that sum to 2
EXCHANGED = giving(lambda flops: type(flops)(*reversed(flops)))  # each order costs what the other does
FIRST_TWICE = giving(lambda heads: (heads[0], heads[0]))  # both heads see what is near
UNIFORM = {
    "ortho.attention.positional.positional_attention.positional_attention": giving(
        lambda weights: torch.full_like(weights, 1 / weights.shape[-1])
    )
}
QUADRATIC = mechanism(
    "linear", costing(forward=lambda cost, *_: cost.forward + N**2 * d, decode=lambda cost, *_: cost.decode + N * d)
)


# ------------------------------------------------------------------------------------------------------------ the table

TURNS = {
    "S0.1.1a": Turn(REFUTED, PER_PAIR),
    "S0.1.1b": Turn(CONFIRMED, ONE_HEAD | COUNTED_ONE_HEAD),
    "S0.1.1c": Turn(REFUTED, PER_PAIR),
    "S0.1.2a": Turn(CONFIRMED, ONE_HEAD | COUNTED_ONE_HEAD),
    "S0.1.2b": Turn(CONFIRMED, ONE_HEAD | COUNTED_ONE_HEAD),
    "S0.1.3a": Turn(
        REFUTED,
        {
            "ortho.layers.multihead.MultiheadAttention": lambda sound: (
                lambda *sizes, **kind: sound(*sizes, bias=True, **kind)
            )
        },
    ),
    "S0.2.1a": Turn(REFUTED, NOTHING_FROZEN),
    "S0.2.2a": Turn(REFUTED, PER_PAIR),
    "S0.2.3a": Turn(CONDITIONAL, {"ortho.attention.MECHANISMS[softmax]": blind}),
    "S0.2.3b": Turn(REFUTED, PER_PAIR),
    "S0.2.3c": Turn(REFUTED, VALUES_FIRST),
    "S0.2.3d": Turn(CONFIRMED, EVERY_CONSTANT_1),
    "S0.2.3e": Turn(INCONSISTENT, HALF),
    "S0.2.4a": Turn(REFUTED, NOTHING_FROZEN),
    "S0.2.4b": Turn(REFUTED, NOTHING_FROZEN),
    "S0.3.1a": Turn(CONFIRMED, ONE_HEAD | COUNTED_ONE_HEAD),
    "S0.3.1b": Turn(CORRECTED, PROJECTING_SYNTHESIZER),
    "S0.3.1c": Turn(REFUTED, mechanism("favor", quadratic)),
    "S0.3.1d": Turn(REFUTED, mechanism("linear", quadratic)),
    "S0.3.1e": Turn(REFUTED, VALUES_FIRST),
    "S0.3.2a": Turn(REFUTED, PROJECTING_SYNTHESIZER),
    "S0.3.2b": Turn(REFUTED, mechanism("favor", quadratic)),
    # A head as wide as the layer has a feature for each entry that is looked up.
    "S0.3.2c": Turn(REFUTED, {f"{SHARED}.lookup.HEADS": constantly(1)}),
    "S0.3.2d": Turn(
        CONDITIONAL,
        {f"{SHARED}.lookup.attention_layer": lucky} | records(errors(("frozen", "8 frozen"), 0.25)),
    ),
    "S0.3.2e": Turn(CONFIRMED, PROJECTING_SYNTHESIZER),
    "S0.3.3a": Turn(CONFIRMED, EVERY_CONSTANT_1),
    "S0.4.1a": Turn(CONFIRMED, HALF),
    "S0.4.1b": Turn(
        CONDITIONAL, records(times("frozen", "learned", {"backward": 0.5, "optimiser": 0.5}), "training-step")
    ),
    "S0.4.1c": Turn(REFUTED, FREE_UPDATE),
    "S0.4.1d": Turn(REFUTED, FREE_UPDATE),
    "S0.4.2a": Turn(REFUTED, NOTHING_FROZEN),
    "S0.4.2b": Turn(REFUTED, NOTHING_FROZEN),
    "S0.4.2c": Turn(CONFIRMED, ONE_HEAD | COUNTED_ONE_HEAD),
    "S0.4.2d": Turn(REFUTED, NOTHING_FROZEN),
    "S0.4.3a": Turn(REFUTED, HALF),
    "S0.4.3b": Turn(CONFIRMED, records(times("frozen", "learned", {"forward": 0.97}), "inference")),
    "S0.4.4a": Turn(REFUTED, FREE_UPDATE),
    "S0.4.4b": Turn(REFUTED, FREE_UPDATE),
    "S0.4.4c": Turn(INCONSISTENT, free_backward_of("BERT-base")),
    "S0.4.4d": Turn(INCONSISTENT, free_backward_of("GPT-2 medium")),
    "S0.4.4e": Turn(INCONSISTENT, free_backward_of("ViT-Base")),
    "S0.4.4f": Turn(INCONSISTENT, FREE_BACKWARD),
    # Batches are larger in some models only.
    "S0.5.1a": Turn(CONDITIONAL, records(errors(("frozen", "positional"), 0.5), "bytes-little")),
    "S0.5.1b": Turn(CONFIRMED, records(errors(("QK redrawn",), 0.5), "fine-tuning")),
    # Frozen layers that train more parameters, the longer the sequence is.
    "S0.5.1c": Turn(
        CONFIRMED,
        layers(lambda cost, _, N, d, frozen: replace(cost, trained=cost.trained * (1 + N / 2**14 if frozen else 1))),
    ),
    "S0.5.2a": Turn(REFUTED, {"ortho.adapters.conversion.unfreeze_qk": giving(without_queries)}),
    "S0.5.2b": Turn(REFUTED, mechanism("linear", quadratic)),
    "S0.5.2c": Turn(REFUTED, records(errors(("frozen",), 4), "images")),
    "S0.5.2d": Turn(CONFIRMED, records(errors(("frozen", "stopped"), 0.25))),
    "S0.5.2e": Turn(INCONSISTENT, FREE_BACKWARD),
    "S0.5.3a": Turn(REFUTED, VALUES_FIRST),
    "S0.5.3b": Turn(REFUTED, FREE_UPDATE),
    "S1.1.1a": Turn(REFUTED, PER_PAIR),
    "S1.1.1b": Turn(REFUTED, {f"{SHARED}.layer.kept": constantly(lambda form="reference": N**2 * d)}),
    "S1.1.1c": Turn(CONFIRMED, {"SCENARIOS": hundredfold}),
    "S1.1.2a": Turn(
        CORRECTED, {"ortho.cost.feed_forward": lambda sound: lambda B, N, d, **kind: sound(B, N, d, 2 * d, **kind)}
    ),
    "S1.1.3a": Turn(REFUTED, PER_PAIR),
    "S1.1.3b": Turn(REFUTED, mechanism("softmax", narrow)),
    "S1.2.1a": Turn(
        REFUTED, {"ortho.attention.softmax.flash.flash_attention": constantly(softmax_attention_reference)}
    ),
    "S1.2.1b": Turn(REFUTED, mechanism("softmax", materialised) | KEEPS_SCORES),
    "S1.2.1c": Turn(CONFIRMED, records(on_a_gpu, "flash-speed")),
    "S1.2.2a": Turn(REFUTED, {"ortho.attention.linear.linear_attention.linear_attention_reference": DOUBLED}),
    "S1.2.2b": Turn(REFUTED, {"HEAD_FEATURES": constantly(64)}),
    "S1.2.2c": Turn(REFUTED, mechanism("linear", quadratic)),
    "S1.2.3a": Turn(REFUTED, ONE_KEY_MORE),
    "S1.2.3b": Turn(REFUTED, {"ortho.attention.dynamic_sparse.routing.routing_mask": constantly(the_latest)}),
    "S1.2.4a": Turn(REFUTED, ONE_KEY_MORE),
    "S1.3.1a": Turn(REFUTED, layers(lambda cost, _, N, d, frozen: replace(cost, decode=N * cost.decode))),
    "S1.3.1b": Turn(REFUTED, {"ortho.attention.cache.new_cache": constantly(Forgetful)}),
    "S1.3.2a": Turn(CONFIRMED, {"ortho.cost.models.recomputed": as_claimed, "less": constantly(lambda *_: 60)}),
    # Experts that share the work of one network, where each should do all of it.
    "S1.4.1a": Turn(
        CONFIRMED,
        {
            "ortho.cost.models.mixture_of_experts": costing(
                forward=lambda cost, *sizes: cost.forward.subs(sizes[4], 1 / sizes[4])
            )
        },
    ),
    "S1.4.1b": Turn(
        REFUTED,
        {
            "ortho.layers.feed_forward.MixtureOfExperts": lambda sound: (
                lambda *sizes, **kind: sound(*sizes, **kind | {"top_k": 3})
            )
        },
    ),
    "S1.4.1c": Turn(  # each token goes through all experts
        REFUTED,
        {"ortho.cost.models.mixture_of_experts": lambda sound: lambda B, N, d, E, k, d_ff: sound(B, N, d, E, E, d_ff)},
    ),
    "S1.4.2a": Turn(REFUTED, ONE_KEY_MORE),
    "S2.1.1a": Turn(REFUTED, UNIFORM),
    "S2.1.1b": Turn(REFUTED, UNIFORM),
    "S2.1.1c": Turn(REFUTED, UNIFORM),
    "S2.1.2a": Turn(CONFIRMED, records(explained, "translation-budgets", "pruning")),
    "S2.1.2b": Turn(
        REFUTED, {"ortho.layers.positional.sinusoidal_positions": giving(lambda positions: positions.roll(1, -1))}
    ),
    "S2.1.3a": Turn(REFUTED, records(in_the_standard_scenario, "translation")),
    "S2.1.3d": Turn(CONFIRMED, records(in_the_standard_scenario, "translation")),
    "S2.1.3b": Turn(REFUTED, records(translated(0.5, FIXED), "translation", "translation-budgets")),
    "S2.1.3c": Turn(  # frozen heads, with few parameters, gain most; nothing is known of steadiness
        UNTESTABLE, records(reached("bleu_fraction", 3, "8 frozen"), "translation")
    ),
    "S2.2.1a": Turn(REFUTED, QUADRATIC),
    "S2.2.1b": Turn(CONDITIONAL, {"ortho.attention.linear.feature_maps.Cosine": constantly(lambda: CosFormer(64))}),
    "S2.2.1c": Turn(
        CONFIRMED,
        {"ortho.attention.linear.linear_attention.linear_attention_reference": constantly(undivided)},
    ),
    "S2.2.2a": Turn(
        REFUTED,
        {"numpy.polynomial.hermite_e.hermegauss": giving(lambda rule: (rule[0] / 2, rule[1]))},  # w of variance 1/4
    ),
    "S2.2.2b": Turn(UNTESTABLE, {"ortho.attention.linear.favor.orthogonal_features": constantly(iid_features)}),
    "S2.2.2c": Turn(  # nothing is kept but the features
        CORRECTED, {"numbers_kept": constantly(lambda: 2 * H * N * m)}
    ),
    "S2.2.2d": Turn(REFUTED, {"log_gain": answering(-1.0)}),
    "S2.2.3a": Turn(REFUTED, {"strided_heads": FIRST_TWICE}),
    "S2.2.3b": Turn(REFUTED, {"fixed_heads": FIRST_TWICE}),
    "S2.2.3c": Turn(  # a picture in which the hubs are everywhere
        CONFIRMED, {"to_the_hubs": giving(lambda masks: [torch.ones_like(masks[0])] * 2)}
    ),
    "S2.2.3d": Turn(REFUTED, records(slow_blocks_on_a_gpu, "pattern-speed")),
    "S2.3.1a": Turn(  # projections by diagonal matrices, and nothing kept but the scores
        CORRECTED,
        {
            f"{SHARED}.layer.time": lambda sound: lambda: sound() - 8 * N * d**2 + 8 * N * d,
            f"{SHARED}.layer.kept": lambda sound: lambda *_: H * N**2,
        },
    ),
    "S2.3.2a": Turn(REFUTED, {"ortho.theory.kernels.features_of": giving(lambda features: features[:, :-1])}),
    "S2.3.2b": Turn(REFUTED, {"ortho.attention.softmax_attention_reference": DOUBLED}),
    "S2.3.2d": Turn(
        CORRECTED, {"ortho.attention.linear.random_features.positive_features": constantly(lambda x, _: Exact(x))}
    ),
    "S2.3.2c": Turn(
        REFUTED, {"ortho.attention.MECHANISMS[linear]": lambda linear: replace(linear, fast=DOUBLED(linear.fast))}
    ),
    "S2.3.3a": Turn(REFUTED, {"ortho.theory.unbiasedness.MAPS[positive]": DOUBLED}),
    "S2.3.3b": Turn(CONDITIONAL, {"ortho.theory.unbiasedness.fixed_length_mean": answering(1.0)}),
    "S2.3.3c": Turn(
        CONDITIONAL,
        {"ortho.theory.unbiasedness.fixed_length_kernel": constantly(lambda x, y, _: (x @ y.mT).exp())},
    ),
    "S2.4.1a": Turn(REFUTED, records(reached("loss_nats", 0.5, "learned"), "bytes")),
    "S2.4.2a": Turn(
        CONFIRMED,
        {"paper.theory.scores.expected_missed": answering(0.25), "paper.theory.scores.freedoms": answering((1, 1))},
    ),
    "S2.4.2b": Turn(  # projections times the root of d/k, which the source leaves out
        CONFIRMED, {"ortho.orthogonal.haar": lambda haar: lambda d, k, **o: (d / k) ** 0.5 * haar(d, k, **o)}
    ),
    "S2.4.2c": Turn(REFUTED, records(errors(("frozen",), 4), "images")),
    "S2.4.2d": Turn(REFUTED, {"ortho.projections.structured.factors": constantly(lambda d, *_: (1, d))}),
    "S2.4.3a": Turn(REFUTED, {"ortho.theory.johnson_lindenstrauss.least_dimension": giving(lambda k: 4 * k)}),
    "S2.4.3b": Turn(CONFIRMED, records(enlarged, "depth")),
    "S2.4.3c": Turn(REFUTED, {"ortho.projections.PROJECTIONS[frozen]": constantly(LearnedProjection)}),
    "S2.4.3d": Turn(  # layers train all their matrices, whatever the projection
        REFUTED, {"ortho.cost.layer": lambda layer: lambda *sizes, projection="", **o: layer(*sizes, **o)}
    ),
    "S2.4.4a": Turn(REFUTED, {f"{SHARED}.lookup.linear_solution": giving(without_values)}),
    "S2.5.2a": Turn(CONDITIONAL, records(reached("bleu_fraction", 2, "8 frozen"), "translation")),
    "S2.5.3a": Turn(CONFIRMED, records(some_frozen_heads_do_better, "bytes")),
    "S2.5.3b": Turn(
        REFUTED,
        records(reached("loss_nats", 2, "frozen linear", "frozen FAVOR+", "frozen delta", "frozen window"), "bytes"),
    ),
    "S2.5.3c": Turn(CONDITIONAL, records(errors(("frozen", "8 frozen"), 0.25))),
    "S2.6a": Turn(CONFIRMED, {"published_field": constantly(as_cited)}),
    "S3.1a": Turn(REFUTED, {"ortho.theory.associativity.flops": EXCHANGED}),
    "S3.1b": Turn(REFUTED, QUADRATIC),
    "S3.1c": Turn(CONFIRMED, {f"{SHARED}.linear_attention.WIDTH": constantly(64)}),  # as wide as it is long
    "S3.1d": Turn(REFUTED, mechanism("softmax", costing(forward=lambda cost, B, N, *_: N * cost.forward))),
    "S3.1e": Turn(CONFIRMED, {"multiplied": constantly(hidden)}),
    "S3.1f": Turn(
        CONFIRMED, {"ortho.attention.softmax.flash.flash_attention": constantly(softmax_attention_reference)}
    ),
    "S3.2a": Turn(REFUTED, {"ortho.theory.associativity.by_states": giving(lambda outputs: outputs[::-1])}),
    "S3.2b": Turn(REFUTED, QUADRATIC),
    "S3.2c": Turn(REFUTED, QUADRATIC),
    "S3.3a": Turn(REFUTED, {"ortho.attention.recurrent.delta.delta_rule_reference": DOUBLED}),
    "S3.3b": Turn(REFUTED, {"ortho.attention.recurrent.delta.delta_rule": DOUBLED}),
    "S3.3c": Turn(
        CONDITIONAL,
        {"ortho.cost.layer": wide_heads, "paper.theory.delta_updates.transition": giving(lambda A: (A + A.T) / 2)},
    ),
    "S3.3d": Turn(
        REFUTED, {"ortho.attention.position_bias.position_delta.position_delta_attention_reference": DOUBLED}
    ),
    "S3.3e": Turn(REFUTED, {"ortho.attention.recurrent.delta.delta_rule": DOUBLED}),
    "S3.3f": Turn(REFUTED, {"product": giving(lambda P: 0 * P)}),
    "S3.3g": Turn(REFUTED, {"paper.theory.robustness.moved": DOUBLED}),
    "S3.3h": Turn(CONFIRMED, records(reached("correct_fraction", 0.5, "delta", "delta, beta to 2"))),
    "S3.3i": Turn(REFUTED, {"least_missed": answering(0.0)}),
    "S3.3j": Turn(REFUTED, {"ortho.attention.position_bias.path_attention.path_attention_reference": DOUBLED}),
    "S3.3k": Turn(REFUTED, records(on_a_gpu, "memory-speed")),
    "S3.3l": Turn(REFUTED, {"ortho.attention.recurrent.ttt_losses.Squared.gradient": DOUBLED}),
    "S4.1a": Turn(  # multiples of k are kept
        CORRECTED, {"ortho.attention.sparse.dilated.NeitherFarNorMultiple.mask": giving(torch.ones_like)}
    ),
    "S4.1b": Turn(REFUTED, records(timed(0.01, "sdpa masked"), "pattern-speed")),
    "S4.1c": Turn(REFUTED, {f"{SHARED}.inputs.WINDOW": constantly(1)}),
    "S4.2a": Turn(REFUTED, {"ortho.theory.associativity.flops": EXCHANGED}),
    "S4.2b": Turn(CONFIRMED, {"printed_code": constantly(padding_left_out)}),
    "S4.2c": Turn(REFUTED, records(reached("correct_fraction", 0.05, "linear", "FAVOR+"), "images")),
    "S4.3a": Turn(REFUTED, records(timed(0.01, "linear recurrent"), "attention-speed")),
    "S4.3b": Turn(REFUTED, records(reached("loss_nats", 0.5, "window", "linear + embeddings"), "bytes")),
    "S4.4a": Turn(  # the keys with the least scores are chosen
        REFUTED,
        {"ortho.attention.dynamic_sparse.top_k.top_k_mask": lambda choose: lambda q, k, **o: choose(-q, k, **o)},
    ),
    "S4.4b": Turn(REFUTED, records(errors(("linear",), 4), "images")),
    "S4.4c": Turn(  # one more operation for each pair of tokens
        REFUTED,
        {
            "ortho.cost.mechanisms.sparse.sparse_linear_cost": costing(
                forward=lambda cost, B, N, *_: cost.forward + N**2
            )
        },
    ),
}


@pytest.mark.parametrize("claim_id", TURNS)
def test_a_broken_subject_turns_the_verdict(claim_id, monkeypatch):
    check(claim_id, TURNS[claim_id], monkeypatch)


def test_every_claim_has_a_turn():
    assert TURNS.keys() == catalogue().claims.keys()
