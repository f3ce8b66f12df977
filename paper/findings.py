"""What this paper found, as values that its pages print: landing page, article, README, the pages in Chinese.

Each value is computed once, by the functions below, and has a name by which a page asks for it. All are strings, as
they are printed; formulas are TeX without dollars. Without the records that a value needs there is no such value, and
`Sentences` leaves out what would print it. What the pages' words rely on (that a loss is a loss, that one bound lies
below another) is asserted where it is computed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import sympy

from ortho import MECHANISMS
from ortho.cost import block, layer
from ortho.cost.attention import choosing, decoded
from ortho.cost.big_o import H, N, constants, d
from ortho.theory import retrieval, unbiasedness
from paper import experiments, memory
from paper.claims.figures import numbers, read, show
from paper.claims.outcomes import BITS_A_BYTE, Unit
from paper.claims.shared import does_freezing_hold as learning
from paper.claims.shared import frozen_layer, printed_models, printed_speed_ups
from paper.claims.shared.one_learned_head import along_budgets
from paper.experiments.engine.records import Record
from paper.experiments.learning import analysis, ladder, ladder_analysis, ladder_tables, language
from paper.experiments.learning.analysis import Judged, Runs
from paper.experiments.learning.ladder_analysis import Tested
from paper.experiments.learning.ladder_arms import CONVOLUTION
from paper.experiments.resampling import student_difference
from paper.experiments.speed import analysis as speed
from paper.experiments.speed import attention_analysis, decoding, heads, language_models, value_gradient, whole_models
from paper.experiments.statistics import Decision, Interval, holm
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
        "memory_block": f"{printed_models.saved_share(WIDTH, scope='block'):.1f}",
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


TIMED = (
    "training-step",
    "attention-speed",
    "memory-speed",
    "heads-speed",
    "exchanged-speed",
    "bytes-speed",
    "ladder-speed",
)


def timed_at() -> Values:
    """Dates and commits at which the times on these pages were measured, by device."""
    found: dict[str, dict[str, None]] = {}
    for record in (record for name in TIMED for record in experiments.load(name)):
        made = record["provenance"]
        found.setdefault(f"`{record['device']}` {made['date_utc'][:10]}", {})[f"`{made['commit'][:8]}`"] = None
    told = (f"{when} ({', '.join(commits)})" for when, commits in found.items())
    return {"timed_at": "; ".join(told)} if found else {}


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
    """Kernels, memories and patterns on the clock, as shares of the time of fused softmax with the same mask."""
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
    """Device -> the times of named arms in words, as shares of those of the fused softmax that sees the same keys, at
    `LENGTH`, where all are there."""
    found: Values = {}
    for device, lines in attention_analysis.curves(records, arms).items():
        share = {
            arm: 100 * row["ratio_alike"][1]
            for arm, rows in lines.items()
            for row in rows
            if row["N"] == LENGTH and row["ratio_alike"]
        }
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
    confidence = Decision.of(baseline.configuration).confidence()
    assert abs(confidence - (1 - 2 * ladder_analysis.LEVEL)) < 1e-9  # one kind of interval on all pages
    parameters = f"{round(baseline.parameters, -3):,}"
    found = _bits("bytes", text) | {
        "bytes_models": str(len(baseline.seeds)),
        "bytes_size": f"{parameters} trained parameters and {steps} steps with learned heads",
        "bytes_margin": margin,
        "lost": str(len(lost) - len(elsewhere)),
        "bytes_kept": f"{100 * _kept(text):.0f} %",
        "confidence": f"{100 * confidence:g} %",
        "frozen_gap": _difference(text, "frozen", "learned"),
        "position_gap": _difference(text, "positional", "learned"),
        "mixed_gain": _difference(text, MIXED, "positional"),
        "draw_gap": _difference(text, "frozen", "frozen Gaussian"),
        "draw_gap_stopped": _difference(text, "stopped", "stopped Gaussian"),
        "scale_large": _difference(text, "frozen 4 x", "frozen"),
        "scale_small": _difference(text, "frozen 1/4 x", "frozen"),
    }
    equal = language.by_arm(experiments.load("bytes-parameters"), device)
    if {"positional", "learned"} <= equal.keys():
        _expect(equal, "learned", positional="worse")
        found["position_gap_steps"] = _difference(equal, "positional", "learned")
    if elsewhere:
        found["lost_long"] = "; ".join(
            f"{_with_runs(pair.unit, pair.mean, pair.interval, pair.runs)} {pair.unit.name} with "
            f"{label.removeprefix('translation, ')}"
            for label, pair in elsewhere.items()
        )
    stages = along_budgets(experiments.load("bytes-budgets"), device, text)
    longest = min((width for width, _ in stages), default=0), max(language.BUDGETS)
    if longest in stages:
        found |= _later(stages[longest], longest[1])
        if language.same_text(records):
            found |= _tables(text, stages[longest], steps, longest[1])
    wide = 2 * baseline.configuration["d"]
    if (wide, 1.0) in stages:
        _expect(stages[wide, 1.0], "learned", positional="worse")
        found |= {"wide": str(wide), "position_gap_wide": _difference(stages[wide, 1.0], "positional", "learned")}
    return found | _seconds(device, text)


Side = tuple[str, int]  # a kind of heads, and the width of its convolution

# The kinds of heads that are compared with learned ones behind a short convolution, and their own convolutions' widths.
LEARNED: Side = (ladder_analysis.RIVAL, CONVOLUTION)
SHIFTED: Side = (ladder_analysis.SHIFTED, 0)
LADDER: dict[str, Side] = {
    "induction": (ladder_analysis.INDUCTION, CONVOLUTION),
    "one": (ladder_analysis.ONE, CONVOLUTION),
    "beside": (ladder_analysis.BESIDE, CONVOLUTION),
    "shifted": SHIFTED,
    "control": ("positional", CONVOLUTION),
}
MISSING = "–"


class Pair(NamedTuple):
    """Two kinds of heads on a text, when the second has passed a budget; the first has then made as many steps or, with
    the time of each kind's step, has trained as long."""

    text: str
    of: Side
    against: Side
    budget: int
    times: Mapping[Side, float] | None = None


