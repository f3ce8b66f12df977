"""A verdict rests on what its cell computes: it changes if the thing that the claim is about is broken.

A `Perturbation` breaks functions, closed forms, modules or records, never the rule, and says which verdict must follow;
there is one for each rule, and for each experiment that a claim reads. The chapter's cell that judges the claim runs
with what is broken, after those cells that define what it reads. A cell that always came to the same finding would keep
its verdict, and so fail.

For a refuted claim, what refutes it is changed towards the world that the source describes. Contradictions of the
source's own table remain, and so do other parts that hold only in some settings or are not decided.
"""

import ast
import json
import symtable
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

import paper.claims.shared
from ortho.attention.linear.linear_attention import kernel_weights
from ortho.projections import LearnedProjection
from paper.claims import Verdict, ledger
from paper.claims.gathered import ROOT

CONFIRMED, CONDITIONAL, REFUTED = Verdict.CONFIRMED, Verdict.CONDITIONAL, Verdict.REFUTED
SHARED = "paper.claims.shared"
FIXED = "7 fixed + 1 learned"
Change = Callable[[Any], Any]

# Evidence modules are imported anew; checkers take their classes for the old ones, which have the same names.
pytestmark = pytest.mark.unchecked


@dataclass(frozen=True)
class Perturbation:
    """The verdict with what is broken, and the changes that break it.

    `changes` maps a dotted name, with a key in brackets for an entry of a dictionary
    ('ortho.attention.MECHANISMS[gla]'), to a function that makes the broken thing from the sound one. Names of the
    library are changed before `paper.claims.shared` is imported anew, so that its modules find the broken ones. Names
    in these modules are changed afterwards, and functions of cells (without a dot) as soon as they are defined.
    """

    to: Verdict
    changes: Mapping[str, Change]


def constantly(value: Any) -> Change:
    """Replaces anything by this value."""
    return lambda _: value


def giving(change: Change) -> Change:
    """Replaces a function by one that changes what the sound one returns."""
    return lambda sound: lambda *args, **kwargs: change(sound(*args, **kwargs))


def costing(**changes: Callable[..., Any]) -> Change:
    """Replaces a closed form by one with other costs: each field is computed from the sound cost and the arguments."""

    def broken(sound: Any) -> Any:
        def cost(*sizes: Any, **options: Any) -> Any:
            found = sound(*sizes, **options)
            return replace(found, **{field: change(found, *sizes) for field, change in changes.items()})

        return cost

    return broken


# ---------------------------------------------------------------------------------------- costs and layers that differ


# Projections that are computed for each pair of tokens, in place of each token.
PER_PAIR = {
    "ortho.cost.layers.projection_cost": costing(
        forward=lambda cost, name, B, N, *_: N * cost.forward, backward=lambda cost, name, B, N, *_: N * cost.backward
    )
}
# A layer that maps tokens by W_V before it averages them, whatever order is asked for.
VALUES_FIRST = {f"{SHARED}.frozen_layer.ValuesLast": constantly(lambda layer: layer)}
# A Synthesizer that has W_Q and W_K as well.
PROJECTING_SYNTHESIZER = {
    "ortho.cost.synthesizer": costing(
        forward=lambda cost, B, N, d, H: cost.forward + 4 * N * d**2, trained=lambda cost, B, N, d, H: 4 * d**2
    )
}
# Frozen queries and keys that are trained after all, in the layer and in its closed form.
NOTHING_FROZEN = {
    "ortho.projections.PROJECTIONS[frozen]": constantly(LearnedProjection),
    "ortho.cost.layers.projection_cost": lambda sound: lambda _, *sizes, **options: sound("learned", *sizes, **options),
}
BIASED = {
    "ortho.layers.multihead.MultiheadAttention": lambda sound: lambda *sizes, **kind: sound(*sizes, bias=True, **kind)
}
UNIFORM = {
    "ortho.attention.positional.positional_attention.positional_attention": giving(
        lambda weights: torch.full_like(weights, 1 / weights.shape[-1])
    )
}


def undivided(q, k, v, *, feature_map, **_):
    """Linear attention whose weights are not divided by their sum."""
    return kernel_weights(feature_map, q, k) @ v


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


def times(arm, like, **factors):
    """Sets an arm's times to those of another, times a factor for each phase."""

    def edit(record):
        arms = record["repetitions"]
        for phase, factor in factors.items():
            for clock in {f"{phase}_s", f"{phase}_cpu_s"} & set(arms[like]):  # GPUs' have no time of a processor
                arms[arm][clock] = [factor * seconds for seconds in arms[like][clock]]

    return edit


def timed(factor, *arms):
    """Multiplies all times of these arms by a factor."""

    def edit(record):
        for phases in [record["repetitions"][arm] for arm in arms if arm in record["repetitions"]]:
            phases |= {phase: [factor * value for value in values] for phase, values in phases.items()}

    return edit


