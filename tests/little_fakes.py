"""Made-up records of models that had little to learn from."""

from paper.claims.evidence import low_resource as s0
from paper.experiments.learning import language, translating

CPU = "cpu-abacus"
SEEDS = (1, 2, 3, 4, 5)
ALL = 900_000  # bytes of the whole made-up text
LEVEL = [0.0, 0.1, 0.2, 0.3, 0.4]  # what a seed adds, more than arms differ


def text(arm, seed, bits, *, seen=1.0, limit=50_000, dropout=0.0, device=CPU, matched="flop"):
    """A record of a language model; the validation part's last look is what the test says, the one before is lower."""
    nats, level = bits / s0.BITS, LEVEL[seed - 1] / s0.BITS
    looks = [{"step": 1, "loss_nats": nats + level - 0.1}, {"step": 2, "loss_nats": nats + level}]
    return {
        "experiment": "made-up",  # of which no rate was chosen
        "device": device,
        "configuration": language.case(arm, seed, 0.01, limit=limit, dropout=dropout, matched=matched),
        "repetitions": {"test": {"loss_nats": [nats + level]}},
        "facts": {
            "validation": looks,
            "loss": [5.0, seen / s0.BITS + level],
            "parameters": 10,
            "train_s": 1.0,
            "text": {"train": {"bytes": limit or ALL}},
        },
    }


def pairs(task, arm, number, seed, score, *, gap=0.5, device=CPU):
    """A record of translation, whose test takes so much more than what was seen, in nats."""
    metric = translating.METRICS[task]
    test = {"translation": "test", "transduction": "like training"}[task]
    return {
        "experiment": "made-up",  # of which no rate was chosen
        "device": device,
        "configuration": translating.case(task, arm, seed, 0.01, pairs=number),
        "repetitions": {
            test: {metric: [score + LEVEL[seed - 1] / 4], "loss_nats": [2.0 + gap], "correct_fraction": [0.5]}
        },
        "facts": {
            "validation": [{"step": 1, "loss_nats": 2.0}],
            "seen": {"loss_nats": 2.0},
            "parameters": len(arm),
            "train_s": 1.0,
            "source_tokens": 10.0,
            "target_tokens": 10.0,
            "vocab_size": 100,
        },
    }


def text_runs(arm, bits, **kwargs):
    return [text(arm, seed, bits, **kwargs) for seed in SEEDS]


def pair_runs(task, arm, number, score, **kwargs):
    return [pairs(task, arm, number, seed, score, **kwargs) for seed in SEEDS]


def real(scores, number=1000, **kwargs):
    return [one for arm, score in scores.items() for one in pair_runs("translation", arm, number, score, **kwargs)]


def made_up(scores, number=500, **kwargs):
    return [one for arm, score in scores.items() for one in pair_runs("transduction", arm, number, score, **kwargs)]


def keep(monkeypatch, experiments):
    """A function by which experiments have what it is given by name, and nothing of the others."""

    def these(**found):
        records = {name.replace("_", "-"): rows for name, rows in found.items()}
        monkeypatch.setattr(experiments, "load", lambda name: records.get(name, []))

    these()
    return these
