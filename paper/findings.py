"""What this paper found, as values that its pages print: landing page, article, README, the pages in Chinese.

Each value is computed once, by the functions below, and has a name by which a page asks for it. All are strings, as
they are printed; formulas are TeX without dollars. Without the records that a value needs there is no such value, and
`Sentences` leaves out what would print it. What the pages' words rely on (that a loss is a loss, that one bound lies
below another) is asserted where it is computed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import sympy

from ortho import MECHANISMS
from ortho.cost import block, layer
from ortho.cost.attention import choosing, decoded
from ortho.cost.big_o import H, N, constants, d
from ortho.theory import retrieval, unbiasedness
from paper import experiments, memory
from paper.claims.evidence import does_freezing_hold as learning
from paper.claims.evidence import frozen_layer, printed_models, printed_speed_ups
from paper.claims.evidence.one_learned_head import along_budgets
from paper.claims.figures import numbers, read, show
from paper.claims.outcomes import BITS_A_BYTE
from paper.experiments.engine.records import Record
from paper.experiments.learning import analysis, ladder, ladder_analysis, ladder_lengths, language
from paper.experiments.learning.analysis import Judged, Runs
from paper.experiments.learning.ladder_analysis import Tested
from paper.experiments.learning.ladder_arms import CONVOLUTION
from paper.experiments.speed import analysis as speed
from paper.experiments.speed import attention_analysis, decoding, heads, language_models, value_gradient, whole_models
from paper.experiments.statistics import Decision
from paper.theory import approximation

WIDTH, HEADS, LENGTH = 768, 12, 4096
K = sympy.Symbol("K", positive=True)
r = sympy.Symbol("r", positive=True)  # N / d
MIXED = "1 learned + 3 positional"

Values = dict[str, str]


class Sentences:
    """Sentences with values in them: `{name}` in a template is a value of `values()`."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self.known = known

    def say(self, template: str) -> str:
        """The sentence, or nothing where a value that it needs is not there."""
        try:
            return template.format_map(self.known)
        except KeyError:
            return ""


@cache
def values() -> Mapping[str, str]:
    """All values by their names, which are letters, digits and underscores."""
    found: Values = {}
    for topic in TOPICS:
        new = topic()
        assert not new.keys() & found.keys(), f"two values of one name: {sorted(new.keys() & found.keys())}"
        found |= new
    return found


def _tex(formula: Any) -> str:
    """A formula without its dollars."""
    return show(formula).strip("$")


def speed_up(of: Callable[..., Any], projection: str, form: str = "reference") -> Any:
    """How many times as fast a training step of a layer or a block is by its FLOPs, as a function of r = N / d."""
    sides = [of(1, N, d, H, projection=one, form=form).step for one in ("learned", projection)]
    return sympy.simplify((sides[0] / sides[1]).subs(N, r * d))


# ---------------------------------------------------------------------------------------------- what freezing removes


def freezing() -> Values:
    """Products that leave the backward pass of a layer, and what that allows a step to gain."""
    learned, frozen, stopped = (
        layer(1, N, d, H, projection=one, form="reference").backward for one in ("learned", "frozen", "stopped")
    )
    weighted = [name for name in frozen_layer.PRODUCTS if name.startswith(("dW", "dX", "dO"))]
    before, after = (frozen_layer.backward_products(one) for one in ("learned", "frozen"))
    removed = [name for name in weighted if before[name] != after[name]]
    assert sympy.expand(frozen - learned + len(removed) * 2 * N * d**2) == 0
    fused = {one: constants(layer(1, N, d, H, projection=one, form="fast").backward) for one in ("learned", "stopped")}
    assert fused["stopped"][N**2 * d] == fused["learned"][N**2 * d]  # PyTorch's kernel computes what nobody asks for
    short, long = (sympy.limit(speed_up(layer, "stopped"), r, end) for end in (0, sympy.oo))
    return {
        "width": str(WIDTH),
        "heads": str(HEADS),
        "length": f"{LENGTH:,}".replace(",", "{,}"),
        "removed": str(len(removed)),
        "weighted": str(len(weighted)),
        "backward_learned": _tex(learned),
        "backward_frozen": _tex(frozen),
        "backward_stopped": _tex(stopped),
        "first_alone": _tex(frozen_layer.backward_counted(frozen_layer.VALUES_FIRST, input_grad=False)),
        "last_alone": _tex(frozen_layer.backward_counted(frozen_layer.VALUES_LAST, input_grad=False)),
        "layer_most": f"{float(sympy.limit(speed_up(layer, 'frozen'), r, 0)):.3g}",
        "block_most": f"{float(sympy.limit(speed_up(block, 'frozen'), r, 0)):.3g}",
        "stopped_short": f"{float(short):.4g}",
        "stopped_long": f"{float(long):.4g}",
    }


