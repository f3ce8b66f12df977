"""The training step of the attention layer and of the whole block, measured for each way to make q and k.

One case holds every variant at one size. Other experiments measure the same for other variants: `compare` and the
functions that read records take these variants and their closed forms.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ortho import cost
from ortho.checks import one_of
from ortho.layers.block import TransformerBlock
from ortho.layers.multihead import MultiheadAttention
from paper.experiments.engine.records import Case, Record
from paper.experiments.speed import analysis, benchmark
from paper.experiments.speed.analysis import Row, row_of
from paper.experiments.speed.benchmark import Arm, Budget, assert_all_close, trained
from paper.memory import layer_bytes

STANDARD = "learned"
VARIANTS = (STANDARD, "frozen", "stopped")
SEEDS = {"weights": 0, "inputs": 1, "order": 2}
TOKENS = 32768  # B N on CUDA: the same work for the projections at every N, and enough of it to fill the device
CHECKED_LENGTH = 256  # the reference form materialises N x N weights in float64
BUDGETS = {"cpu": Budget(22.0, 7, 31, warm_up=1), "cuda": Budget(2.0, 10, 40, warm_up=3)}

# Successive stored results from x to the last gradient; each is rounded once to the working precision.
_STAGES = {"layer": 12, "block": 28}

Declared = Callable[[Mapping[str, Any], str], cost.Cost]


def declared(case: Mapping[str, Any], variant: str) -> cost.Cost:
    """The closed-form cost of the fast form of one variant of a case."""
    sizes = [case[name] for name in ("B", "N", "d", "H")]
    options = {
        "projection": variant,
        "form": "fast",
        "causal": case["causal"],
        "itemsize": benchmark.dtype(case).itemsize,
    }
    if case["scope"] == "block":
        return cost.block(*sizes, **options)
    return cost.layer(*sizes, input_grad=case["input_grad"], **options)


def case(
    scope: str = "layer",
    N: int = 512,
    d: int = 768,
    *,
    device: str = "cpu",
    B: int = 1,
    H: int | None = None,
    dtype: str = "float32",
    causal: bool = False,
    input_grad: bool = True,
) -> Case:
    """One configuration: `scope` 'layer' or 'block', H heads (by default of width 64), and whether x needs a gradient.

    Raises TypeError or ValueError for sizes below 1 and unknown names.
    """
    return {
        "device": one_of("device", device, BUDGETS),
        "scope": one_of("scope", scope, _STAGES),
        **benchmark.sizes(B=B, N=N, d=d, H=d // 64 if H is None else H),
        "dtype": one_of("dtype", dtype, ("float32", "bfloat16", "float16", "float64")),
        "causal": causal,
        "input_grad": input_grad,
        "compiled": False,
    }


def cases(device: str) -> list[Case]:
    """All configurations for a device, the most informative first."""
    return _cuda_cases() if device == "cuda" else _cpu_cases()


def _cpu_cases() -> list[Case]:
    sizes = [(512, 768), (1024, 768), (128, 768), (256, 768), (196, 768), (2048, 768)]  # 196: ViT's patches
    sizes += [(512, 512), (1024, 512), (2048, 1024)]  # the other rows of the source's table 4.1
    both = [case(scope, N, d) for N, d in sizes for scope in ("layer", "block")]
    first_layer = [case("layer", N, 768, input_grad=False) for N in (128, 512, 1024)]
    return [*both, *first_layer, case("layer", 4096, 768)]


def on_gpu(scope: str, N: int, d: int = 768, *, dtype: str = "bfloat16", **options: bool) -> Case:
    """One configuration whose tokens fill the device."""
    return case(scope, N, d, device="cuda", B=max(1, TOKENS // N), dtype=dtype, **options)


def _cuda_cases() -> list[Case]:
    at, scopes = on_gpu, ("layer", "block")
    grid = [at(s, N) for N in (512, 2048, 8192, 32768, 128, 1024, 4096, 16384, 256) for s in scopes]
    grid += [at(s, N, causal=True) for N in (2048, 8192, 32768) for s in scopes]
    grid += [at(s, N, dtype="float32") for N in (512, 2048, 8192) for s in scopes]
    grid += [at(s, N, d) for d in (1024, 2048) for N in (512, 2048, 8192, 32768) for s in scopes]
    grid += [at("layer", N, input_grad=False) for N in (512, 8192)]
    grid += [at("layer", N, dtype="float32") for N in (128, 32768)]
    return grid


def run(case: Case, seconds: float | None = None) -> dict[str, Any]:
    """Measure one case: check every variant against its definition, then time them in turn; see `compare`."""
    return compare(case, VARIANTS, build, declared, seconds)


def compare(
    case: Case,
    variants: Sequence[str],
    build: Callable[[Case, str], nn.Module],
    declared: Declared,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Check every variant against its definition, then time them in turn.

    `seconds` bounds the time of the repetitions, but there are always a few. Raises AssertionError if a variant's
    output or gradients are off, or if it does not have as many trained weights as its closed form says.
    """
    options = {"is_causal": case["causal"]}
    x, upstream = inputs(case)
    arms: list[Arm] = []
    for variant in variants:
        module = build(case, variant)
        check(case, variant, module, declared)
        arms.append(trained(variant, module))
    timings = {arm.name: partial(benchmark.timed_step, arm, x, upstream, **options) for arm in arms}
    outcome = benchmark.compare(timings, BUDGETS[case["device"]], SEEDS, seconds)
    outcome["facts"] |= {arm.name: benchmark.step_bytes(arm, x, upstream, **options) for arm in arms}
    return outcome


