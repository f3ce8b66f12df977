"""Each conversion of each kind of model is right, or is refused with a sentence that names a layer and changes nothing.

`python tests/adapter_cases.py` prints the table.
"""

import re

import pytest
from adapter_cases import CASES, NOT_THERE, judged
from adapter_models import MODELS, tf
from extent import WHOLE

SOFTCAP, SINKS, BIAS = (
    "softmax attention without further arguments.* hands " + word for word in ("softcap", "s_aux", "position_bias")
)
NAMELESS = "that it chooses its attention by name"
SLIDES = "that all earlier keys are kept.* sliding window"
CROSSES = "self-attention, for windows, other patterns and positional heads"
UNKNOWN = "a known layout of queries and keys"
EXTRA = "no add_bias_kv and no add_zero_attn"
STOPS = "stop_gradient: expected False with add_bias_kv or add_zero_attn"
PEFT = "not yet wrapped by an adapter or quantised"

# Model -> outcomes by the cases' order: "right", words of the refusal, or "-" (last case) if all layers are alike.
NO_HEADS = ("right", "right", NAMELESS, NAMELESS, NOT_THERE)
REFUSED = {
    "bert-decoder": ("right", "right", "right", CROSSES, "right"),
    "mistral": ("right", "right", "right", SLIDES, NOT_THERE),
    "gemma2": ("right", "right", SOFTCAP, SOFTCAP, NOT_THERE),
    "gemma3": ("right", "right", "right", SLIDES, "right"),
    **dict.fromkeys(("falcon", "falcon-mha", "falcon-new", "mpt"), NO_HEADS),
    "gpt-oss": ("right", "right", SINKS, SINKS, NOT_THERE),
    "modernbert": ("right", "right", "right", SLIDES, NOT_THERE),
    **dict.fromkeys(("deberta", "deberta-v2", "deberta-v2-relative", "timm-style qkv"), NO_HEADS),
    "longformer": ("no projections of queries or keys beside",) * 5,
    "t5": ("right", "right", BIAS, BIAS, BIAS),
    **dict.fromkeys(("bart", "whisper", "nn.Transformer"), ("right", "right", "right", CROSSES, "right")),
    **dict.fromkeys(("blip", "sam"), (*NO_HEADS[:4], NAMELESS)),
    "qwen2-vl": ("right", "right", "hands cu_seq_lens_k", "hands cu_seq_lens_k", NOT_THERE),
    "peft-wrapped llama": (PEFT,) * 5,
    "torch, kdim, vdim": ("right", "right", "right", CROSSES, NOT_THERE),
    **dict.fromkeys(("torch, add_bias_kv", "torch, add_zero_attn"), ("right", STOPS, EXTRA, EXTRA, NOT_THERE)),
    **dict.fromkeys(("known beside unknown", "own names"), (UNKNOWN,) * 5),
}
RIGHT = ("right",) * 4 + (NOT_THERE,)


def cases():
    """By default, each model has the first case and one other, which differs from model to model; every night, all."""
    models = MODELS if tf else OWN
    first, *others = CASES
    return [(n, c) for i, n in enumerate(models) for c in CASES if WHOLE or c in (first, others[i % len(others)])]


OWN = [name for name in MODELS if name.startswith(("torch", "timm", "nn.", "own", "known"))]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("name", "case"), cases())
def test_right_or_refused(name, case):
    want = REFUSED.get(name, RIGHT)[list(CASES).index(case)]
    got = judged(CASES[case], name)
    if want in ("right", NOT_THERE):
        assert got == want
    else:
        assert got.startswith("refused: ValueError: ")
        assert re.search(want, got)