def printed() -> Values:
    """The figures that the first source prints, and the rules behind them."""
    claimed = sorted(printed_speed_ups.SPEED_UPS.values(), key=float)
    rule = sympy.factor(printed_speed_ups.table_rule(r * d, d) / 100)
    low, high = printed_speed_ups.RANGES["N >> d"]
    trained = printed_models.SCENARIOS["GPT-2 medium"].trained
    assert trained is not None
    fall = printed_models.millions("GPT-2 medium") - printed_models.millions("GPT-2 medium", "frozen")
    said = {name: model.speed_up for name, model in printed_models.SCENARIOS.items()}
    bounds = {name: printed_models.whole_limit(name) for name in said}
    assert all(bounds[name] < claim for name, claim in said.items())
    return {
        "source_least": str(claimed[0]),
        "source_most": str(claimed[-1]),
        "source_rule": _tex(rule),
        "source_rule_long": f"{float(100 * sympy.limit(rule, r, sympy.oo)):.1f}",
        "source_long_low": str(low),
        "source_long_high": str(high),
        "memory_share": str(printed_models.SHARE),
        "memory_block": f"{printed_models.saved_share(WIDTH, of=block):.1f}",
        "gpt2_fall": f"{fall:.1f}",
        "gpt2_said": str(read(trained[0]).value - read(trained[1]).value),
        "model_bounds": ", ".join(f"{name} {bound:.1f} %" for name, bound in bounds.items()),
        "model_claims": ", ".join(map(str, said.values())),
    }


def plain(case: Mapping[str, Any]) -> bool:
    """Whether a timed step is of the kind that the source speaks of, in the precision that its device is made for."""
    usual = "float32" if case["device"] == "cpu" else "bfloat16"
    kind = case["d"], case["dtype"], case["input_grad"], case["causal"], case["compiled"]
    return kind == (WIDTH, usual, True, False, False)


@cache
def measured_steps() -> dict[tuple[str, str], list[Any]]:
    """(device, 'layer' or 'block') -> the measured speed-ups of the frozen layer, by length."""
    kept = [record for record in experiments.load("training-step") if plain(record["configuration"])]
    return {
        (records[0]["provenance"]["device_name"].replace("(R)", ""), scope): sorted(
            (row for row in experiments.speedups(records) if (row["arm"], row["scope"]) == ("frozen", scope)),
            key=lambda row: row["N"],
        )
        for records in experiments.by_device(kept).values()
        for scope in ("layer", "block")
    }


def measured() -> Values:
    """Steps of frozen layers, blocks and models on the clock."""
    timed = measured_steps()
    found: Values = {}
    if timed:
        found["step_gains"] = "; ".join(
            f"on {device} the frozen layer was {_gain(timed[device, 'layer'])} faster "
            f"({_lengths(timed[device, 'layer'])}), the block {_gain(timed[device, 'block'])} "
            f"({_lengths(timed[device, 'block'])})"
            for device in dict.fromkeys(device for device, _ in timed)
        )
        first = next(iter(timed))[0]
        for scope in ("layer", "block"):
            rows = timed[first, scope]
            found |= {f"step_gain_{scope}": _gain(rows), f"step_lengths_{scope}": _lengths(rows)}
        found["step_device"] = first
    models = [row for row in whole_models.rows(experiments.load("whole-models")) if row["variant"] == "frozen"]
    if models:
        found["model_clocks"] = "; ".join(
            f"on `{row['device']}` {row['model']} was {100 * row['speedup'][1] - 100:.1f} % faster" for row in models
        )
    return found