def build(case: Case, variant: str) -> nn.Module:
    """The layer or block of a case. Weights are drawn on the CPU in float32, so that every device has the same."""
    make: type[nn.Module] = {"layer": MultiheadAttention, "block": TransformerBlock}[case["scope"]]
    generator = torch.Generator().manual_seed(SEEDS["weights"])
    module = make(case["d"], case["H"], projection=variant, form="fast", generator=generator, dtype=torch.float32)
    return module.to(case["device"], benchmark.dtype(case))


def check(case: Case, variant: str, module: nn.Module, declared: Declared = declared) -> None:
    """Raise AssertionError unless a fast form, in the case's dtype, computes what the reference in float64 does.

    Compared on a shorter sequence: the output, the gradients of x and of every trained weight; a frozen weight must
    have none.
    """
    small = {**case, "B": 1, "N": min(case["N"], CHECKED_LENGTH), "input_grad": True}
    exact = benchmark.defined(module).double()
    x, upstream = inputs(small)
    options = {"is_causal": case["causal"]}
    want = benchmark.results(exact, exact, x.double(), upstream.double(), **options)
    assert_all_close(variant, benchmark.results(module, module, x, upstream, **options), want, tolerance(small))
    count = sum(p.numel() for p in module.parameters() if p.requires_grad)
    expected = declared(small, variant).trained
    if count != expected:
        raise AssertionError(f"{variant}: expected {expected} trained weights, got {count}")


def tolerance(case: Case) -> float:
    """The relative error that rounding alone may cause in a case's step."""
    terms = max(4 * case["d"] if case["scope"] == "block" else case["d"], case["B"] * case["N"])
    return benchmark.rounding_error(_STAGES[case["scope"]], terms, benchmark.dtype(case))


def inputs(case: Case) -> tuple[Tensor, Tensor]:
    """x and the gradient of the output, (B, N, d) each, of unit variance, as after a normalisation."""
    x, upstream = benchmark.drawn(case, (case["B"], case["N"], case["d"]), 2, SEEDS["inputs"])
    return x.requires_grad_(case["input_grad"]), upstream


def label(case: Case) -> str:
    """A case in a few words."""
    words = [case["scope"], f"N={case['N']}", f"d={case['d']}", f"B={case['B']}", case["dtype"]]
    words += [name for name in ("causal", "compiled") if case[name]]  # of earlier records
    return " ".join(words + ([] if case["input_grad"] else ["x without gradient"]))


# ---------------------------------------------------------------------------------------------- what the records say


def speedups(records: Iterable[Record], declared: Declared = declared) -> list[Row]:
    """One row per record and arm other than the standard: its `analysis.speedups`, and `bound`, the ratio of the matrix
    products' FLOPs, forward and backward.
    """
    rows = []
    for record in records:
        case = record["configuration"]
        for arm in (arm for arm in record["repetitions"] if arm != STANDARD):
            bound = declared(case, STANDARD).step / declared(case, arm).step
            own = analysis.speedups(record, arm, STANDARD)
            rows.append(row_of(record, arm=arm, variant=arm, **own, bound=bound))
    return rows


def saved_bytes(case: Mapping[str, Any], variant: str) -> int:
    """Bytes that autograd keeps of a case's batch."""
    kind: dict[str, Any] = {name: case[name] for name in ("scope", "causal")}
    kind |= {"input_grad": case["input_grad"]} if case["scope"] == "layer" else {}
    of_one = layer_bytes(case["N"], case["d"], case["H"], dtype=benchmark.dtype(case), projection=variant, **kind)
    return int(case["B"]) * of_one


def memory(records: Iterable[Record]) -> list[Row]:
    """One row per record and arm: the bytes measured, and `counted_saved_bytes`, as autograd keeps them on a CPU.

    Measured: `saved_bytes` on a CPU, counted from autograd's graph; `peak_bytes` and `activation_bytes` on CUDA. For
    each the row also has the ratio to the standard arm's (`peak_bytes_ratio`).
    """
    rows = []
    for record in records:
        for arm in record["repetitions"]:
            facts, standard = record["facts"][arm], record["facts"][STANDARD]
            measured = {name: value for name, value in facts.items() if name.endswith("_bytes")}
            ratios = {f"{name}_ratio": value / standard[name] for name, value in measured.items() if standard.get(name)}
            saved = saved_bytes(record["configuration"], arm)
            rows.append(row_of(record, arm=arm, variant=arm, **measured, **ratios, counted_saved_bytes=saved))
    return rows
