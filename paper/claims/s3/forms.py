"""S3, section 3, improvements 1 and 2: gates, heads, and updates of higher rank."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from ortho.attention.recurrent.delta import delta_rule, delta_rule_reference
from ortho.attention.recurrent.delta_product import delta_product, delta_product_reference
from ortho.cost import layer
from ortho.theory import gated_forms, one_shot
from ortho.theory.stability import unit_keys
from ortho.theory.state_tracking import counter_operands, read_counts
from paper import experiments
from paper.claims.figures import Interval, outward
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, counted, holds, improves, region, untestable
from paper.claims.verdicts import Finding
from paper.experiments.learning import rows as learning_rows
from paper.experiments.learning import study as learning
from paper.experiments.learning.rows import Row
from paper.experiments.statistics import gain

CHAPTER = "13-gates-products-losses"

LENGTH, WIDTH = 100, 8
# Relative, in float64: a hundred steps that enlarge no error, with sums of eight terms each, round to about 1e-14.
EXACT = 1e-12
STRENGTH = 1.5
NEAR = 0.999  # the cosine of keys that are nearly parallel
MODULUS, NUMBERS = 5, 300
BEYOND = ("tokens 17 to 32", "tokens 33 to 64", "tokens 65 to 128")  # the lengths of training, which end at 16
LEVEL = 0.05  # the probability that chance shows a gain in any of the settings of an experiment


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gated_operands(channels: int | None = None) -> dict[str, Any]:
    """q, k, v and the source's two gates, with gamma in (0.5, 1) and eta in (0, 2 gamma); unit keys."""
    g = generator()
    q, v = torch.randn(2, LENGTH, WIDTH, generator=g, dtype=torch.float64)
    gamma = 0.5 + 0.5 * torch.rand(LENGTH, generator=g, dtype=torch.float64)
    eta = 2 * gamma * torch.rand(LENGTH, generator=g, dtype=torch.float64)
    if channels:
        gamma = 0.5 + 0.5 * torch.rand(LENGTH, channels, generator=g, dtype=torch.float64)
    return {"q": q, "k": unit_keys(LENGTH, WIDTH, generator=g), "v": v, "gamma": gamma, "eta": eta}


def unlike_gated_delta_net(attend: Callable[..., Any]) -> float:
    """The relative difference of a form of Gated DeltaNet, with mapped operands, and the source's recurrence."""
    x = gated_operands()
    printed = gated_forms.gated_recurrence(**x)
    mapped = gated_forms.as_erasing(x["v"], x["gamma"], x["eta"])._asdict()
    found = attend(x["q"], x["k"], is_causal=True, normalise=False, **mapped)
    return float((found - printed).norm() / printed.norm())


def bend(*, channels: int | None = None, of_memory: bool = False) -> float:
    """How far a step of the source's form is from affine in the memory; with a gate for each channel, or with one that
    is made of the memory."""
    x = gated_operands(channels)
    k, v, gamma, eta = (x[name][0] for name in ("k", "v", "gamma", "eta"))

    def step(S: Tensor) -> Tensor:
        kept = S.mean().sigmoid() if of_memory else gamma
        return gated_forms.gated_step(S, k, v, kept, eta)

    return gated_forms.affinity_error(step, *torch.randn(2, WIDTH, WIDTH, generator=generator(1), dtype=torch.float64))


@evidence("S3.3b", chapter=CHAPTER)
def gated() -> Finding:
    beyond = (0.1, 1.0)
    reach = "contracts" if gated_forms.contracts(*beyond) else "does not contract"
    mapped = "is" if gated_forms.maps(*beyond) else "is not"
    return all_of(
        {
            "recurrence": holds(
                "Gated DeltaNet's, of $a = \\gamma$, $\\beta = \\eta / \\gamma$ and values $\\gamma v$",
                unlike_gated_delta_net(delta_rule_reference),
                EXACT,
            ),
            "in chunks": holds("what the recurrence gives", unlike_gated_delta_net(delta_rule), EXACT),
            "a step, one gate": holds("affine in the memory, so that steps compose", bend(), EXACT),
            "a step, a gate a channel": holds("the same", bend(channels=WIDTH), EXACT),
        }
    ).noting(
        f"A gate that is made of the memory makes a step that is not affine, by {100 * bend(of_memory=True):.1f} % "
        f"half way between two memories. A step with $\\gamma = {beyond[0]:g}$, $\\eta = {beyond[1]:g}$ and a unit key "
        f"{reach}, and {mapped} among Gated DeltaNet's"
    )


