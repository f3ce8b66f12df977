"""S3, section 3, improvements 1, 2 and 5: gates, heads, updates of higher rank; and losses beyond least squares.

The source names Huber's loss and a contrastive one, but neither their constants nor a task. Here delta is about
three standard deviations of one number of the noise on the values. Steps and temperatures are those that do best on
other draws, without outliers.
"""

from collections.abc import Callable, Collection
from functools import cache
from itertools import product
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ortho.attention.recurrent.delta import delta_rule, delta_rule_reference
from ortho.attention.recurrent.delta_product import delta_product, delta_product_reference
from ortho.attention.recurrent.ttt import MINI_BATCH
from ortho.attention.recurrent.ttt_losses import Contrastive, Huber, Squared, TokenLoss
from ortho.attention.recurrent.vector_gated import vector_gated_delta
from ortho.attention.scores import unit
from ortho.cost import layer
from ortho.theory import transitions
from ortho.theory.transitions import unit_keys
from paper import experiments
from paper.claims.figures import Interval, outward
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, contradiction, counted, holds, improves, region, untestable
from paper.claims.shared.common import EXACT_STEPS, mean_interval, normal, relative_error, seeded, without_records
from paper.claims.verdicts import Finding
from paper.experiments.learning import analysis
from paper.experiments.learning import study as learning
from paper.experiments.learning.analysis import Row
from paper.experiments.statistics import gain
from paper.tasks.flip_flop import IGNORED, RANGES, TRAINED
from paper.theory import robustness
from paper.theory.delta_memory import counter_operands, read_counts

CHAPTER = "13-gates-products-losses"

LENGTH, WIDTH = 100, 8
STRENGTH = 1.5
NEAR = 0.999  # the cosine of keys that are nearly parallel
MODULUS, NUMBERS = 5, 300
BEYOND = ("tokens 17 to 32", "tokens 33 to 64", "tokens 65 to 128")  # the lengths of training, which end at 16
LONGER = ("tokens 41 to 80", "tokens 81 to 160", "tokens 161 to 256")  # of `parity`, which ends at 40
OVERWRITTEN = tuple(
    f"{word}, tokens {first} to {last}" for word in IGNORED for first, last in RANGES if first > TRAINED
)
LEVEL = 0.05  # the probability that chance shows a gain in any of the settings of an experiment


def gated_operands(channels: int | None = None) -> dict[str, Any]:
    """q, k, v and the source's two gates, with gamma in (0.5, 1) and eta in (0, 2 gamma); unit keys."""
    g = seeded()
    q, v = torch.randn(2, LENGTH, WIDTH, generator=g, dtype=torch.float64)
    gamma = 0.5 + 0.5 * torch.rand(LENGTH, generator=g, dtype=torch.float64)
    eta = 2 * gamma * torch.rand(LENGTH, generator=g, dtype=torch.float64)
    if channels:
        gamma = 0.5 + 0.5 * torch.rand(LENGTH, channels, generator=g, dtype=torch.float64)
    return {"q": q, "k": unit_keys(LENGTH, WIDTH, generator=g), "v": v, "gamma": gamma, "eta": eta}


def unlike_gated_delta_net(attend: Callable[..., Any]) -> float:
    """The relative difference between a form of Gated DeltaNet, with mapped operands, and the source's recurrence."""
    x = gated_operands()
    mapped = transitions.as_erasing(x["v"], x["gamma"], x["eta"])._asdict()
    found = attend(x["q"], x["k"], is_causal=True, qk_l2norm=False, **mapped)
    return relative_error(found, transitions.gated_recurrence(**x))


def unlike_vector_gates(attend: Callable[..., Any]) -> float:
    """The relative difference between a form with a forgetting gate per channel and the source's recurrence with it.

    Keys are divided by their lengths, and eta is 1 at most.
    """
    x = gated_operands(WIDTH)
    x["eta"] = x["eta"] / 2
    found = attend(x["q"], x["k"], x["v"], is_causal=True, beta=x["eta"], log_decay=x["gamma"].log())
    return relative_error(found, transitions.gated_recurrence(**x | {name: unit(x[name]) for name in "qk"}))


def bend(*, channels: int | None = None, gate: Callable[[Tensor], Tensor] | None = None) -> float:
    """How far a step of the source's form is from affine in the memory: with one gate, with a gate for each channel, or
    with one that is made from the memory's mean."""
    x = gated_operands(channels)
    k, v, gamma, eta = (x[name][0] for name in ("k", "v", "gamma", "eta"))

    def step(S: Tensor) -> Tensor:
        kept = gate(S.mean()) if gate else gamma
        return transitions.gated_step(S, k, v, kept, eta)

    return transitions.affinity_error(step, *torch.randn(2, WIDTH, WIDTH, generator=seeded(1), dtype=torch.float64))


