"""Small models of every layout of attention, built from their configurations without downloads, and their inputs."""

import warnings
from functools import partial

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from ortho import MultiheadAttention

try:
    import transformers as tf
except ImportError:  # the models of torch remain
    tf = None

D, H, N, WORDS = 24, 4, 7, 50
SIZES = {"hidden_size": D, "intermediate_size": 2 * D, "num_hidden_layers": 2, "num_attention_heads": H}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT = {"vocab_size": WORDS, "max_position_embeddings": 32, **IDS}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {**SIZES, **TEXT, **NO_DROPOUT}
GROUPED = {**SIZES, **TEXT, "num_key_value_heads": 2}
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4}
FALCON = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": H, "vocab_size": WORDS, **IDS}
SPEECH = {"encoder_attention_heads": H, "decoder_attention_heads": H, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
SEQ = {"d_model": D, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0, "decoder_start_token_id": 1, **SPEECH}
# Some models compute norms and softmaxes in float32, with error 6e-8; sums of fewer than 100 terms, a few layers deep,
# add up a hundred of these. Heads that are mixed up change the outputs by a tenth or more.
CLOSE = 1e-5


def config(name, *args, **kwargs):
    return getattr(tf, name)(*args, **kwargs)


def of(kind, cls, conf, **kwargs):
    """What builds a model of transformers from the names of its class and configuration; and its kind of input."""
    return lambda: getattr(tf, cls)(config(conf, **kwargs)), kind


text, causal, both, image = (partial(of, kind) for kind in ("text", "causal", "both", "image"))


def blip():
    text = {**BERT, "projection_dim": 8, "encoder_hidden_size": D, "sep_token_id": 3}
    vision = {**IMAGE, "projection_dim": 8}
    both = config("BlipConfig", text_config=text, vision_config=vision, projection_dim=8)
    return tf.BlipForConditionalGeneration(both)


def sam():
    vision = {**SIZES, "output_channels": 8, "image_size": 32, "patch_size": 8, "mlp_dim": 48, "window_size": 2}
    vision |= {"global_attn_indexes": [1], "num_pos_feats": 4, "initializer_range": 0.02}
    prompt = {"hidden_size": 8, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}
    decoder = {"hidden_size": 8, "mlp_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    decoder["iou_head_hidden_dim"] = 8
    parts = {"vision_config": vision, "prompt_encoder_config": prompt, "mask_decoder_config": decoder}
    return tf.SamModel(config("SamConfig", **parts))


def qwen2_vl():
    rope = {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": D, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 1}
    vision["temporal_patch_size"] = 1
    tokens = {f"{name}_token_id": 40 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))}
    parts = {"text_config": {**GROUPED, "rope_parameters": rope}, "vision_config": vision, **tokens}
    return tf.Qwen2VLForConditionalGeneration(config("Qwen2VLConfig", **parts))


class Attention(nn.Module):
    """Attention as timm writes it."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = H, D // H
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        B, M, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, M, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, M, D))


class Attend(nn.Module):
    """torch's layer, called with tensors of its widths."""

    def __init__(self, **kwargs):
        super().__init__()
        self.layer = nn.MultiheadAttention(D, H, **{"batch_first": True, **kwargs})

    def forward(self, x):
        widths = (D, self.layer.kdim, self.layer.vdim)
        q, k, v = (x,) * 3 if widths == (D,) * 3 else (x[..., :width] for width in widths)
        return self.layer(q, k, v, need_weights=False)[0]


class NamedAttention(nn.Module):
    """A layer with grouped heads and the parameter names of Hugging Face's layers."""

    def __init__(self, kv_heads=2):
        super().__init__()
        self.head_dim = D // H
        self.q_proj = nn.Linear(D, D)
        self.k_proj, self.v_proj = (nn.Linear(D, kv_heads * self.head_dim) for _ in range(2))
        self.o_proj = nn.Linear(D, D)

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        k, v = (y.repeat_interleave(H // k.shape[1], 1) for y in (k, v))
        return self.o_proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Beside(nn.Module):
    """A layer of a known layout followed by one of an unknown layout."""

    def __init__(self):
        super().__init__()
        self.known, self.own = nn.MultiheadAttention(D, H, batch_first=True), OwnAttention()

    def forward(self, x):
        return self.own(self.known(x, x, x, need_weights=False)[0])


class OwnAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.ask, self.answer, self.tell = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (self.ask(x), self.answer(x), self.tell(x)))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Wrapped(nn.Module):
    """A linear layer as PEFT wraps it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


Wrapped.__name__ = Wrapped.__qualname__ = "Linear"  # which is what PEFT calls it


def wrapped():
    model = MODELS["llama"][0]()
    for layer in model.model.layers:
        layer.self_attn.q_proj = Wrapped(layer.self_attn.q_proj)
    return model


def encoder():
    layer = nn.TransformerEncoderLayer(D, H, 2 * D, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


def decoder_layer():
    return nn.TransformerDecoderLayer(D, H, 2 * D, dropout=0.0, batch_first=True)


def transformer():
    return nn.Transformer(D, H, 1, 1, 2 * D, dropout=0.0, batch_first=True)


# Name -> (what builds the model, its kind of input). Tokens are "text", "causal" for a causal model, or "both" for a
# model with an encoder and a decoder; other kinds name other inputs.
DISTIL = {"dim": D, "hidden_dim": 48, "n_layers": 2, "n_heads": H, "dropout": 0.0, "attention_dropout": 0.0}
GPT2 = {"n_embd": D, "n_layer": 2, "n_head": H, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = {"ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": H, "dropout": 0.0, "word_embed_proj_dim": D}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4, "head_dim": 8}
EXPERTS["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
T5 = {"d_model": D, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": H, "dropout_rate": 0.0, "vocab_size": WORDS}
WHISPER = {"num_mel_bins": 8, "max_source_positions": 6, "max_target_positions": 32, "vocab_size": WORDS}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2}
SOUND = {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_feat_extract_layers": 2}
SOUND |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}
SOUND |= {f"{part}_dropout": 0.0 for part in ("hidden", "attention", "activation", "feat_proj")} | {"layerdrop": 0.0}
SLIDING = {"head_dim": 8, "sliding_window": 4, **GROUPED}
CLIP = {"projection_dim": 8}
WIDE = {"hidden_size": 32}  # half of a head turns, in pairs of numbers
GPTJ = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NEO = {"hidden_size": D, "num_layers": 2, "num_heads": H, "window_size": 4}
NEO |= {"attention_dropout": 0.0, "embed_dropout": 0.0, "resid_dropout": 0.0}
JAMBA = {"num_experts": 2, "mamba_d_state": 4, "mamba_d_conv": 2, "use_mamba_kernels": False}
MODELS = {
    "bert": text("BertModel", "BertConfig", **BERT),
    "bert-decoder": of("cross", "BertModel", "BertConfig", is_decoder=True, add_cross_attention=True, **BERT),
    "roberta": text("RobertaModel", "RobertaConfig", **BERT),
    "distilbert": text("DistilBertModel", "DistilBertConfig", **DISTIL, **TEXT),
    "albert": text("AlbertModel", "AlbertConfig", embedding_size=16, **BERT),
    "electra": text("ElectraModel", "ElectraConfig", embedding_size=16, **BERT),
    "gpt2": causal("GPT2LMHeadModel", "GPT2Config", scale_attn_by_inverse_layer_idx=True, **GPT2, **TEXT),
    "gpt-neox": causal("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZES, **TEXT),
    "opt": causal("OPTForCausalLM", "OPTConfig", hidden_size=D, **OPT, **TEXT),
    "llama": causal("LlamaForCausalLM", "LlamaConfig", **GROUPED),
    "mistral": causal("MistralForCausalLM", "MistralConfig", sliding_window=4, **GROUPED),
    "qwen2": causal("Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
    "qwen3": causal("Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **GROUPED),
    "gemma2": causal("Gemma2ForCausalLM", "Gemma2Config", **SLIDING),
    "gemma3": causal(
        "Gemma3ForCausalLM", "Gemma3TextConfig", layer_types=["sliding_attention", "full_attention"], **SLIDING
    ),
    "phi3": causal("Phi3ForCausalLM", "Phi3Config", **GROUPED),
    "falcon": causal("FalconForCausalLM", "FalconConfig", multi_query=True, **FALCON),
    "falcon-mha": causal("FalconForCausalLM", "FalconConfig", multi_query=False, **FALCON),
    "falcon-new": causal("FalconForCausalLM", "FalconConfig", new_decoder_architecture=True, num_kv_heads=2, **FALCON),
    "mpt": causal("MptForCausalLM", "MptConfig", d_model=D, n_heads=H, n_layers=2, vocab_size=WORDS, max_seq_len=32),
    "gpt-oss": causal("GptOssForCausalLM", "GptOssConfig", **EXPERTS, **GROUPED),
    "modernbert": text(
        "ModernBertModel", "ModernBertConfig", local_attention=4, cls_token_id=1, sep_token_id=2, **SIZES, **TEXT
    ),
    "deberta": text("DebertaModel", "DebertaConfig", **BERT),
    "deberta-v2": text("DebertaV2Model", "DebertaV2Config", **BERT),
    "deberta-v2-relative": text(
        "DebertaV2Model", "DebertaV2Config", relative_attention=True, pos_att_type=["p2c", "c2p"], **BERT
    ),
    "longformer": text("LongformerModel", "LongformerConfig", attention_window=4, sep_token_id=2, **BERT),
    "t5": both("T5ForConditionalGeneration", "T5Config", decoder_start_token_id=0, **T5),
    "bart": both("BartForConditionalGeneration", "BartConfig", forced_eos_token_id=None, **SEQ, **TEXT),
    "whisper": of("speech", "WhisperForConditionalGeneration", "WhisperConfig", **WHISPER, **SEQ, **IDS),
    "vit": image("ViTModel", "ViTConfig", **IMAGE),
    "swin": of("image-16", "SwinModel", "SwinConfig", drop_path_rate=0.0, **SWIN),
    "clip": of(
        "image-text", "CLIPModel", "CLIPConfig", text_config=SIZES | TEXT | CLIP, vision_config=IMAGE | CLIP, **CLIP
    ),
    "blip": (blip, "image-text"),
    "sam": (sam, "points"),
    "qwen2-vl": (qwen2_vl, "image-tokens"),
    "wav2vec2": of("sound", "Wav2Vec2Model", "Wav2Vec2Config", vocab_size=WORDS, **SOUND, **SIZES),
    "mixtral": causal("MixtralForCausalLM", "MixtralConfig", num_local_experts=2, **GROUPED),
    "gemma": causal("GemmaForCausalLM", "GemmaConfig", head_dim=8, **GROUPED),
    "olmo": causal("OlmoForCausalLM", "OlmoConfig", **GROUPED),
    "olmo2": causal("Olmo2ForCausalLM", "Olmo2Config", **GROUPED),
    "cohere": causal("CohereForCausalLM", "CohereConfig", use_qk_norm=True, **GROUPED),
    "stablelm": causal("StableLmForCausalLM", "StableLmConfig", qk_layernorm=True, **GROUPED),
    "starcoder2": causal("Starcoder2ForCausalLM", "Starcoder2Config", **GROUPED),
    "granite": causal("GraniteForCausalLM", "GraniteConfig", **GROUPED),
    "phi": causal("PhiForCausalLM", "PhiConfig", qk_layernorm=True, **SIZES | WIDE, **TEXT),
    "persimmon": causal("PersimmonForCausalLM", "PersimmonConfig", **SIZES | WIDE, **TEXT),
    "bloom": causal("BloomForCausalLM", "BloomConfig", hidden_size=D, n_layer=2, n_head=H, vocab_size=WORDS, **IDS),
    "gptj": causal("GPTJForCausalLM", "GPTJConfig", n_embd=D, n_layer=2, n_head=H, rotary_dim=4, **GPTJ, **TEXT),
    "codegen": causal("CodeGenForCausalLM", "CodeGenConfig", n_embd=D, n_layer=2, n_head=H, rotary_dim=4, **TEXT),
    "gpt-neo": causal("GPTNeoForCausalLM", "GPTNeoConfig", attention_types=[[["global", "local"], 1]], **NEO, **TEXT),
    "gpt-bigcode": causal("GPTBigCodeForCausalLM", "GPTBigCodeConfig", **GPT2, **TEXT),
    "xglm": causal("XGLMForCausalLM", "XGLMConfig", d_model=D, num_layers=2, attention_heads=H, ffn_dim=48, **TEXT),
    "jamba": causal("JambaForCausalLM", "JambaConfig", attn_layer_offset=1, attn_layer_period=2, **JAMBA, **GROUPED),
    "convbert": text("ConvBertModel", "ConvBertConfig", embedding_size=D, **BERT),
    "mpnet": text("MPNetModel", "MPNetConfig", **BERT),
    "beit": image("BeitModel", "BeitConfig", use_relative_position_bias=True, **IMAGE, **NO_DROPOUT),
    "dinov2": image("Dinov2Model", "Dinov2Config", **IMAGE),
    "siglip": image("SiglipVisionModel", "SiglipVisionConfig", **IMAGE),
    "swinv2": of("image-16", "Swinv2Model", "Swinv2Config", drop_path_rate=0.0, **SWIN),
    "wavlm": of("sound", "WavLMModel", "WavLMConfig", vocab_size=WORDS, **SOUND, **SIZES),
    "peft-wrapped llama": (wrapped, "causal"),
    "timm-style qkv": (Attention, "vectors"),
    "torch": (Attend, "vectors"),
    "torch, no bias": (lambda: Attend(bias=False), "vectors"),
    "torch, kdim, vdim": (lambda: Attend(kdim=8, vdim=16), "vectors"),
    "torch, add_bias_kv": (lambda: Attend(add_bias_kv=True), "vectors"),
    "torch, add_zero_attn": (lambda: Attend(add_zero_attn=True), "vectors"),
    "torch, batch second": (lambda: Attend(batch_first=False), "vectors"),
    "nn.TransformerEncoder": (encoder, "vectors"),
    "nn.TransformerDecoderLayer": (decoder_layer, "target and memory"),
    "nn.Transformer": (transformer, "two vectors"),
    "named": (NamedAttention, "vectors"),
    "ortho": (lambda: MultiheadAttention(D, H, bias=True), "vectors"),
    "ortho, grouped": (lambda: MultiheadAttention(D, H, num_kv_heads=2), "vectors"),
    "known beside unknown": (Beside, "vectors"),
    "own names": (OwnAttention, "vectors"),
}


# The number of attention layers of the models that do not have two.
LAYERS = {
    "bert-decoder": 4,
    "albert": 1,
    "t5": 6,
    "bart": 6,
    "whisper": 6,
    "jamba": 1,
    "siglip": 3,
    "clip": 4,
    "blip": 6,
    "sam": 9,
    "qwen2-vl": 4,
}
OWN = [name for name, (_, kind) in MODELS.items() if kind in ("vectors", "two vectors", "target and memory")]
LAYERS |= {name: 1 for name in OWN if not name.startswith("nn.")} | {"nn.TransformerEncoder": 3, "nn.Transformer": 3}
DTYPES = dict.fromkeys(("gpt-oss", "mixtral", "xglm", "jamba"), torch.float32)  # the others in float64


def build(name, seed=0):
    """The model with random weights of a size at which heads differ."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MODELS[name][0]()
    model = model.to(DTYPES.get(name, torch.float64)).train()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if any(word in key for word in ("rel_pos", "q_bias", "bias_k")):
                value.zero_()  # these are added to queries or keys later
            elif value.dim() == 1 and "norm" not in key.lower() and "ln_" not in key:
                value.normal_()
            elif value.dim() > 1 and tf is not None and isinstance(model, tf.PreTrainedModel):
                value *= 5
    return model


def data(name, seed=1):
    """The model's inputs, by argument name."""
    draws = torch.Generator().manual_seed(seed)
    kind = MODELS[name][1]
    ids = {"input_ids": torch.randint(3, 39, (3, N), generator=draws)}
    given = {
        "text": ids,
        "causal": ids,
        "cross": ids | {"encoder_hidden_states": torch.randn(3, N, D, generator=draws)},
        "both": ids | {"decoder_input_ids": torch.randint(3, 39, (3, N), generator=draws)},
        "speech": {"input_features": torch.randn(3, 8, 12, generator=draws), "decoder_input_ids": ids["input_ids"]},
        "image": {"pixel_values": torch.randn(3, 3, 8, 8, generator=draws)},
        "image-16": {"pixel_values": torch.randn(3, 3, 16, 16, generator=draws)},
        "image-text": ids | {"pixel_values": torch.randn(3, 3, 8, 8, generator=draws)},
        "points": {
            "pixel_values": torch.randn(2, 3, 32, 32, generator=draws),
            "input_points": 32 * torch.rand(2, 1, 2, 2, generator=draws),
        },
        "image-tokens": {
            "input_ids": torch.tensor([[5, 42, 40, 40, 40, 40, 43, 6, 7]]),
            "mm_token_type_ids": torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0]]),
            "pixel_values": torch.randn(4, 3 * 16, generator=draws),
            "image_grid_thw": torch.tensor([[1, 2, 2]]),
        },
        "sound": {"input_values": torch.randn(3, 60, generator=draws)},
        "vectors": {"x": torch.randn(3, N, D, generator=draws)},
        "two vectors": {"src": torch.randn(3, N, D, generator=draws), "tgt": torch.randn(3, N, D, generator=draws)},
        "target and memory": {name: torch.randn(3, N, D, generator=draws) for name in ("tgt", "memory")},
    }[kind]
    if name == "nn.TransformerEncoder":
        given = {"src": given["x"]}
    return given


def run(model, given):
    """The first floating-point output; if there are several, the one that depends on text and image together."""
    dtype = next(model.parameters()).dtype
    given = {key: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for key, x in given.items()}
    found = model(**given)
    if torch.is_tensor(found):
        return found
    if "pred_masks" in found:  # these hardly depend on the image
        return torch.cat([found.pred_masks.flatten(), model.get_image_embeddings(given["pixel_values"]).flatten()])
    for key in ("logits", "logits_per_image"):
        if getattr(found, key, None) is not None:
            return found[key]
    return found[0]


def close(got, want, tolerance=CLOSE):
    """Equal up to `tolerance` times the largest number; NaN, for queries that see nothing, equals itself."""
    size = want.nan_to_num().abs().max().item()
    return got.shape == want.shape and torch.allclose(got, want, 0, tolerance * max(1, size), equal_nan=True)


def padded(name, side):
    """Inputs of three lengths in a batch with their attention mask, and where (3, N) tokens are."""
    ids = data(name)["input_ids"]
    lengths = [N, 4, 2]
    there = torch.arange(N) < torch.tensor(lengths)[:, None]
    there = there.flip(1) if side == "left" else there
    return {"input_ids": ids * there, "attention_mask": there.long()}, there
