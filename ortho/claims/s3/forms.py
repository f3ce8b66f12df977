"""S3, section 3, improvements 1 and 2: gates, heads, and updates of higher rank."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ortho import experiments
from ortho.attention.delta import delta_rule, delta_rule_reference
from ortho.attention.delta_product import delta_product, delta_product_reference
from ortho.claims.figures import Interval
from ortho.claims.ledger import evidence
from ortho.claims.rules import all_of, counted, effect, holds, region
from ortho.claims.verdicts import Finding
from ortho.cost import layer
from ortho.experiments import learning_rows
from ortho.theory import gated_forms, one_shot
from ortho.theory.stability import unit_keys
from ortho.theory.state_tracking import counter_operands, read_counts

CHAPTER = "13-gates-products-losses"

LENGTH, WIDTH = 100, 8
# Relative, in float64: a hundred steps that enlarge no error, with sums of eight terms each, round to about 1e-14.
EXACT = 1e-12
STRENGTH = 1.5
NEAR = 0.999  # the cosine of keys that are nearly parallel
MODULUS, NUMBERS = 5, 300


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


def gained(experiment: str, better: str, worse: str) -> tuple[dict[str, Interval], dict[str, Interval]]:
    """By device and test: how many per cent more is answered right by an arm's runs than by the other's, from the worst
    against the best to the best against the worst; and the same of the other arm against itself."""
    records = experiments.load(experiment)
    gains, control = {}, {}
    for device in dict.fromkeys(record["device"] for record in records):
        found = learning_rows.results(records, device)
        if {better, worse} <= found.keys():
            for test in list(found[better])[1:]:  # beyond the lengths of training
                one, other = found[better][test], found[worse][test]
                label = f"{experiment}, {test}, {device}"
                gains[label] = tuple(round(100 * x) for x in (one["low"] - other["high"], one["high"] - other["low"]))
                spread = round(100 * (other["high"] - other["low"]))
                control[label] = (-spread, spread)
    return gains, control


@evidence("S3.3c", chapter=CHAPTER)
def higher_rank() -> Finding:
    parts = {
        "DeltaProduct": holds("what a token adds has the rank of its keys, 2", surplus_rank(), EXACT),
        f"stable, $\\beta = {STRENGTH:g}$: norm of what the memory is multiplied by": region((0, 1), norms()),
        f"running sums modulo {MODULUS} that two keys a token get wrong, of {NUMBERS}": counted(
            {"": 0}, {"": miscounted()}
        ),
    }
    gains, control = gained("permutations", "delta-product", "delta, beta to 2")
    if gains:
        parts["right answers beyond one key's (control: runs of one key)"] = effect((1, 100), gains, control, unit=" %")
    one, two = (layer(1, 4096, 1024, 16, attention=name, causal=True).forward for name in ("delta", "delta-product"))
    heads = [layer(1, 1, 1024, H, attention="delta").state_bytes for H in (1, 16)]
    return all_of(parts).noting(
        f"A layer of 16 heads, $d = 1,024$, takes {two / one:.2f} times the FLOPs with two keys a token. Heads divide "
        f"the memory: 16 of them hold {heads[1] / heads[0]:.4g} of the numbers that one holds"
    )
