"""Whether fast forms give what definitions give on a GPU, in each precision: outputs and gradients of whole layers.

On a CPU the tests show this, also for operands, masks and states. Here a layer of each mechanism, with its gates, runs
in its fast form in each precision, and is compared with its definition in float32 with the same weights. Records hold
relative errors, as fractions of the definition's norms. Mechanisms that choose keys may choose other keys in half
precision, and then differ by more than rounding.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ortho.attention import MECHANISMS
from ortho.checks import one_of
from ortho.layers.multihead import MultiheadAttention
from paper.experiments.engine.records import Case
from paper.experiments.speed import benchmark

SEEDS = {"weights": 0, "inputs": 1}
DTYPES = ("float32", "bfloat16", "float16")
COMPILED = ("softmax", "linear", "window", "delta")  # mechanisms that also run compiled, in float32


def case(
    mechanism: str, causal: bool, *, device: str = "cuda", B: int = 2, N: int = 512, d: int = 256, H: int = 4
) -> Case:
    """One mechanism in one direction. Raises TypeError or ValueError for sizes below 1 and unknown names."""
    return {
        "device": one_of("device", device, ("cpu", "cuda")),
        "mechanism": one_of("mechanism", mechanism, MECHANISMS),
        "causal": causal,
        **benchmark.sizes(B=B, N=N, d=d, H=H),
    }


def cases(device: str) -> list[Case]:
    """Every mechanism in each direction that it has, on a GPU."""
    if device == "cpu":
        return []
    return [
        case(name, causal)
        for causal in (True, False)
        for name, mechanism in MECHANISMS.items()
        if (mechanism.causal if causal else mechanism.bidirectional)
    ]


def run(case: Case) -> dict[str, Any]:
    """The relative errors of one mechanism.

    A precision that raises, or whose output or gradients are not finite, is a failure, which says why.
    """
    want = _results(case, "reference", torch.float32)
    repetitions, failures = {}, {}
    arms = {name: (name, False) for name in DTYPES}
    if case["mechanism"] in COMPILED:
        arms["float32 compiled"] = ("float32", True)
    for arm, (name, compiled) in arms.items():
        try:
            got = _results(case, "fast", getattr(torch, name), compiled=compiled)
        except Exception as error:  # whatever a kernel or a compiler raises is its result here
            failures[arm] = benchmark.reason(error)
            continue
        errors = {key: benchmark.relative_error(got[key], value) for key, value in want.items() if value.any()}
        infinite = [key for key, error in errors.items() if not math.isfinite(error)]
        if infinite:
            failures[arm] = f"not finite: {', '.join(infinite)}"
            continue
        gradients = [error for key, error in errors.items() if key != "output"]
        repetitions[arm] = {"output_fraction": [errors["output"]], "gradient_fraction": [max(gradients)]}
    return {"seeds": dict(SEEDS), "repetitions": repetitions, "failures": failures}


def _results(case: Case, form: str, dtype: torch.dtype, *, compiled: bool = False) -> dict[str, Tensor]:
    """Output and gradients of one pass, in float32; weights and inputs are drawn on the CPU in that precision."""
    weights, inputs = (torch.Generator().manual_seed(seed) for seed in SEEDS.values())
    layer = MultiheadAttention(case["d"], case["H"], attention=case["mechanism"], form=form, generator=weights)
    layer = layer.to(case["device"], dtype)
    shape = case["B"], case["N"], case["d"]
    x, upstream = (torch.randn(*shape, generator=inputs).to(case["device"], dtype) for _ in range(2))
    call = torch.compile(layer) if compiled else layer
    found = benchmark.results(call, layer, x.requires_grad_(), upstream, is_causal=case["causal"])
    return {name: tensor.float() for name, tensor in found.items()}


def label(case: Case) -> str:
    """A case in a few words."""
    return case["mechanism"] + (" causal" if case["causal"] else "")