def _gain(rows: Sequence[Any]) -> str:
    gains = [100 * row["speedup"][1] - 100 for row in rows]
    return f"{min(gains):.0f} to {max(gains):.0f} %"


def _lengths(rows: Sequence[Any]) -> str:
    lengths = [row["N"] for row in rows]
    return f"{min(lengths):,} to {max(lengths):,}"


# ------------------------------------------------------------------------------------------------ kernels, projections


def kernels() -> Values:
    """Random features, by formula."""
    crossing = approximation.crossing("positive", "orthogonal", 64, 0.5)
    assert crossing is not None
    yardstick = 2**crossing.value
    return {
        "favor_short": f"{100 * unbiasedness.fixed_length_mean(64, 1.0, 1.0):.0f}",
        "favor_features": f"{100 * round(yardstick / 100):,}",
    }


def retrieving() -> Values:
    """Heads that retrieve untrained, by formula."""
    wide, narrow = 32, 16
    return {
        "retrieval_width": str(narrow),
        "retrieval_d": "96",
        "retrieval_capacity": f"{round(retrieval.capacity(narrow, 96), -2):,.0f}",
        "retrieval_gaussian": f"{round(retrieval.capacity(narrow, 96, draw='gaussian'), -2):,.0f}",
        "retrieval_wide": str(wide),
        "retrieval_wide_capacity": f"{retrieval.capacity(wide, 96) / 1e9:.1f}",
    }


def clocks() -> Values:
    """Kernels, memories and patterns on the clock, as shares of the fused softmax's time."""
    kernel_names = {
        "linear": "linear attention",
        "linear causal": "causal linear attention",
        "favor": "FAVOR+",
        "favor causal": "causal FAVOR+",
    }
    memory_names = {"delta causal": "the delta rule", "gated-delta causal": "with decays"}
    pattern_names = {"window": "in tiles", "sdpa masked": "as a mask"}  # of one pattern
    kernel_records, memory_records, pattern_records = (
        experiments.load(f"{name}-speed") for name in ("attention", "memory", "pattern")
    )
    found: Values = {}
    kernel_clocks = _shares(kernel_records, "main", kernel_names, ".2g")
    memory_clocks = _shares(memory_records, "delta", memory_names, ".2g")
    patterns = _shares(pattern_records, "patterns", pattern_names, ".0f")
    if patterns:
        found["pattern_clocks"] = "; ".join(f"on `{device}` {took}" for device, took in patterns.items())
    both = [device for device in kernel_clocks if device in memory_clocks and experiments.on_cpu(device)]
    if both:
        found["linear_time"] = "; ".join(
            f"on `{device}`, {kernel_clocks[device]}; {memory_clocks[device]}" for device in both
        )
    crossings: dict[str, list[str]] = {}  # on GPUs, where short sequences do not tell
    for row in attention_analysis.crossovers(kernel_records):
        if row["arms"] == "main" and not row["compiled"] and not experiments.on_cpu(row["device"]):
            words = f"{kernel_names[row['arm']]} {attention_analysis.in_words(row['alike'])}"
            crossings.setdefault(row["device"], []).append(words)
    if crossings:
        found["linear_gpu"] = "; ".join(f"on `{device}`, {', '.join(words)}" for device, words in crossings.items())
    return found


def _shares(records: Sequence[Any], arms: str, names: Mapping[str, str], digits: str) -> dict[str, str]:
    """Device -> the times of named arms in words, as shares of the fused softmax's at `LENGTH`, where all are there."""
    found: Values = {}
    for device, lines in attention_analysis.curves(records, arms).items():
        share = {arm: 100 * row["ratio"][1] for arm, rows in lines.items() for row in rows if row["N"] == LENGTH}
        if names.keys() <= share.keys():
            found[device] = ", ".join(f"{name} {share[arm]:{digits}} %" for arm, name in names.items())
    return found