def errors(factor, *arms):
    """Multiplies what runs of these arms get wrong, in tests and on the validation part."""

    def scaled(quantity, value):
        if isinstance(value, list):
            return [scaled(quantity, one) for one in value]
        if quantity.endswith("_fraction"):  # of right answers
            return max(0.0, 1 - factor * (1 - value))
        return factor * value if quantity.endswith("_nats") else value

    def edit(record):
        if record["configuration"]["arm"] in arms:
            for test in (*record["repetitions"].values(), *record["facts"]["validation"]):
                test |= {quantity: scaled(quantity, value) for quantity, value in test.items()}

    return edit


def answers(factor, *arms):
    """Multiplies the right answers of these arms by a factor."""

    def edit(record):
        for found in record["repetitions"].values() if record["configuration"]["arm"] in arms else ():
            found["correct_fraction"] = [factor * value for value in found["correct_fraction"]]

    return edit


def translated_by_halves(record):
    """Half of the score of fixed heads, and of their n-grams that are right."""
    if record["configuration"]["arm"] == FIXED:
        for found in record["repetitions"].values():
            for name in [name for name in found if name == "bleu_fraction" or name.startswith("right_")]:
                found[name] = [value / 2 for value in found[name]]


def on_a_gpu(record):
    """As from a GPU on which materialised scores take four times as long as fused ones; these take 70 % less memory."""
    record["device"] = "gpu-made-up"
    for way in ("", " causal") if "materialised" in record["repetitions"] else ():
        times(f"materialised{way}", f"sdpa{way}", forward=4, backward=4)(record)
        record["facts"][f"materialised{way}"]["peak_bytes"] = record["facts"]["sdpa"]["peak_bytes"] / 0.3


def slow_blocks_on_a_gpu(record):
    """As from a GPU on which each pattern is one kernel, `window flex causal`, and blocks take ten times as long."""
    record["device"] = "gpu-made-up"
    timed(10, "block-sparse", "block-sparse causal")(record)
    if record["configuration"]["arms"] == "patterns":
        record["configuration"]["arms"] = "compiled patterns"
        names = {arm: arm.split() for arm in record["repetitions"]}
        kernels = {
            arm: arm if name == "sdpa" else " ".join([name, "flex", *way]) for arm, (name, *way) in names.items()
        }
        for kind in ("repetitions", "facts"):
            record[kind] = {kernels.get(arm, arm): measured for arm, measured in record[kind].items()}


def enlarged(record):
    """Gradients that each block of learned heads enlarges tenfold."""
    stages = record["facts"]["gradients"]
    for stage, sizes in stages.items() if record["configuration"]["arm"] == "learned" else ():
        stages[stage] = [10**i * size for i, size in enumerate(sizes)]


def in_the_standard_scenario(record):
    """As many pairs as the source's standard scenario has, and the same scores."""
    record["configuration"]["pairs"] *= 290


def explained(record):
    """The weights of encoders' heads depend on positions alone, and all heads can be removed."""
    for evaluation in record["facts"].get("validation", ()):
        for head in [head for layer in evaluation.get("heads", ()) for head in layer]:
            head["absolute"] = 1.0
    for figures in record["repetitions"].values():
        figures |= {"faultless_fraction": [1.0]}


# ------------------------------------------------------------------------------------------------------------ the table

PERTURBATIONS = {
    "S0.1.1a": Perturbation(REFUTED, PER_PAIR),
    "S0.1.3a": Perturbation(REFUTED, BIASED),
    "S0.2.3c": Perturbation(REFUTED, VALUES_FIRST),
    "S0.2.3e": Perturbation(REFUTED, NOTHING_FROZEN),
    "S0.3.2e": Perturbation(CONFIRMED, PROJECTING_SYNTHESIZER),
    "S0.4.1b": Perturbation(
        CONDITIONAL, records(times("frozen", "learned", backward=0.5, optimiser=0.5), "training-step")
    ),
    # An optimiser that takes no time leaves what the products allow.
    "S0.4.1c": Perturbation(REFUTED, {f"{SHARED}.printed_speed_ups.UPDATE_BYTES": constantly(0)}),
    "S0.4.2a": Perturbation(REFUTED, NOTHING_FROZEN),
    "S0.4.3b": Perturbation(CONFIRMED, records(times("frozen", "learned", forward=0.97), "inference")),
    "S0.5.1a": Perturbation(REFUTED, {"overfitted": constantly(lambda: {50_000: 0.5})}),  # by what the tests then show
    "S0.5.1b": Perturbation(CONFIRMED, records(errors(0.5, "QK redrawn"), "fine-tuning")),
    "S0.5.2c": Perturbation(REFUTED, records(errors(4, "frozen"), "images")),
    "S0.5.2d": Perturbation(CONFIRMED, records(errors(0.25, "frozen", "stopped"))),
    "S1.2.1c": Perturbation(CONFIRMED, records(on_a_gpu, "flash-speed")),
    "S2.1.1b": Perturbation(REFUTED, UNIFORM),
    "S2.1.2a": Perturbation(CONFIRMED, records(explained, "translation-budgets", "pruning")),
    "S2.1.3d": Perturbation(CONFIRMED, records(in_the_standard_scenario, "translation")),
    "S2.1.3b": Perturbation(REFUTED, records(translated_by_halves, "translation", "translation-budgets")),
    "S2.2.1c": Perturbation(
        CONFIRMED, {"ortho.attention.linear.linear_attention.linear_attention_reference": constantly(undivided)}
    ),
    "S2.2.3d": Perturbation(REFUTED, records(slow_blocks_on_a_gpu, "pattern-speed")),
    "S2.4.1a": Perturbation(REFUTED, records(errors(0.5, "learned"), "bytes")),
    "S2.4.3b": Perturbation(CONFIRMED, records(enlarged, "depth")),
    "S3.3h": Perturbation(CONFIRMED, records(answers(0.5, "delta", "delta, beta to 2"))),
    "S3.3k": Perturbation(REFUTED, records(on_a_gpu, "memory-speed")),
    "S4.2c": Perturbation(REFUTED, records(answers(0.05, "linear", "FAVOR+"), "images")),
    "S4.3a": Perturbation(REFUTED, records(timed(0.01, "linear recurrent"), "attention-speed")),
}


