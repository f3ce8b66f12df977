"""Made-up records of trained models, as far as evidence reads them: a level for each arm, shifted alike by each
seed."""

from math import log

from paper.experiments.learning import images, language, translation_budgets

CPU = "cpu-abacus"
SEEDS = language.SEEDS
LEVEL = 0.1  # added by each seed: more than arms differ, so that only pairs of runs show a difference
ALL = 900_000  # bytes of the whole made-up text
BIT = log(2)  # nats


def record(case, tests, device=CPU, **facts):
    """One run; `tests` has the numbers of each test."""
    tests = {test: {quantity: [value] for quantity, value in found.items()} for test, found in tests.items()}
    facts = {"loss": [1.0], "validation": [], "parameters": 10, "train_s": 1.0, **facts}
    # An experiment for which no learning rate was chosen.
    made = {"experiment": "made-up", "device": device, "configuration": case, "provenance": {}}
    return made | {"repetitions": tests, "facts": facts}


def text(arm, bits, *, gap=0.5, seeds=SEEDS, device=CPU, **choice):
    """Runs of a byte model with a loss of `bits` a byte on other text, and a loss lower by `gap` on its own text: one
    number, or one for each seed. The last validation loss but one is lower by 0.1 nats."""
    records = []
    for i, seed in enumerate(seeds):
        less = gap[i] if isinstance(gap, list) else gap
        nats = (bits + LEVEL * (seed - 1)) * BIT
        looks = [{"step": 1, "loss_nats": nats - 0.1}, {"step": 2, "loss_nats": nats}]
        case = language.case(arm, seed, 0.01, **choice)
        size = {"train": {"bytes": case["limit"] or ALL}}
        facts = {"validation": looks, "loss": [9.0, nats - less * BIT], "text": size}
        records.append(record(case, {"test": {"loss_nats": nats, "correct_fraction": 0.5}}, device, **facts))
    return records


def digits(arm, share, *, seeds=images.SEEDS, device=CPU):
    """Runs of an image model that names a share `share` of the digits correctly."""
    return [
        record(
            images.case(arm, seed, 0.01),
            {"test": {"loss_nats": 1.0, "correct_fraction": share - LEVEL / 100 * seed}},
            device,
        )
        for seed in seeds
    ]


def along_budgets(
    arm, losses, right, *, pairs=5000, seeds=translation_budgets.SEEDS, device=CPU, positional=((0.1,), (0.1,))
):
    """Runs of a translation along budgets; at each, `right` of 20 n-grams of each order are right in each of two parts
    of the test. Pairs seen take 2 nats a token, those of the test half a nat more. `positional` says, layer by layer,
    how much of the variation of each head's weights positions explain."""
    counts = {name: [20.0, 20.0] for name in translation_budgets.COUNTS}
    correct = [name for name in counts if name.startswith("right")]
    told = [counts | dict.fromkeys(correct, [float(n)] * 2) for n in right]
    heads = [
        [{"pattern": "start", "absolute": share, "pattern_share": share} for share in layer] for layer in positional
    ]
    looks = [
        {"budget": 2**i, "step": 2**i, "loss_nats": loss, "test_nats": 2.5, "seen_nats": 2.0, "heads": heads}
        for i, loss in enumerate(losses)
    ]
    return [
        {
            "experiment": "translation-budgets",
            "device": device,
            "configuration": translation_budgets.case(arm, seed, 0.01, pairs=pairs, budget=looks[-1]["budget"]),
            "provenance": {"device_name": "X"},
            "repetitions": {f"{2**i} x": counts for i, counts in enumerate(told)},
            "facts": {"validation": looks, "parameters": len(arm)},
        }
        for seed in seeds
    ]