# -------------------------------------------------------------------------------- memories, patterns, serving, heads


def memories() -> Values:
    """What memories and positions learn: medians of five models, in per cent."""
    found: Values = {}
    for arms in _learnt("parity", "tokens 161 to 256"):
        found |= {"parity_wide": f"{arms['delta, beta to 2']:.0f}", "parity_narrow": f"{arms['delta']:.0f}"}
    for arms in _learnt("flip-flop", "sparse, tokens 257 to 512"):
        assert arms["position-delta"] > max(arms["rotary"], arms["alibi"], arms["softmax"])
        found["flip_flop"] = f"{arms['position-delta']:.0f}"
    return found


def _learnt(experiment: str, test: str) -> Iterable[dict[str, float]]:
    """For each device: arm -> the median of its right answers in per cent."""
    records = experiments.load(experiment)
    for device in experiments.by_device(records):
        yield {arm: 100 * tests[test]["median"] for arm, tests in analysis.results(records, device).items()}


def patterns() -> Values:
    """Keys that are chosen."""
    return {"choosing_top_k": f"{100 * choosing('top-k', LENGTH, 64, 64).share:.0f}"}


def _kept_numbers(form: str) -> sympy.Expr:
    """Numbers that a head of width K keeps for the backward pass, with its output if that is kept."""
    attend = MECHANISMS["softmax"].form(form)
    return memory.kept_by_call(lambda q, k, v, _: attend(q, k, v), N * d, N, N**2).subs(d, K)


def hardware() -> Values:
    """Flash attention and decoding."""
    tiled, whole = (MECHANISMS["softmax"].cost(1, N, 1, K, K, form=form) for form in ("fast", "reference"))
    assert sympy.expand(tiled.forward - whole.forward) == 0
    step = decoded("softmax", 1, N, 1, d, d)
    assert N not in decoded("delta", 1, N, 1, d, d).nbytes.free_symbols
    found = {
        "flash_forward": _tex(tiled.forward),
        "flash_backward": _tex(tiled.backward),
        "whole_backward": _tex(whole.backward),
        "flash_kept": _tex(_kept_numbers("fast")),
        "whole_kept": _tex(_kept_numbers("reference")),
        "decode_flops": _tex(step.forward),
        "decode_numbers": _tex(step.nbytes / 4),
    }
    timed = {
        (row["device"], row["name"], row["context"]): row["seconds"][1]
        for row in decoding.rows(experiments.load("decode-speed"))
    }
    longest = {device: max(c for of, name, c in timed if (of, name) == (device, "softmax")) for device, _, _ in timed}
    told = [
        f"on `{device}`, after {context:,} tokens, softmax takes {timed[device, 'softmax', context] / own:.0f} times "
        "as long as the delta rule"
        for device, context in longest.items()
        if (own := timed.get((device, "delta", context)))
    ]
    return found | ({"decode_clocks": "; ".join(told)} if told else {})


def mixed_heads() -> Values:
    """What the exchanged pass and layers of several kinds of heads save."""
    found: Values = {}
    longest: dict[str, Any] = {}
    for row in value_gradient.rows(experiments.load("exchanged-speed")):
        if not row["causal"] and row["N"] >= longest.get(row["device"], row)["N"]:
            longest[row["device"]] = row
    if longest:
        told = (
            f"on `{name}`, with {row['N']:,} tokens, it is {row['backward'][1]:.1f} times as fast "
            f"({row['backward_bound']:.2f})"
            for name, row in longest.items()
        )
        found["exchanged_clocks"] = "; ".join(told)
    rows = heads.speedups(experiments.load("heads-speed"))
    layers = [
        row for row in rows if (row["scope"], row["N"], row["d"], row["causal"]) == ("layer", LENGTH, WIDTH, True)
    ]
    gains = {row["device"]: row["speedup_with_optimiser"][1] for row in reversed(layers) if row["variant"] == "one"}
    if gains:
        device = layers[0]["device"]
        found |= {"split_device": device, "split_layer": f"{gains[device]:.1f}"}
        kind = ("one", "block", WIDTH, True, device)
        blocks = [row for row in rows if (row["variant"], row["scope"], row["d"], row["causal"], row["device"]) == kind]
        if blocks:
            last = max(blocks, key=lambda row: row["N"])
            found |= {
                "split_block": f"{last['speedup_with_optimiser'][1]:.1f}",
                "split_block_length": f"{last['N']:,}".replace(",", "{,}"),
            }
    if plain := _uncompiled_on_gpus(rows):
        found["heads_on_gpu"] = plain
    return found


