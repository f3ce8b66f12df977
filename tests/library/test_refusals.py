"""What would be wrong in silence is refused in one sentence: tables for the mechanisms' shared door, and for layers,
caches and models. The error for an unknown name has the nearest known one."""

from functools import partial

import pytest
import torch
from refusals import refusals
from seeded import draw
from torch import nn

from ortho import (
    PROJECTIONS,
    ConvolvedAttention,
    EncoderDecoder,
    FrozenQKAttention,
    HybridAttention,
    InductionHeads,
    LanguageModel,
    LongformerAttention,
    MixtureOfExperts,
    MultiheadAttention,
    RandomFeatureAttention,
    SynthesizerAttention,
    TransformerBlock,
    VisionTransformer,
    attention,
)
from ortho.attention import MECHANISMS
from ortho.attention.cache import new_cache
from ortho.attention.linear.random_features import FEATURE_DRAWS
from ortho.checks import ALIASES, unknown
from ortho.layers.block import DecoderBlock
from ortho.layers.checkpointed import Checkpointed
from ortho.layers.induction import InductionProjection
from ortho.layers.short_convolution import short_convolution
from ortho.orthogonal import DRAWS
from ortho.projections import FrozenProjection, LearnedProjection, StructuredProjection

pytestmark = pytest.mark.bad_input
N, K = 5, 4
# Wrong arguments in place of right ones, and the beginning of the refusal.
TABLE = {
    "leading axes": ({"k": draw(3, N, K)}, "q, k, v: expected shapes"),
    "one axis": ({"q": draw(K), "k": draw(K), "v": draw(K)}, "q, k, v: expected shapes"),
    "integers": ({name: torch.ones(2, N, K, dtype=torch.int64) for name in "qkv"}, "q, k, v: expected one floating"),
    "dtypes": ({"v": draw(2, N, K, dtype=torch.float32)}, "q, k, v: expected one floating"),
    "width": ({"k": draw(2, N, K + 1)}, "k: expected width 4 like q"),
    "length": ({"v": draw(2, N - 1, K)}, "v: expected length 5 like k"),
    "empty": ({name: draw(2, 0, K) for name in "qkv"}, "q, k: expected no empty axes"),
    "integers as a mask": ({"attn_mask": torch.ones(N, N, dtype=torch.int64)}, "attn_mask: expected a boolean tensor"),
    "mask's shape": ({"attn_mask": torch.ones(N, N + 1, dtype=torch.bool)}, "attn_mask: expected a shape"),
    "mask's axes": ({"attn_mask": torch.ones(3, 2, N, N, dtype=torch.bool)}, "attn_mask: expected a shape"),
    "state": ({"initial_state": (draw(2, 1, K),) * 7}, "initial_state: expected"),
}
# The families whose functions take a `Call`.
FAMILIES = ("softmax", "linear", "recurrent", "position_bias", "dynamic_sparse", "sparse")
FORMS = [(name, form) for name, m in MECHANISMS.items() if m.family in FAMILIES for form in ("reference", "fast")]


@pytest.mark.parametrize(("name", "form"), FORMS)
@pytest.mark.parametrize("row", TABLE)
def test_the_door(name, form, row):
    mechanism, (wrong, message) = MECHANISMS[name], TABLE[row]
    right = {part: draw(2, N, K, seed=seed) for seed, part in enumerate("qkv")}
    if "attn_mask" not in wrong and mechanism.causal:
        right["is_causal"] = True
    with pytest.raises((TypeError, ValueError), match=message):
        mechanism.form(form)(**right | wrong)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_causal_call_needs_a_key_for_each_query(name, form):
    if not MECHANISMS[name].causal:
        pytest.skip("not causal")
    with pytest.raises(ValueError, match="is_causal: expected as many queries as keys, got 3 and 5"):
        MECHANISMS[name].form(form)(draw(2, 3, K), draw(2, N, K), draw(2, N, K), is_causal=True)


D, H, B = 8, 2, 2
X = draw(B, N, D, dtype=torch.float32)
PAIRS = torch.ones(B, B, dtype=torch.bool)
TOKENS = torch.zeros(1, 3, dtype=torch.long)