@pytest.mark.parametrize("claim_id", PERTURBATIONS)
def test_a_broken_subject_changes_the_verdict(claim_id, monkeypatch):
    entry, changes = ledger()[claim_id], PERTURBATIONS[claim_id].changes
    assert PERTURBATIONS[claim_id].to != entry.verdict
    cells = json.loads((ROOT / "notebooks" / f"{entry.chapter}.ipynb").read_text(encoding="utf-8"))["cells"]
    code = {cell["id"]: "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"}
    sources = list(code.values())[: list(code).index(entry.code) + 1]
    with monkeypatch.context() as patch:
        broken = judged(claim_id, sources, changes, patch)
    assert broken.verdict == PERTURBATIONS[claim_id].to, broken.ours


def judged(claim_id, sources, changes, monkeypatch):
    """The claim, judged after the changes by the last of a chapter's cells; `monkeypatch` undoes everything."""
    for node in ast.walk(ast.parse("\n".join(sources))):
        if isinstance(node, ast.Import | ast.ImportFrom):  # nothing must be imported for the first time, and so for
            exec(compile(ast.Module([node], []), claim_id, "exec"), {})  # good, while something is broken
    # Without the checks of annotations, which would need each module to be compiled again.
    plain = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("jaxtyping")]
    monkeypatch.setattr(sys, "meta_path", plain)
    for name in [name for name in sys.modules if name == SHARED or name.startswith(f"{SHARED}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(paper.claims, "shared", paper.claims.shared)  # the new import replaces this attribute
    for target in sorted((target for target in changes if "." in target), key=lambda target: target.startswith(SHARED)):
        change_in_place(target, changes[target], monkeypatch)
    world: dict[str, Any] = {"__name__": "chapter"}
    shown = None
    for statement in [statement for source in needed(sources) for statement in ast.parse(source).body]:
        # `optimize` leaves out assertions, which hold of what is sound.
        if isinstance(statement, ast.Expr):
            shown = eval(compile(ast.Expression(statement.value), claim_id, "eval", optimize=1), world)
        else:
            exec(compile(ast.Module([statement], []), claim_id, "exec", optimize=1), world)
            world |= {name: changes[name](world[name]) for name in changes.keys() & {getattr(statement, "name", "")}}
    (entry,) = (entry for entry in shown.entries if entry.id == claim_id)
    return entry


def needed(sources):
    """The last of these cells, after those that define what it reads."""
    *before, last = sources
    found, reads = [last], names(last)[1]
    for source in reversed(before):
        made, read = names(source)
        if made & reads:
            found.insert(0, source)
            reads = reads - made | read
    return found


def names(source):
    """The names that a cell defines, and those that it takes from cells before it, in its functions too."""

    def read(table):
        own = {one.get_name() for one in table.get_symbols() if one.is_global() and one.is_referenced()}
        return own.union(*map(read, table.get_children()))

    cell = symtable.symtable(source, "cell", "exec")
    made = {one.get_name() for one in cell.get_symbols() if one.is_assigned() or one.is_imported()}
    referenced = {one.get_name() for one in cell.get_symbols() if one.is_referenced()}
    return made, referenced.union(*map(read, cell.get_children())) - made


def change_in_place(target, change, monkeypatch):
    path, _, item = target.removesuffix("]").partition("[")
    owner, _, name = path.rpartition(".")
    import_module(owner) if owner.startswith(SHARED) else None
    if item:
        place = resolve_name(path)
        monkeypatch.setitem(place, item, change(place[item]))
    else:
        place = resolve_name(owner)
        monkeypatch.setattr(place, name, change(getattr(place, name)))