@evidence("S3.3b", chapter=CHAPTER)
def gated() -> Finding:
    beyond = (0.1, 1.0)
    reach = "contracts" if transitions.contracts(*beyond) else "does not contract"
    mapped = "is" if transitions.maps(*beyond) else "is not"
    parts = {
        "recurrence": holds(
            "Gated DeltaNet's, of $a = \\gamma$, $\\beta = \\eta / \\gamma$ and values $\\gamma v$",
            unlike_gated_delta_net(delta_rule_reference),
            EXACT_STEPS,
        ),
        "in chunks": holds("what the recurrence gives", unlike_gated_delta_net(delta_rule), EXACT_STEPS),
        "in chunks, a gate a channel": holds(
            "what the recurrence gives", unlike_vector_gates(vector_gated_delta), EXACT_STEPS
        ),
        "a step, one gate": holds("affine in the memory, so that steps compose", bend(), EXACT_STEPS),
        "a step, a gate a channel": holds("the same", bend(channels=WIDTH), EXACT_STEPS),
        "half way between two memories, distance from affine": contradiction(
            ("computed from the current input or even the current state", round(100 * bend(gate=torch.sigmoid), 1)),
            ("only on the current input", (0, 100 * EXACT_STEPS)),
            unit=" %",
        ),
    }
    return all_of(parts).noting(
        f"A gate that is linear in the memory makes a step that is quadratic in it, "
        f"{100 * bend(gate=torch.clone):.1f} % from affine. A step with $\\gamma = {beyond[0]:g}$, "
        f"$\\eta = {beyond[1]:g}$ and a unit key {reach}, and {mapped} among Gated DeltaNet's"
    )


# Where answers may depend on what is to be forgotten, or on all that came before: experiment, the two arms, tests.
FORGETTING = (
    ("flip-flop", "gated-delta", "delta", OVERWRITTEN),
    ("permutations", "gated-delta, beta to 2", "delta, beta to 2", BEYOND),
    ("parity", "gated-delta, beta to 2", "delta, beta to 2", LONGER),
)


@evidence("S3.3h", chapter=CHAPTER)
def forgetting() -> Finding:
    settings = sum(len(tests) for *_, tests in FORGETTING)
    gains = {
        f"{experiment}, {label}": more
        for experiment, fading, plain, tests in FORGETTING
        for label, more in gained(experiment, fading, plain, tests, of=settings).items()
    }
    statement = "right beyond the lengths of training more often with a forget gate"
    x, S, one = gated_operands(), normal(WIDTH, WIDTH, seed=1), torch.tensor(1.0, dtype=torch.float64)
    after = transitions.gated_step(S, x["k"][0], x["v"][0], one, one)
    across = torch.linalg.qr(x["k"][:1].T, mode="complete").Q[:, 1:].T
    return all_of(
        {
            "no forget gate": holds(
                "what is stored across a key stays as it is", relative_error(across @ after, across @ S), EXACT_STEPS
            ),
            "an explicit one is often better": improves(statement, gains, unit=" %")
            if gains
            else without_records(statement, "delta rules with and without gates"),
        }
    )


def surplus_rank(keys: int = 2) -> float:
    """Of the change that a DeltaProduct token of n keys makes to a memory: singular value n + 1 over the largest."""
    g = seeded()
    S = torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64)
    k, v = torch.randn(2, keys, WIDTH, generator=g, dtype=torch.float64)
    _, (after,) = delta_product_reference(
        k[:1], k[:1], v[:1], more_keys=k[None, 1:], more_values=v[None, 1:], initial_state=(S,), return_state=True
    )
    values = torch.linalg.svdvals(after - S)
    return float(values[keys] / values[0])


def norms() -> dict[str, float]:
    """The spectral norm of the matrix by which a token with two unit keys multiplies the memory, at strength 1.5."""
    beta = torch.full((2,), STRENGTH, dtype=torch.float64)
    return {
        f"{how}, keys with the cosine {cosine:g}": round(
            float(torch.linalg.matrix_norm(transitions.transition(update, transitions.pair(cosine), beta), 2)), 2
        )
        for update, how in (("in turn", "one after the other"), ("at once", "from one old memory"))
        for cosine in (0, NEAR)
    }


