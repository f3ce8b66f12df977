"""Each conversion of each kind of model is right, or is refused with a sentence that names a layer and changes nothing.

`python tests/adapter_cases.py` prints the table.
"""

import re

import pytest
from adapter_cases import CASES, judged
from adapter_models import MODELS, tf
from extent import WHOLE

UNKNOWN = "a known layout of queries and keys"
ALONE = "scores that are products of the queries and keys of {} alone, head by head"
REFUSED = {  # model -> words of the refusal, of all cases
    "longformer": "no projections of queries or keys beside",
    "olmo2": ALONE.format("q_proj, k_proj"),  # norms over all heads
    "convbert": ALONE.format("query, key"),  # a convolution reads queries, too
    **dict.fromkeys(("codegen", "gpt-bigcode", "known beside unknown", "own names"), UNKNOWN),
    "peft-wrapped llama": "without hooks, pruning, parametrizations, adapters or quantisation",
}
STOPS = {"wavlm": "it reads their weights itself"}  # of stopped gradients alone
OWN = [name for name in MODELS if name.startswith(("torch", "timm", "nn.", "own", "known"))]


def cases():
    """By default each model has one case, which differs from model to model; every night all."""
    models, names = MODELS if tf else OWN, list(CASES)
    return [(n, c) for i, n in enumerate(models) for c in CASES if WHOLE or c == names[i % len(names)]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("name", "case"), cases())
def test_right_or_refused(name, case):
    want = STOPS.get(name) if case == "stopped" and name in STOPS else REFUSED.get(name)
    got = judged(CASES[case], name)
    if want is None:
        assert got == "right"
    else:
        assert got.startswith("refused: ValueError: ") and re.search(want, got)