def _uncompiled_on_gpus(rows: Sequence[Any]) -> str:
    """Speed-ups at `LENGTH` of layers and blocks that are not compiled, and of their FLOPs, for each GPU."""
    told = []
    for device in dict.fromkeys(row["device"] for row in rows if not experiments.on_cpu(row["device"])):
        kind = (device, LENGTH, WIDTH, False)
        gains = {
            (row["arm"], row["scope"]): f"{row['speedup_with_optimiser'][1]:.2f} times as fast ({row['bound']:.2f})"
            for row in rows
            if (row["device"], row["N"], row["d"], row["causal"]) == kind
        }
        scopes = [(arm, scope) for arm in ("stopped", "one") for scope in ("layer", "block")]
        if gains.keys() >= {*scopes}:
            layer, block, mixed_layer, mixed_block = (gains[one] for one in scopes)
            told.append(
                f"on `{device}` a layer of stopped heads is {layer} and a block {block}; with one learned head beside "
                f"positional ones a layer is {mixed_layer} and a block {mixed_block}"
            )
    return "; ".join(told)


# ------------------------------------------------------------------------------------------------------------ learning


def freezing_learnt() -> Values:
    """Small language models of bytes with learned, frozen, stopped and mixed heads, and settings beside them."""
    records = experiments.load("bytes")
    device = experiments.judged_device(records)
    text = language.by_arm(records, device)
    if not text:
        return {}
    _expect(text, "learned", frozen="worse", stopped="worse", positional="better", **{MIXED: "better"})
    _expect(text, "identity", stopped="equivalent")
    assert _judged(text["frozen"], text["frozen Gaussian"]).outcome not in ("better", "worse")
    _expect(text, "frozen 4 x", frozen="better")
    _expect(text, "frozen 1/4 x", frozen="better")
    _expect(text, "stopped Gaussian", stopped="better")
    baseline = text["learned"]
    steps = baseline.configuration["steps"]
    against = learning.compared("frozen", "learned", learning.every_setting())
    others = {label: pair for label, pair in against.items() if pair.unit.name != BITS_A_BYTE.name}
    lost = {label for label, pair in against.items() if pair.outcome == "worse"}
    elsewhere = {label: pair for label, pair in others.items() if label in lost}
    assert len(lost) - len(elsewhere) == len(against) - len(others)
    assert all(label.startswith("translation, ") and label.endswith(" passes") for label in elsewhere)
    margin = f"{Decision.of(baseline.configuration).margin:g}"
    parameters = f"{round(baseline.parameters, -3):,}"
    found = _bits("bytes", text) | {
        "bytes_models": str(len(baseline.seeds)),
        "bytes_size": f"{parameters} trained parameters and {steps} steps with learned heads, margin {margin} bits",
        "lost": str(len(lost) - len(elsewhere)),
        "not_lost": str(len(others) - len(elsewhere)),
        "not_excluded": str(sum(pair.outcome in ("undecided", "not better") for pair in others.values())),
        "bytes_kept": f"{100 * _kept(text):.0f} %",
        "draw_gap": _difference(text, "frozen", "frozen Gaussian"),
    }
    if elsewhere:
        found["lost_long"] = "; ".join(
            f"{pair.unit.spelt(pair.mean, pair.interval)} {pair.unit.name} with {label.removeprefix('translation, ')}"
            for label, pair in elsewhere.items()
        )
    stages = along_budgets(experiments.load("bytes-budgets"), device, text)
    longest = min((width for width, _ in stages), default=0), max(language.BUDGETS)
    if longest in stages:
        found |= _later(stages[longest], longest[1], float(margin))
        if language.same_text(records):
            found |= _tables(text, stages[longest], steps, longest[1])
    return found | _seconds(device, text)