def longer_budgets() -> Values:
    """The kinds of `LADDER` at 16 and at 64 times the least budget, beside the strongest rival, positional heads alone
    and tables of counted bytes.

    At the longest budget some runs of learned heads have learnt to copy and some have not. No interval fits two such
    groups, so there each run's difference is printed. Raises AssertionError where the records no longer say what the
    pages say in words.
    """
    runs = [record for name in ladder_analysis.EXPERIMENTS for record in experiments.load(name)]
    records, times = ladder_analysis.standing(runs), _step_times()
    tables = {text: ladder_tables.bits(experiments.load("ladder-tables"), text) for text in ladder.TEXTS}
    late = {
        (text, name): _compared(records, Pair(text, LADDER[name], LEARNED, ladder.LONGEST))
        for text in ladder.TEXTS
        for name in ("induction", "one", "beside", "shifted")
    }
    lead, alone, one, on_novels = (
        _compared(records, Pair(text, LADDER[name], LEARNED, ladder.LONG))
        for text, name in (("python", "induction"), ("python", "control"), ("python", "one"), ("novels", "one"))
    )
    if None in late.values() or not (times and lead and alone and all(tables.values())):
        return {}
    assert lead.interval[1] < 0 < alone.mean  # a lead of retrieval alone, which is gone at the longest budget
    assert all(found is not None and found.mean > 0 for (_, name), found in late.items() if name == "induction")
    sizes = ladder.case("python", ladder_analysis.RIVAL)
    found = {
        "ladder_mb": _megabytes(ladder.LONG),
        "ladder_last_mb": _megabytes(ladder.LONGEST),
        "ladder_size": f"width {sizes['d']}, {sizes['L']} blocks",
        "ladder_induction": _spelt(lead),
        "ladder_control": _spelt(alone),
        "ladder_one": _spelt(one),
        "ladder_one_novels": _spelt(on_novels),
    }
    for name, of in LADDER.items():
        early, last = ([Pair(text, of, LEARNED, n) for text in ladder.TEXTS] for n in (ladder.LONG, ladder.LONGEST))
        timed = early[0]._replace(times=times)
        first, at_equal_time, novels = (_spelt(_compared(records, pair)) for pair in (early[0], timed, early[1]))
        each, novels_each = (_each(records, pair) for pair in last)
        cells = (first, at_equal_time, each, novels, novels_each, f"{times[of]:.2f}")
        found[f"ladder_row_{name}"] = " | ".join(cells)
    return found | _from_shifted(records, runs, times) | _counted(records, tables) | _hypotheses(records)