def surplus_rank(keys: int = 2) -> float:
    """Of what one token of DeltaProduct changes in a memory, the singular value after the n-th, over the largest."""
    g = generator()
    S = torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64)
    k, v = torch.randn(2, keys, WIDTH, generator=g, dtype=torch.float64)
    _, (after,) = delta_product_reference(
        k[:1], k[:1], v[:1], more_keys=k[None, 1:], more_values=v[None, 1:], initial_state=(S,), return_state=True
    )
    values = torch.linalg.svdvals(after - S)
    return float(values[keys] / values[0])


def norms() -> dict[str, float]:
    """The spectral norm of what a token with two unit keys multiplies the memory by, at the strength 1.5."""
    beta = torch.full((2,), STRENGTH, dtype=torch.float64)
    return {
        f"{how}, keys with the cosine {cosine:g}": round(
            float(torch.linalg.matrix_norm(one_shot.transition(update, one_shot.pair(cosine), beta), 2)), 2
        )
        for update, how in (("in turn", "one after the other"), ("at once", "from one old memory"))
        for cosine in (0, NEAR)
    }


def miscounted() -> int:
    """How many running sums modulo 5 two reflections a token get wrong."""
    numbers = torch.randint(MODULUS, (NUMBERS,), generator=generator())
    o = delta_product(**counter_operands(numbers, MODULUS), normalise=False, is_causal=True)
    assert isinstance(o, Tensor)
    return int((read_counts(o, MODULUS)[1:] != numbers.cumsum(0) % MODULUS).sum())


def gained(experiment: str, better: str, worse: str, tests: Collection[str]) -> dict[str, Interval]:
    """By test and device: how many more answers in a hundred are right in an arm's runs than in the other's.

    The intervals, of the exact rank test, hold all at once but for a probability `LEVEL` at either end, which five
    seeds can reach in up to 12 settings. Arms with fewer runs than `learning.SEEDS` are left out.
    """
    records = experiments.load(experiment)
    pairs: dict[str, tuple[Row, Row]] = {}
    for device in experiments.by_device(records):
        found = learning_rows.results(records, device)
        for test in tests:
            rows = [found[arm][test] for arm in (better, worse) if test in found.get(arm, {})]
            if len(rows) == 2 and all(len(row["seeds"]) >= len(learning.SEEDS) for row in rows):
                pairs[f"{test} on {device}"] = rows[0], rows[1]
    gains = {}
    for label, (one, other) in pairs.items():
        low, high = gain(one["correct"], other["correct"], LEVEL / len(pairs))
        gains[label] = outward((100 * low, 100 * high))
    return gains


def more_right(statement: str, experiment: str, better: str, worse: str, tests: Collection[str]) -> Finding:
    """What the records of an experiment say of an arm's gain over another."""
    gains = gained(experiment, better, worse, tests)
    if not gains:
        lack = f"the experiment {experiment!r} has no records of {len(learning.SEEDS)} runs each of"
        return untestable(statement, {f"{better!r} and {worse!r}": None}, lack=lack)
    return improves(statement, gains, unit=" %")


@evidence("S3.3c", chapter=CHAPTER)
def higher_rank() -> Finding:
    parts = {
        "DeltaProduct": holds("what a token adds has the rank of its keys, 2", surplus_rank(), EXACT),
        f"stable, $\\beta = {STRENGTH:g}$: norm of what the memory is multiplied by": region((0, 1), norms()),
        f"running sums modulo {MODULUS} that two keys a token get wrong, of {NUMBERS}": counted(
            {"": 0}, {"": miscounted()}
        ),
        "trained on permutations of three things": more_right(
            "right beyond the lengths of training more often than with one key",
            "permutations",
            "delta-product",
            "delta, beta to 2",
            BEYOND,
        ),
    }
    one, two = (layer(1, 4096, 1024, 16, attention=name, causal=True).forward for name in ("delta", "delta-product"))
    heads = [layer(1, 1, 1024, H, attention="delta").state_bytes for H in (1, 16)]
    return all_of(parts).noting(
        f"A layer of 16 heads, $d = 1,024$, takes {two / one:.2f} times the FLOPs with two keys a token. Heads divide "
        f"the memory: 16 of them hold {heads[1] / heads[0]:.4g} of the numbers that one holds"
    )