# The kinds of heads that are compared with learned ones behind a short convolution, and their own convolutions' widths.
LADDER = {
    "induction": (ladder_analysis.INDUCTION, CONVOLUTION),
    "one": (ladder_analysis.ONE, CONVOLUTION),
    "beside": (ladder_analysis.BESIDE, CONVOLUTION),
    "shifted": (ladder_analysis.SHIFTED, 0),
}


def longer_budgets() -> Values:
    """The kinds of `LADDER` at 16 and at 64 times the least budget, and which of them lead over the strongest rival."""
    runs = [record for name in ladder_analysis.EXPERIMENTS for record in experiments.load(name)]
    records = ladder_analysis.standing(runs)
    early, late = (_measured(_at(records, budget)) for budget in (ladder.LONG, ladder.LONGEST))
    if not (early and late):
        return {}
    found = _compared(early) | _at_last(late) | _rows(early, late)
    return found | _selective(records, early, late) | _by_length() | _from_shifted(records) | _hypotheses(records)


def _hypotheses(records: Sequence[Record]) -> Values:
    """How many hypotheses were written before their runs, and how many of them are shown; none while one is open."""
    outcomes = [one for family in ladder_analysis.FAMILIES for one in ladder_analysis.judged(records, family).values()]
    if any(found is None for found, _ in outcomes):
        return {}
    shown = sum(shown for _, shown in outcomes)
    return {
        "ladder_hypotheses": str(len(outcomes)),
        "ladder_shown": str(shown),
        "ladder_not_shown": str(len(outcomes) - shown),
    }


def _rows(early: Mapping[str, Tested], late: Mapping[str, Tested]) -> Values:
    """The table that the pages print: for each kind the differences from learned heads, on each text at either budget,
    and how many times as long a step on program sources takes; without its name, cells apart by bars."""
    timed = experiments.load("ladder-speed")
    device = experiments.judged_device(timed)
    found: Values = {}
    for record in timed:
        if record["device"] == device and record["configuration"]["text"] == "python":
            ratios = language_models.relative(record)
            for short, (arm, width) in LADDER.items():
                names = [f"{text}_{short}" for text in ladder.TEXTS]
                told = [BITS_A_BYTE.spelt(of[n].mean, of[n].interval) for n in names for of in (early, late)]
                step = speed.quartiles(ratios[arm if width else f"{arm} without convolution"])[1]
                found[f"ladder_row_{short}"] = " | ".join([*told, f"{step:.2f}"])
    return found


def _measured(found: Mapping[str, Tested | None]) -> dict[str, Tested]:
    """The differences; none of them if one is not measured yet."""
    known = {name: one for name, one in found.items() if one is not None}
    return known if len(known) == len(found) else {}


def _spelt(found: Mapping[str, Tested]) -> Values:
    """Each difference with its interval, under its name."""
    return {f"ladder_{name}": BITS_A_BYTE.spelt(one.mean, one.interval) for name, one in found.items()}


def _at(records: Sequence[Record], budget: int) -> dict[str, Tested | None]:
    """The difference of each kind from learned heads on each text, at a budget."""
    return {
        f"{name}_{short}": ladder_analysis.compared(records, name, arm, budget, convolution=width)
        for name in ladder.TEXTS
        for short, (arm, width) in LADDER.items()
    }