def miscounted() -> int:
    """How many running sums modulo 5 two reflections a token get wrong."""
    numbers = torch.randint(MODULUS, (NUMBERS,), generator=seeded())
    o = delta_product(**counter_operands(numbers, MODULUS), qk_l2norm=False, is_causal=True)
    assert isinstance(o, Tensor)
    return int((read_counts(o, MODULUS)[1:] != numbers.cumsum(0) % MODULUS).sum())


def gained(experiment: str, better: str, worse: str, tests: Collection[str], *, of: int = 0) -> dict[str, Interval]:
    """By test and device: how many more answers in a hundred are right in an arm's runs than in the other's.

    The intervals are those of the exact rank test. For all `of` settings (by default, those that are found) they hold
    at once, except with probability `LEVEL` at either end, which five seeds can reach in up to 12 settings. Arms with
    fewer runs than `learning.SEEDS` are left out.
    """
    records = experiments.load(experiment)
    pairs: dict[str, tuple[Row, Row]] = {}
    for device in experiments.by_device(records):
        found = analysis.results(records, device)
        for test in tests:
            rows = [found[arm][test] for arm in (better, worse) if test in found.get(arm, {})]
            if len(rows) == 2 and all(len(row["seeds"]) >= len(learning.SEEDS) for row in rows):
                pairs[f"{test} on {device}"] = rows[0], rows[1]
    gains = {}
    for label, (one, other) in pairs.items():
        low, high = gain(one["correct"], other["correct"], LEVEL / max(of, len(pairs)))
        gains[label] = outward((100 * low, 100 * high))
    return gains


def more_right(statement: str, experiment: str, better: str, worse: str, tests: Collection[str]) -> Finding:
    """What the records of an experiment say of an arm's gain over another."""
    gains = gained(experiment, better, worse, tests)
    if not gains:
        lack = f"the experiment {experiment!r} has no records of {len(learning.SEEDS)} runs each of"
        return untestable(statement, {f"{better!r} and {worse!r}": None}, lack=lack)
    return improves(statement, gains, unit=" %")


def widened() -> dict[str, float]:
    """How many per cent more numbers the memory of a layer has than that of one head with one key a token."""
    kinds = {"16 heads": (16, "delta"), "DeltaProduct, one head": (1, "delta-product")}
    one = layer(1, 1, 1024, 1, attention="delta").state_bytes
    found = {label: layer(1, 1, 1024, H, attention=name).state_bytes for label, (H, name) in kinds.items()}
    return {label: 100 * (size / one - 1) for label, size in found.items()}


def asymmetry() -> float:
    """How far the matrix by which a token of DeltaProduct multiplies the memory is from symmetric, relatively."""
    beta = torch.full((2,), STRENGTH, dtype=torch.float64)
    A = transitions.transition("in turn", transitions.pair(0.5), beta)
    return relative_error(A.T, A)