def _step_times() -> dict[Side, float]:
    """Kind of heads -> how many times as long a step takes on program sources as one of learned heads."""
    timed = experiments.load("ladder-speed")
    device = experiments.judged_device(timed)
    for record in timed:
        if record["device"] == device and record["configuration"]["text"] == "python":
            ratios = language_models.relative(record)
            return {
                (arm, width): speed.quartiles(ratios[arm if width else f"{arm} without convolution"])[1]
                for arm, width in (LEARNED, *LADDER.values())
            }
    return {}


def _sides(records: Sequence[Record], pair: Pair) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Seed -> bits of the test's parts, of either kind."""
    times = pair.times or {pair.of: 1, pair.against: 1}
    spent = pair.budget * times[pair.against] / times[pair.of]
    ours = ladder_analysis.blocks_between(records, (pair.text, *pair.of), spent)
    return ours, ladder_analysis.blocks(records, (pair.text, *pair.against), pair.budget)


def _compared(records: Sequence[Record], pair: Pair) -> Tested | None:
    """What the first kind takes more than the second; None if they have fewer than two seeds in common."""
    return ladder_analysis.tested(*_sides(records, pair), 0.0)


def _each(records: Sequence[Record], pair: Pair) -> str:
    """The same run by run, in the order of the seeds, as text."""
    ours, theirs = _sides(records, pair)
    more = (float((ours[seed] - theirs[seed]).mean()) for seed in sorted(ours.keys() & theirs.keys()))
    return ", ".join(map(BITS_A_BYTE.signed, more)) or MISSING


def _spelt(found: Tested | None) -> str:
    """A difference of bits with its interval and its runs, as text."""
    return MISSING if found is None else _with_runs(BITS_A_BYTE, found.mean, found.interval, len(found.seeds))


def _with_runs(unit: Unit, mean: float, interval: Interval, runs: int) -> str:
    """A difference with its interval and the number of runs, as text: 'mean (low to high, n = runs)'."""
    return f"{unit.spelt(mean, interval)[:-1]}, n\xa0=\xa0{runs})"


def _means(records: Sequence[Record], text: str, budget: int) -> dict[Side, float]:
    """Kind of heads -> its mean bits on a text, of all kinds that have passed the budget."""
    kinds = {ladder_analysis.key(record)[1:] for record in records if record["configuration"]["text"] == text}
    found = {of: ladder_analysis.blocks(records, (text, *of), budget).values() for of in sorted(kinds)}
    return {of: float(np.mean([run.mean() for run in runs])) for of, runs in found.items() if runs}


def _from_shifted(records: Sequence[Record], runs: Sequence[Record], times: Mapping[Side, float]) -> Values:
    """What two kinds take more than learned heads with the KV shift on program sources, at equal steps and equal time.

    Raises AssertionError unless at 16 times the least budget one learned head beside two selective ones takes fewer
    bits than these and no lead of two heads that retrieve untrained shows; and unless, at the longest, the first kind
    has the lowest mean of all at equal steps and not at equal time. `runs` has those that choose rates, too.
    """
    induction = Pair("python", LADDER["induction"], SHIFTED, ladder.LONG)
    steps = induction._replace(of=LADDER["beside"])
    time = steps._replace(times=times)
    named = {"induction": induction, "beside": steps, "beside_time": time}
    last = {name: pair._replace(budget=ladder.LONGEST) for name, pair in named.items()}
    no_lead, *leads, gone = (_compared(records, pair) for pair in (*named.values(), last["beside_time"]))
    assert no_lead is not None
    assert no_lead.interval[0] < 0 < no_lead.interval[1]
    assert all(one is not None and one.interval[1] < 0 for one in leads)
    assert gone is not None
    assert gone.mean > 0
    means = _means(records, "python", ladder.LONGEST)
    assert min(means, key=means.__getitem__) == steps.of
    tuned = {}  # at the seed that chooses rates
    for name, of in (("rival", LEARNED), ("shifted", SHIFTED)):
        curve = ladder_analysis.curve(runs, ("python", *of), "validation")
        assert curve is not None
        tuned[f"ladder_{name}_tuned"] = f"{curve.bits[curve.budgets.index(ladder.LONG)]:.3f}"
    assert tuned["ladder_shifted_tuned"] > tuned["ladder_rival_tuned"]
    return (
        tuned
        | {f"ladder_shifted_{name}": _spelt(_compared(records, pair)) for name, pair in named.items()}
        | {f"ladder_shifted_{name}_each": _each(records, pair) for name, pair in last.items()}
        | {"ladder_induction_each": _each(records, last["induction"]._replace(against=LEARNED))}
    )