def _compared(found: Mapping[str, Tested]) -> Values:
    """What is compared at 16 times the least budget; AssertionError unless the differences have the signs that the
    pages give them in words."""
    assert found["python_induction"].interval[1] < 0 < found["novels_induction"].interval[0]
    assert found["python_beside"].interval[1] < 0 > found["python_shifted"].interval[1]
    sizes = ladder.case("python", ladder_analysis.RIVAL)
    return {
        "ladder_bytes": _bytes_seen(ladder.LONG),
        "ladder_seeds": numbers(len(one.seeds) for one in found.values()),
        "ladder_size": f"width {sizes['d']}, {sizes['L']} blocks",
        "ladder_confidence": f"{100 - 200 * ladder_analysis.LEVEL:g} %",
    }


def _at_last(found: Mapping[str, Tested]) -> Values:
    """The longest budget and its runs; AssertionError if heads that retrieve untrained lead on program sources, or
    are not behind on novels."""
    assert found["python_induction"].interval[1] > 0 < found["novels_induction"].interval[0]
    return {
        "ladder_last_bytes": _bytes_seen(ladder.LONGEST),
        "ladder_last_seeds": numbers(len(one.seeds) for one in found.values()),
    }


def _by_length() -> Values:
    """The lead of selective heads on program sources in the shortest and in the longest windows, over learned heads
    and over positional heads alone; AssertionError unless both grow with them."""
    records = ladder_analysis.standing(experiments.load("ladder-lengths"))
    ends = {"shortest": min(ladder_lengths.LENGTHS), "longest": max(ladder_lengths.LENGTHS)}
    rivals = {"lead": ladder_analysis.RIVAL, "retrieved": ladder_lengths.CONTROL}
    known = _measured(
        {
            f"{end}_{word}": ladder_lengths.compared(records, "python", N, against=rival)
            for end, N in ends.items()
            for word, rival in rivals.items()
        }
    )
    if not known:
        return {}
    for word in rivals:
        assert known[f"longest_{word}"].interval[1] < known[f"shortest_{word}"].interval[0]
    spelt = _spelt(known)
    windows = {f"ladder_{end}_window": f"{N:,}" for end, N in ends.items()}
    return spelt | windows | {"ladder_windows_bytes": f"{ladder_lengths.SEEN:,}"}


def _selective(records: Sequence[Record], early: Mapping[str, Tested], late: Mapping[str, Tested]) -> Values:
    """Two heads that read nothing without a match, beside two positional ones, on program sources.

    Raises AssertionError unless they lead over learned heads at 16 times the least budget and show no lead at the
    longest, and unless one learned head beside two of them takes fewer bits, in the mean.
    """
    budgets = {"": ladder.LONG, "_last": ladder.LONGEST}
    compared = partial(ladder_analysis.compared, records, "python", ladder_analysis.SELECTIVE)
    known = _measured({f"selective{end}": compared(budget) for end, budget in budgets.items()})
    if not known:
        return {}
    for end, others in (("", early), ("_last", late)):
        assert others["python_beside"].mean < min(0, known[f"selective{end}"].mean)
    assert known["selective"].interval[1] < 0
    assert known["selective_last"].interval[0] < 0 < known["selective_last"].interval[1]
    return _spelt(known) | {"ladder_selective_seeds": numbers(len(one.seeds) for one in known.values())}


def _from_shifted(records: Sequence[Record]) -> Values:
    """What leads over learned heads with the KV shift on program sources.

    Raises AssertionError unless at 16 times the least budget one learned head beside two selective ones does, and two
    heads that retrieve untrained do not; and unless, at the longest budget, these are behind and that lead no longer
    shows.
    """
    compared = partial(
        ladder_analysis.compared, records, "python", against=ladder_analysis.SHIFTED, their_convolution=0
    )
    arms = {"induction": ladder_analysis.INDUCTION, "beside": ladder_analysis.BESIDE}
    budgets = {"": ladder.LONG, "_last": ladder.LONGEST}
    known = _measured(
        {f"shifted_{name}{end}": compared(arm, budget) for name, arm in arms.items() for end, budget in budgets.items()}
    )
    if not known:
        return {}
    assert known["shifted_beside"].interval[1] < 0 < known["shifted_induction"].interval[1]
    assert known["shifted_induction_last"].interval[0] > 0
    assert known["shifted_beside_last"].interval[0] < 0 < known["shifted_beside_last"].interval[1]
    return _spelt(known) | {"ladder_shifted_seeds": numbers(len(one.seeds) for one in known.values())}