def layer(*args, **kwargs):
    return MultiheadAttention(D, H, *args, **kwargs)


def model(**kwargs):
    return LanguageModel(5, D, H, 2, **{"max_length": 4, **kwargs})


def translator(**kwargs):
    return EncoderDecoder(11, D, H, 1, **{"max_length": 12, **kwargs})


def hybrid(heads, **kwargs):
    return HybridAttention(D, H, heads=heads, **kwargs)


def convolved():
    return ConvolvedAttention(D, H)


def decoded(one, tokens=X, **kwargs):
    return one(tokens, is_causal=True, cache=one.new_cache(9), **kwargs)


def after_half(heads):
    """A hybrid layer's cache after a call that failed in its second group."""
    one = hybrid(heads)
    cache = one.new_cache(9)
    one.groups[0](X, is_causal=True, cache=cache.parts[0])
    return one(X, is_causal=True, cache=cache)


LAYERS = [
    # sizes and names
    (lambda: MultiheadAttention(D, 3), "num_heads: expected a divisor of d_model = 8, got 3"),
    (lambda: MultiheadAttention(D), "num_heads: expected an integer of at least 1, got NoneType", TypeError),
    (lambda: MultiheadAttention(D, H, embed_dim=D), "embed_dim: expected none beside d_model, got 8"),
    (lambda: layer(num_kv_heads=3), "num_kv_heads: expected a divisor of num_heads = 2, got 3"),
    (lambda: layer(head_dim=0), "head_dim: expected an integer of at least 1, got 0"),
    (lambda: layer(projection="freezed"), "projection: expected one of 'learned', .*, got 'freezed'"),
    (lambda: layer(projection=FrozenProjection(D, 4)), "projection: expected d_model, num_heads, head_dim"),
    (lambda: layer(projection=InductionProjection(D, H)), "projection: expected one that makes a token's query"),
    (lambda: layer(attention="flush"), "attention: expected one of .*got 'flush'; did you mean 'flash'"),
    (lambda: layer(attention=3), "attention: expected a name, a function or a module, got int 3", TypeError),
    (lambda: layer(attention=nn.Identity(), form="reference"), "form: expected none beside an attention without a"),
    (lambda: layer(form="slow"), "form: expected one of 'reference', 'fast', got 'slow'"),
    # options of the attention
    (lambda: layer(attention="linear", chnk=3), "options: expected one of .*got 'chnk'; did you mean 'chu", TypeError),
    (lambda: layer(batch_first=False), r"batch_first: expected True, as x is \(B, N, d\), got False"),
    (lambda: layer(attention="linear", chunk="a"), "chunk: expected an integer of at least 1, got str 'a'", TypeError),
    (lambda: layer(attention=attention.softmax_attention, width=3), "options: expected none, got 'width'", TypeError),
    (lambda: new_cache("delta", 4, width=3), "options: expected one of .*, got 'width', with the attention", TypeError),
    (lambda: attention.register("softmax", torch.add), "name: expected one that is not taken, got 'softmax'"),
    (lambda: layer(attention="delta", gates={"gama": MECHANISMS["delta"].gates["beta"]}), "gates: expected a part of"),
    (lambda: layer(gates={"beta": 3}), "gates: expected a class of gates for 'beta', got int 3", TypeError),
    # dropout and weights
    (lambda: layer(dropout=1.0), r"dropout: expected a number in \[0, 1\), got 1.0"),
    (lambda: layer(attention="gated-delta", dropout=0.1), "dropout: expected 0 with the attention gated-delta, whose"),
    (lambda: layer(attention=attention.softmax_attention, dropout=0.1), "dropout: expected 0 with the attention soft"),
    (lambda: layer(attention="ttt-huber")(X, need_weights=True), "need_weights: expected False with .*, which has no"),
    (lambda: layer(attention=RandomFeatureAttention(4))(X, need_weights=True), "need_weights: expected False with the"),
    (lambda: layer()(X, is_causal=True, need_weights=True, return_state=True), "need_weights: expected False beside a"),
    (lambda: layer(dropout=0.1)(X, is_causal=True, return_state=True), "dropout: expected 0 in training beside a sta"),
    (lambda: decoded(layer(dropout=0.1)), "dropout: expected 0 in training beside a cache, got 0.1: call eval"),
    # operands
    (lambda: layer()(X[0]), r"x: expected shape \(B, N, 8\) with B, N >= 1, got \(5, 8\)"),
    (lambda: layer()(X[:, :0]), r"x: expected shape \(B, N, 8\) with B, N >= 1, got \(2, 0, 8\)"),
    (lambda: layer()(torch.nested.nested_tensor([X[0]], layout=torch.jagged)), "x: expected a padded tensor .* and a"),
    (lambda: layer()(X, X[:1]), r"context: expected batch 2 like x, got shape \(1, 5, 8\)"),
    (lambda: layer()(X, X[:, :2], X), "value: expected the context once more, .* write layer.x. or layer.x, context."),
    (lambda: layer(attention="fox")(X, X[:, :2]), "context: expected None with 'fox', in which each query is one of"),
    # masks
    (lambda: layer()(X[:, :B], attn_mask=PAIRS), "attn_mask: expected four axes where B = N = 2"),
    (lambda: layer()(X, attn_mask=PAIRS.new_ones(B, N, N)), "attn_mask: expected four axes where B = H = 2"),
    (lambda: layer()(X, attn_mask=torch.ones(N, N, dtype=torch.long)), "attn_mask: expected a boolean", TypeError),
    (lambda: layer(attention="flash")(X, attn_mask=torch.zeros(N, N)), "attn_mask: expected a boolean", TypeError),
    (lambda: layer()(X, key_padding_mask=PAIRS), r"key_padding_mask: expected shape \(2, 5\), got \(2, 2\)"),
    (lambda: layer()(X, key_padding_mask=torch.zeros(B, N)), "key_padding_mask: expected a boolean tensor", TypeError),
    # caches
    (lambda: layer()(X, cache=layer().new_cache(9)), "is_causal: expected True beside a cache, got False"),
    (lambda: layer()(X, is_causal=True, cache=new_cache("window")), "cache: expected one for 'softmax', got one for"),
    (lambda: decoded(layer(), attn_mask=PAIRS), "attn_mask: expected none beside a cache, got a bool tensor"),
    (lambda: decoded(layer(), key_padding_mask=PAIRS.new_zeros(B, N)), "key_mask: expected None with 'softmax', whic"),
    (lambda: new_cache("softmax"), "capacity: expected a number of tokens, as softmax may read any of them, got None"),
    (lambda: new_cache("strided"), "capacity: expected a number of tokens, as strided may read any of them, got None"),
    (lambda: new_cache("efficient", 4), "attention: expected a causal mechanism, got 'efficient'"),
    (lambda: new_cache("sofmax", 4), "attention: expected one of .*, got 'sofmax'; did you mean 'softmax'"),
    (lambda: new_cache("softmax", 9).attend(X, X, X, beta=X), "gates: expected none for this .*, got beta", TypeError),
    # PyTorch's layer
    (lambda: layer(num_kv_heads=1).to_torch(), "num_kv_heads: expected num_heads = 2, got 1"),
    (lambda: layer(attention="linear").to_torch(), "attention: expected 'softmax', got 'linear'"),
    # heads of several kinds
    (lambda: hybrid({"lerned": 2}), "heads: expected one of .*, got 'lerned'; did you mean 'learned'"),
    (lambda: hybrid("learned"), r"heads: expected \(kind, number\) or .*, got str 'l'", TypeError),
    (lambda: hybrid([(3, 2)]), "heads: expected a kind's name or what makes it, got int 3", TypeError),
    (lambda: hybrid({"learned": True, "linear": 1}), "heads: expected numbers of at least 0, got bool True"),
    (lambda: hybrid({"learned": 3, "linear": -1}), "heads: expected numbers of at least 0, got int -1"),
    (lambda: hybrid({"learned": 3}), "heads: expected numbers that are together num_heads = 2, got 3"),
    (lambda: hybrid([("linear", 2, {"chnk": 3})]), "options: expected one of .*did you mean 'chunk'", TypeError),
    (lambda: hybrid({"linear": 2})(X, is_causal=True, cache=new_cache("linear")), "cache: expected one for 'HybridAtt"),
    (lambda: hybrid({"linear": 2}).new_cache().attend(X, X, X), "cache: expected to be read by a Hybrid", TypeError),
    (lambda: after_half({"linear": 1, "delta": 1}), r"cache: expected parts that have read as many .*, got \[5, 0\]"),
    (lambda: FrozenQKAttention(D, H, attention="linear"), "attention: expected none, it is softmax", TypeError),
    (lambda: FrozenQKAttention(D, H, projection="frozen"), "projection: expected one that stops the gradient"),
    (lambda: FrozenQKAttention(D, H)(X, word=1), "unexpected keyword argument 'word'", TypeError),
    # other layers
    (lambda: InductionHeads(D, H, sink=1.0), r"sink: expected a number in \(0, 1\), got 1.0"),
    (lambda: InductionHeads(D, H, key_dim=2), "key_dim: expected at least the values' width 4, got 2"),
    (lambda: InductionHeads(D, H, sharpness=0), "sharpness: expected a number above 0, got 0"),
    (lambda: InductionProjection(D, H)(X, X), "context: expected None with keys a token late, got a float32 tensor"),
    (lambda: StructuredProjection(D, 3, head_dim=4), "head_dim: expected heads of at most d_model = 8 together, got"),
    (lambda: LearnedProjection(D, 0), "num_heads: expected an integer of at least 1, got 0"),
    (lambda: LongformerAttention(D, H)(X, is_causal=True), "is_causal: expected False, since global tokens see the"),
    (lambda: MixtureOfExperts(D, 2, top_k=3), "top_k: expected at most num_experts = 2, got 3"),
    (lambda: MixtureOfExperts(D, 2, capacity_factor=0), "capacity_factor: expected a positive number, got 0"),
    (lambda: Checkpointed([]), "blocks: expected at least one, got none"),
    (lambda: Checkpointed([TransformerBlock(D, H)])(X, cache=1), "cache: expected None, as each block needs its own"),
    (lambda: SynthesizerAttention(D, H, 4)(X), "x: expected at most 4 tokens, got 5"),
    (lambda: SynthesizerAttention(D, H, 4, source="radom"), "source: expected one of .*; did you mean 'random'"),
    (lambda: SynthesizerAttention(D, H, 4, source="dense", head_dim=4), "source: expected sources by position beside"),
    (lambda: convolved()(X, attn_mask=X[:1] > 0), "attn_mask: expected a shape that broadcasts"),
    (lambda: convolved()(X, return_state=True), "cache: expected one in place of a state, got return_state"),
    (lambda: convolved().new_cache(9).attend(X, X, X), "cache: expected to be read by a ConvolvedAttent", TypeError),
    (lambda: RandomFeatureAttention(4, 0), "m: expected an integer of at least 1, got 0"),
    (lambda: layer(attention=RandomFeatureAttention(5))(X), r"features: expected shape \(rows, 4\), as wide as q, got"),
    (lambda: short_convolution(X, X[0, :4], X[:, :2]), r"initial_state: expected conv_state torch.float32 of shape ."),
    (lambda: DecoderBlock(D, H)(X, X[:1]), "context: expected batch 2 like x, got 1"),
    (lambda: DecoderBlock(D, H)(X[:, :B], X[:, :B], context_mask=PAIRS), "context_mask: expected four axes where B ="),
    # models
    (lambda: model(dropout=1.0), r"dropout: expected a number in \[0, 1\), got 1.0"),
    (lambda: model(max_length=None, positions="sinusoidal"), "max_length: expected a number beside sinusoidal"),
    (lambda: model()(TOKENS[0]), r"tokens: expected shape \(B, N\) with B, N >= 1, got \(3,\)"),
    (lambda: model()(TOKENS.repeat(1, 2)), "tokens: expected at most 4 positions, got 6"),
    (lambda: model()(TOKENS, key_padding_mask=PAIRS), r"key_padding_mask: expected shape \(1, 3\), got \(2, 2\)"),
    (lambda: model()(TOKENS, caches=model().new_caches()[:1]), "caches: expected 2, one a block, got 1"),
    (lambda: model().generate(TOKENS, 3), "tokens: expected at most 4 positions, got 5"),
    (lambda: model().generate(TOKENS, 0), "count: expected an integer of at least 1, got 0"),
    (lambda: model().generate(TOKENS, 1, temperature=-1.0), "temperature: expected a number of at least 0, got -1.0"),
    (lambda: model().generate(TOKENS, 1, top_k=0), "top_k: expected an integer of at least 1, got 0"),
    (lambda: model().generate(TOKENS, 1, stop=5), "stop: expected an index in 0..4, got 5"),
    (lambda: model().generate(TOKENS, 1, key_padding_mask=TOKENS == 0), "key_padding_mask: expected a token in each"),
    (
        lambda: LanguageModel(5, D, H, 1, max_length=4, layer=partial(SynthesizerAttention, max_length=4)).new_caches(),
        "layer: expected one with `new_cache`, to decode token by token, got SynthesizerAttention",
        TypeError,
    ),
    (lambda: translator(cross={"attention": "rotary"}), "cross: expected a mechanism that answers .*, got 'rotary'"),
    (lambda: translator(cross={"attention": "efficient-causal"}), "cross: expected a mechanism .*, got 'efficient-c"),
    (lambda: translator(cross={"layer": InductionHeads}), "cross: expected a MultiheadAttention, .*Induc", TypeError),
    (lambda: translator()(TOKENS, TOKENS.repeat(2, 1)), "target: expected batch 1 like the source, got shape"),
    (lambda: translator()(TOKENS, TOKENS.repeat(1, 5)), "target: expected at most 12 positions, got 15"),
    (lambda: translator()(TOKENS, TOKENS, PAIRS), r"source_mask: expected a boolean tensor of shape \(1, 3\) like so"),
    (lambda: translator().generate(TOKENS, start=11, stop=2), "start: expected an index in 0..10, got 11"),
    (lambda: translator().generate(TOKENS, start=1, stop=2, max_length=13), "max_length: expected at most 12 posi"),
    (lambda: VisionTransformer(8, 3, D, H, 1, num_classes=2), "patch_size: expected a divisor of image_size = 8, got"),
    (lambda: VisionTransformer(8, 4, D, H, 1, num_classes=2)(X), r"images: expected shape \(B, 3, 8, 8\) with B >= 1"),
]