@evidence("S3.3c", chapter=CHAPTER)
def higher_rank() -> Finding:
    parts = {
        "heads widen the memory": improves("more numbers than one head's", widened(), unit=" %"),
        "DeltaProduct goes that way": holds(
            "a token multiplies the memory by a symmetric matrix, as in each head",
            asymmetry(),
            EXACT_STEPS,
        ),
        "several keys a token": holds("what a token adds has the rank of its keys, 2", surplus_rank(), EXACT_STEPS),
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
    k, values = unit_keys(1, WIDTH, generator=seeded()), normal(2, WIDTH, seed=1)
    off = relative_error(k @ (k.T @ values[:1] + k.T @ values[1:]), values[1:])
    one, two = (layer(1, 4096, 1024, 16, attention=name, causal=True).forward for name in ("delta", "delta-product"))
    return all_of(parts).noting(
        f"A layer of 16 heads, $d = 1,024$, takes {two / one:.2f} times the FLOPs with two keys a token. If $U_t$ and "
        f"$V_t$ are made of the token alone nothing is erased: the answer at a key that gets a second value is off by "
        f"{100 * off:.0f} %"
    )


# --------------------------------------------------------------------------------------------------------------- losses

DELTA = 0.1
ROBUST = Huber(DELTA)
OUTLIERS = ((0.02, 1.0), (0.1, 10.0))  # their share and their length; other values have length 1
COUNT, PAIR_WIDTH = 32, 16  # pairs to be retrieved, twice as many as a linear map can fit
PASSES = (1, 10)
STEPS = (0.0625, 0.125, 0.25, 0.5, 1.0)
TEMPERATURES = (0.1, 0.2, 0.5, 1.0)


@cache
def rate(loss: TokenLoss) -> float:
    """The step that is best without outliers."""
    return robustness.best_rate(loss, robustness.stream(0.0, 1.0, generator=seeded(0)))


@cache
def regression(loss: TokenLoss, share: float, size: float) -> torch.Tensor:
    """The relative error of the memory at the end, draw by draw, in per cent."""
    return 100 * robustness.errors(loss, rate(loss), robustness.stream(share, size, generator=seeded(1)))[0]


def saved(loss: TokenLoss, share: float, size: float) -> Interval:
    """By how many per cent the error is below that of the squared loss."""
    return mean_interval(100 * (1 - regression(loss, share, size) / regression(Squared(), share, size)))


@cache
def retrieval(loss: TokenLoss, eta: float, passes: int, data: int, order: int) -> torch.Tensor:
    """The share of pairs that is found again, draw by draw, in per cent."""
    k, v = robustness.pairs(COUNT, PAIR_WIDTH, generator=seeded(data))
    found = robustness.retrieved(loss, eta, k, v, mini_batch_size=MINI_BATCH, passes=passes, generator=seeded(order))
    return 100 * found


@cache
def tuned(passes: int) -> tuple[tuple[TokenLoss, float], tuple[TokenLoss, float]]:
    """The squared and the contrastive loss with the steps and the temperature that retrieve most, of other pairs."""

    def best(*losses: TokenLoss) -> tuple[TokenLoss, float]:
        return max(product(losses, STEPS), key=lambda setting: float(retrieval(*setting, passes, 2, 3).mean()))

    return best(Squared()), best(*map(Contrastive, TEMPERATURES))


def more_found(passes: int) -> Interval:
    """How many more pairs in a hundred the contrastive loss finds than the squared one, which sees them in another
    order."""
    squared, contrastive = tuned(passes)
    return mean_interval(retrieval(*contrastive, passes, 4, 6) - retrieval(*squared, passes, 4, 5))


@cache
def replacing(loss: TokenLoss, eta: float) -> float:
    """The share of keys, in per cent, at which the second of two values is found, each written once: 8 keys."""
    k, old = robustness.pairs(8, PAIR_WIDTH, generator=seeded(7))
    new = robustness.pairs(8, PAIR_WIDTH, generator=seeded(8))[1]
    return 100 * float(robustness.replaced(loss, eta, k, old, new).mean())


def excess(eta: float = 0.5) -> float:
    """By how much the step of an outlier of 1 to a million is longer than eta delta sqrt(V), relatively."""
    lengths = robustness.moved(ROBUST, eta, [10.0**n for n in range(7)])
    return float((lengths / (eta * DELTA * sqrt(robustness.WIDTH)) - 1).max())


def with_outliers() -> dict[str, Interval]:
    """By how many per cent Huber's loss errs less than the squared one, by outliers."""
    return {f"{100 * share:g} % of length {size:g}": saved(ROBUST, share, size) for share, size in OUTLIERS}


@evidence("S3.3l", chapter=CHAPTER)
def normal_errors() -> Finding:
    p, v = normal(2, COUNT, PAIR_WIDTH)
    p.requires_grad_()
    (wanted,) = torch.autograd.grad(-torch.distributions.Normal(v, 1.0).log_prob(p).sum(), p)
    parts = {
        "the squared loss": holds(
            "that of the likeliest memory under normal errors",
            relative_error(Squared().gradient(p.detach(), v), wanted),
            EXACT_STEPS,
        ),
        "others may be better": improves(
            "Huber's error is below its own, errors not normal", with_outliers(), unit=" %"
        ),
    }
    return all_of(parts).noting(
        "Least squares needs no normal errors to be unbiased, nor to be the best linear estimate (Gauss and Markov); "
        "under normal ones it is the likeliest"
    )


@evidence("S3.3g", chapter=CHAPTER)
def losses() -> Finding:
    clean = 100 * float((regression(ROBUST, 0.0, 1.0) / regression(Squared(), 0.0, 1.0) - 1).mean())
    found = {f"{COUNT} pairs, {n} pass{'es' * (n > 1)}": more_found(n) for n in PASSES}
    parts = {
        "one token": holds(
            "Huber's loss moves the memory by $\\eta \\delta \\lvert k \\rvert \\sqrt V$ at most", excess(), EXACT_STEPS
        ),
        "with outliers": improves("Huber's error is below that of the squared loss", with_outliers(), unit=" %"),
        "contrastive": improves("retrieves more pairs than the squared loss", found, unit=" %"),
    }
    return all_of(parts).noting(
        f"Without outliers the error is {clean:.0f} % larger than with the squared loss. What is new looks like an "
        f"outlier: of values that replace others the squared loss finds {replacing(Squared(), 1.0):.0f} %, Huber's "
        f"with the same $\\delta$ {replacing(ROBUST, 1.0):.0f} %"
    )