def _bytes_seen(budget: int) -> str:
    """How many bytes the ladder's models have drawn at a budget."""
    sizes = ladder.case("python", ladder_analysis.RIVAL)
    return f"{budget * sizes['base'] * sizes['B'] * sizes['N']:,}"


def _later(runs: Mapping[str, Runs], times: float, margin: float) -> Values:
    """The same models at the longest budget."""
    _expect(runs, "learned", frozen="worse")
    assert _judged(runs["positional"], runs["learned"]).outcome != "better"
    difference = _judged(runs[MIXED], runs["learned"]).difference
    assert abs(difference.mean) < margin
    return _bits("later", runs) | {
        "later_times": f"{times:g}",
        "later_kept": f"{100 * _kept(runs):.0f} %",
        "later_mixed_gap": _difference(runs, MIXED, "learned"),
    }


def _tables(text: Mapping[str, Runs], later: Mapping[str, Runs], steps: int, times: float) -> Values:
    """Tables of the last bytes, counted on as many bytes as the models see."""
    (last, counted), (_, counted_later) = (language.best(round(steps * factor)) for factor in (1, times))
    assert counted < min(runs.mean("bits") for runs in text.values())
    assert counted_later > later["learned"].mean("bits")
    return {"table_last": str(last), "table_bits": f"{counted:.2f}", "table_later_bits": f"{counted_later:.2f}"}


def _seconds(device: str, text: Mapping[str, Runs]) -> Values:
    """How long models of one learned head train, over those of four, at equal FLOPs."""
    timed = language_models.beside(device, experiments.load("bytes-speed"))
    if timed is None:
        return {}
    own = {arm: runs.configuration["steps"] for arm, runs in text.items()}
    step, whole = (speed.quartiles(language_models.relative(timed, steps)[MIXED])[1] for steps in (None, own))
    assert step < 1 < whole
    return {"mixed_training": f"{whole:.2f}"}


_ARMS = {
    "learned": "learned",
    "frozen": "frozen",
    "stopped": "stopped",
    "identity": "identity",
    "mixed": MIXED,
    "gaussian": "frozen Gaussian",
    "small": "frozen 1/4 x",
}


def _bits(name: str, runs: Mapping[str, Runs]) -> Values:
    """Mean bits a byte of each arm that has runs."""
    return {f"{name}_{short}": f"{runs[arm].mean('bits'):.2f}" for short, arm in _ARMS.items() if arm in runs}


def _judged(arm: Runs, other: Runs) -> Judged:
    """An arm against another; AssertionError where the runs are too few to be judged."""
    found = language.judged(arm, other)
    assert found is not None
    return found


def _expect(runs: Mapping[str, Runs], other: str, **outcomes: str) -> None:
    """AssertionError unless the rule that was fixed before the runs says this of these arms against another."""
    for arm, outcome in outcomes.items():
        said = _judged(runs[arm], runs[other]).outcome
        assert said == outcome, f"{arm} against {other}: expected {outcome}, got {said}"


def _difference(runs: Mapping[str, Runs], arm: str, other: str) -> str:
    """What an arm takes more than another, with its interval."""
    return BITS_A_BYTE.spelt(*_judged(runs[arm], runs[other]).difference)


def _kept(runs: Mapping[str, Runs]) -> float:
    """Of the lead of learned heads over stopped ones, the share that frozen ones have."""
    learned, frozen, stopped = (runs[arm].mean("bits") for arm in ("learned", "frozen", "stopped"))
    return float((stopped - frozen) / (stopped - learned))


TOPICS = (
    freezing,
    printed,
    measured,
    kernels,
    retrieving,
    clocks,
    memories,
    patterns,
    hardware,
    mixed_heads,
    freezing_learnt,
    longer_budgets,
)
