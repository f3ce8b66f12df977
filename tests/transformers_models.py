"""Tiny models of transformers with random weights. Tests that import this are left out where that is not installed."""

import pytest
import torch

from ortho.attention.sparse.window import Window

transformers = pytest.importorskip("transformers")

D, H, K, N, WORDS = 24, 4, 6, 7, 50
SIZES = {"hidden_size": D, "intermediate_size": 2 * D, "num_hidden_layers": 2, "num_attention_heads": H}
TEXT = {"vocab_size": WORDS, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=D,
        n_layer=2,
        n_head=H,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        scale_attn_by_inverse_layer_idx=True,
        **TEXT,
    ),
    "llama": lambda: transformers.LlamaConfig(num_key_value_heads=2, **SIZES, **TEXT),
    "bert": lambda: transformers.BertConfig(**SIZES, **TEXT, **NO_DROPOUT),
    "vit": lambda: transformers.ViTConfig(image_size=8, patch_size=4, **SIZES),
    "distilbert": lambda: transformers.DistilBertConfig(
        dim=D, hidden_dim=2 * D, n_layers=2, n_heads=H, dropout=0.0, attention_dropout=0.0, **TEXT
    ),
    "neox": lambda: transformers.GPTNeoXConfig(**SIZES, **TEXT),
    "t5": lambda: transformers.T5Config(
        d_model=D, d_kv=K, d_ff=2 * D, num_layers=2, num_heads=H, dropout_rate=0.0, vocab_size=WORDS
    ),
}
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "bert": "BertModel",
    "vit": "ViTModel",
    "distilbert": "DistilBertModel",
    "neox": "GPTNeoXForCausalLM",
    "t5": "T5EncoderModel",
}
MAIN, CAUSAL = ["gpt2", "llama", "bert", "vit"], ["gpt2", "llama"]
KINDS = [["learned", "previous", Window(3), "linear"], ["stopped", "end", "linear", "learned"]]
# Sums of fewer than 100 terms of size 1 in another order, a few layers deep: 1e-16 each; Llama's norms and T5's work in
# float32, and have 1e-7.
TOLERANCES = {name: {"atol": 1e-5 if name in ("llama", "t5", "neox") else 1e-12, "rtol": 0} for name in CONFIGS}


def make(name, seed=0):
    torch.manual_seed(seed)
    model = getattr(transformers, CLASSES[name])(CONFIGS[name]()).double().train()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.dim() == 1 and "norm" not in key and "ln" not in key:
                value.normal_()  # biases are 0 at first, and would show nothing
            elif "weight" in key:
                value *= 5  # of standard deviation 0.02, at which all heads would do about the same
    return model


def inputs(name, seed=1):
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {"pixel_values": torch.randn(3, 3, 8, 8, generator=generator).double()}
    return {"input_ids": torch.randint(3, WORDS, (3, N), generator=generator)}


def run(model, **kwargs):
    return model(**kwargs)[0]


def same_state(model, state):
    now = model.state_dict()
    return list(now) == list(state) and all(torch.equal(now[key], state[key]) for key in now)


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}