@refusals(LAYERS)
def test_layers_and_models(refused):
    refused()


# -------------------------------------------------------------------------------------------------------- unknown names


@pytest.mark.parametrize(
    ("asked", "known", "meant"),
    [
        ("rope", MECHANISMS, "rotary"), ("RoPE", MECHANISMS, "rotary"), ("sliding_window", MECHANISMS, "window"),
        ("performer", MECHANISMS, "favor"), ("FAVOR+", MECHANISMS, "favor"), ("GLA", MECHANISMS, "gla"),
        ("softmax-attention", MECHANISMS, "softmax"), ("sofmax", MECHANISMS, "softmax"),
        ("sdpa", MECHANISMS, "softmax"),
        ("deltanet", MECHANISMS, "delta"), ("gated deltanet", MECHANISMS, "gated-delta"),
        ("top_k", MECHANISMS, "top-k"),
        ("trained", PROJECTIONS, "learned"), ("gram-schmidt", DRAWS, "gram_schmidt"), ("qr", DRAWS, "haar"),
        ("gaussian", FEATURE_DRAWS, "iid"), ("zzzz", MECHANISMS, None), ("", MECHANISMS, None), (3, MECHANISMS, None),
    ],
)  # fmt: skip
def test_the_nearest_name(asked, known, meant):
    said = unknown("name", asked, known)
    assert said.endswith(f"got {asked!r}" + (f"; did you mean {meant!r}?" if meant else ""))


def test_each_alias_leads_to_a_known_name_and_is_none_itself():
    named = {*MECHANISMS, *PROJECTIONS, *DRAWS, *FEATURE_DRAWS, "fast", "reference", "sinusoidal", "mqar", "recall"}
    named |= {"positive", "rff"}
    assert {name for names in ALIASES.values() for name in names} <= named
    assert not any(one in ALIASES[one] for one in ALIASES)