def _counted(records: Sequence[Record], tables: Mapping[str, Mapping[int, Sequence[float]]]) -> Values:
    """Tables of the last bytes, counted on as much text as the models read, and their row beside the kinds of heads:
    what the best takes more than learned heads do in the mean.

    Raises AssertionError unless on novels, at the longest budget, the table takes fewer bits than every kind of heads.
    """
    found: Values = {}
    cells = []
    for text, of in tables.items():
        longest, best = [], []
        for budget in (ladder.LONG, ladder.LONGEST):
            bits = of[budget]
            best.append(min(bits))
            longest.append(bits.index(best[-1]) + 1)
            cells.append(BITS_A_BYTE.signed(best[-1] - _means(records, text, budget)[LEARNED]))
        found[f"ladder_table_{text}"] = numbers(longest)
        if text == "novels":
            means = _means(records, text, ladder.LONGEST)
            assert best[-1] < min(means.values())
            found |= {"ladder_novels_counted": f"{best[-1]:.3f}", "ladder_novels_best": f"{min(means.values()):.3f}"}
    return found | {"ladder_row_table": " | ".join([cells[0], MISSING, *cells[1:], MISSING])}


def _hypotheses(records: Sequence[Record]) -> Values:
    """How many hypotheses were written before their runs, and how many of them are shown if all are one family; none
    while one is open."""
    outcomes = [
        one for family in ladder_analysis.FAMILIES for one, _ in ladder_analysis.judged(records, family).values()
    ]
    if any(found is None for found in outcomes):
        return {}
    shown = holm([found.chance for found in outcomes if found is not None], level=ladder_analysis.LEVEL)
    return {"ladder_hypotheses": str(len(outcomes)), "ladder_shown": str(sum(shown))}


def _megabytes(budget: int) -> str:
    """How many million bytes the ladder's models have read at a budget."""
    sizes = ladder.case("python", ladder_analysis.RIVAL)
    return f"{budget * sizes['base'] * sizes['B'] * sizes['N'] / 1e6:.1f} MB"


def _later(runs: Mapping[str, Runs], times: float) -> Values:
    """The same models at the longest budget."""
    _expect(runs, "learned", frozen="worse", positional="equivalent")
    return _bits("later", runs) | {
        "later_times": f"{times:g}",
        "later_kept": f"{100 * _kept(runs):.0f} %",
        "later_frozen_gap": _difference(runs, "frozen", "learned"),
        "later_position_gap": _difference(runs, "positional", "learned"),
        "later_mixed_gain": _difference(runs, MIXED, "positional"),
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
    "positional": "positional",
    "mixed": MIXED,
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
    """What an arm takes more than another, with Student's interval and the number of runs."""
    ours, theirs = runs[arm], runs[other]
    assert ours.seeds == theirs.seeds
    confidence = Decision.of(ours.configuration).confidence()
    found = student_difference(ours.values["bits"], theirs.values["bits"], confidence=confidence)
    return _with_runs(BITS_A_BYTE, *found, len(ours.seeds))


def _kept(runs: Mapping[str, Runs]) -> float:
    """Of the lead of learned heads over stopped ones, the share that frozen ones have."""
    learned, frozen, stopped = (runs[arm].mean("bits") for arm in ("learned", "frozen", "stopped"))
    return float((stopped - frozen) / (stopped - learned))


TOPICS = (
    freezing,
    printed,
    measured,
    timed_at,
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
