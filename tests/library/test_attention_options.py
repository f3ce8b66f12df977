"""What a layer takes beside names: options of the mechanism, functions, masks of numbers, padding beside a state."""

import copy
from functools import partial

import pytest
import torch
from seeded import draw, generator

import ortho
from ortho import HybridAttention, LanguageModel, MultiheadAttention, cost
from ortho.attention import MECHANISMS, linear_attention, register
from ortho.attention.cache import new_cache

B, N, D, H = 3, 9, 16, 4
SUMS = ["linear", "favor", "delta", "gated-delta", "ssd", "gla", "selective-scan"]


def layer(**kwargs):
    return MultiheadAttention(D, H, generator=generator(1), dtype=torch.float64, **kwargs)


def close(a, b):
    """Equal but for the order of float64 sums of a few terms of size 1."""
    torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-9)


def test_options_reach_the_mechanism_and_its_cache():
    x = draw(B, N, D)
    one, plain = layer(attention="delta", qk_l2norm=False, chunk=3), layer(attention="delta")
    plain.load_state_dict(one.state_dict())
    q, k, v, gates = one._operands(0.3 * x, None)
    found = one(0.3 * x, is_causal=True)
    close(found, one._merge(MECHANISMS["delta"].reference(q, k, v, is_causal=True, qk_l2norm=False, **gates)))
    assert (found - plain(0.3 * x, is_causal=True)).abs().max() > 1e-3
    cache = one.new_cache()
    close(torch.cat([one(0.3 * x[:, t : t + 1], is_causal=True, cache=cache) for t in range(N)], 1), found)
    assert "attention=delta, qk_l2norm=False, chunk=3, form='fast'" in repr(one)


def test_options_reach_a_ring():
    """It holds the three keys and values of a window of three, and reads on as the layer."""
    one, x = layer(attention="window", width=3), draw(B, N, D)
    cache = one.new_cache()
    read = [one(x[:, t : t + 1], is_causal=True, cache=cache) for t in range(N)]
    close(torch.cat(read, 1), one(x, is_causal=True))
    assert cache.nbytes == 2 * 8 * B * D * 3


def test_options_in_models_and_beside_other_heads():
    model = LanguageModel(7, D, H, 2, max_length=N, attention="linear", chunk=2)
    assert [block.attention.options for block in model.blocks] == [{"chunk": 2}] * 2
    heads = [("learned", 1), ("linear", 2, {"chunk": 2}), (partial(MultiheadAttention, attention="window"), 1)]
    hybrid = HybridAttention(D, H, heads=heads)
    assert hybrid.groups[1].options == {"chunk": 2}
    assert hybrid.new_cache(N).parts[1].attention == "linear, chunk=2"
    found = cost.hybrid(B, N, D, H, heads=[("learned", 2), ("linear", 2, {"chunk": 3})], causal=True)
    assert found.forward < cost.hybrid(B, N, D, H, heads={"learned": 2, "linear": 2}, causal=True).forward


def mean_attention(q, k, v, *, is_causal=False, attn_mask=None, scale=None, initial_state=None, return_state=False):
    """The mean of the values so far, a user's own."""
    assert is_causal and attn_mask is scale is None
    total, count = initial_state or (0 * v[..., :1, :], 0)
    sums, counts = total + v.cumsum(-2), count + torch.arange(1, v.shape[-2] + 1)[:, None]
    return (sums / counts, (sums[..., -1:, :], counts[-1])) if return_state else sums / counts


@pytest.mark.unchecked
@pytest.mark.parametrize("kind", ["function", "registered", "partial"])
def test_a_function_is_an_attention(kind, monkeypatch):
    monkeypatch.setattr("ortho.attention.MECHANISMS", MECHANISMS)
    attention, name = mean_attention, "mean of the values"
    if kind == "registered":
        attention = register(name, mean_attention).name
    elif kind == "partial":
        attention = partial(mean_attention, scale=None)
    try:
        one, x = layer(attention=attention), draw(B, N, D)
        whole = one(x, is_causal=True)
        cache = one.new_cache()
        first = one(x[:, :4], is_causal=True, cache=cache)
        rest = one(x[:, 4:], is_causal=True, cache=copy.deepcopy(cache))
        close(torch.cat([first, rest], 1), whole)
        if kind == "registered":
            hybrid = HybridAttention(D, H, heads={name: H}, dtype=torch.float64)
            assert hybrid(x, is_causal=True).shape == x.shape
            with pytest.raises(ValueError, match="expected a mechanism with a closed form, got 'mean of the values'"):
                cost.layer(B, N, D, H, attention=name)
    finally:
        MECHANISMS.pop(name, None)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("of", ["state", "cache"])
def test_prompts_of_unequal_length_are_decoded_together(name, of):
    """Where a state sums up the keys: as each prompt alone, read without its padding."""
    lengths, x = (4, 2, 3), draw(B, 4 + 2, D)
    padding = torch.tensor([[t < 4 - n for t in range(4)] for n in lengths])
    one = layer(attention=name)
    call = {"is_causal": True}
    if of == "state":
        _, state = one(x[:, :4], key_padding_mask=padding, return_state=True, **call)
        wide = torch.cat([padding, padding.new_zeros(B, 2)], 1)
        found = one(x[:, 4:], key_padding_mask=wide, initial_state=state, **call)
    else:
        cache = one.new_cache()
        one(x[:, :4], key_padding_mask=padding, cache=cache, **call)
        found = one(x[:, 4:], cache=cache, **call)
    for row, n in enumerate(lengths):
        close(found[row], one(x[row : row + 1, 4 - n :], **call)[0, n:])


def test_masks_of_numbers_where_softmax_is_exact():
    """As PyTorch's layer: added to the scores; with padding beside it."""
    one, x = layer(), draw(B, N, D)
    theirs, bias = one.to_torch(), draw(N, N, seed=4)
    padding = torch.zeros(B, N, dtype=torch.bool)
    padding[1, 6:] = True
    wide = torch.zeros(B, N, dtype=torch.float64).masked_fill(padding, -torch.inf)
    want = theirs(x, x, x, attn_mask=bias, key_padding_mask=wide, need_weights=False)[0]
    for form in ("fast", "reference"):
        close(layer(form=form)(x, x, x, attn_mask=bias, key_padding_mask=padding), want)
    close(HybridAttention(D, H, heads={"softmax": H}, generator=generator(1), dtype=torch.float64)(x, attn_mask=bias),
          theirs(x, x, x, attn_mask=bias, need_weights=False)[0])  # fmt: skip
    exchanged = ortho.FrozenQKAttention(D, H, dtype=torch.float64)
    close(exchanged(x, attn_mask=bias), ortho.to_standard(exchanged)(x, attn_mask=bias))


def test_no_two_blocks_share_a_module():
    attention = ortho.RandomFeatureAttention(D // H)
    model = LanguageModel(7, D, H, 2, max_length=N, attention=attention)
    one, two = (block.attention.attention for block in model.blocks)
    assert one is not two and one is not attention and torch.equal(one.features, two.features)
    heads = [(partial(MultiheadAttention, attention=attention), H)]
    model = LanguageModel(7, D, H, 2, max_length=N, layer=HybridAttention, heads=heads)
    assert len({id(module) for module in model.modules() if type(module) is type(attention)}) == 2


def test_tied_embeddings_stay_tied():
    model = ortho.EncoderDecoder(7, D, H, 1, max_length=N)
    state = model.state_dict()
    assert sum("embed" in name and "tokens" in name for name in state) == 1
    model.load_state_dict({**state, "embed_source.tokens": state["embed_target.tokens"]}, assign=True)
    tokens = torch.zeros(1, 3, dtype=torch.long)
    model(tokens, tokens).sum().backward()
    assert model.embed_target.tokens.grad is not None and model.embed_source.tokens is None


def test_new_caches_of_functions():
    q, k, v = (draw(1, 2, N, 4, seed=i) for i in range(3))
    cache = new_cache(linear_attention)
    close(torch.cat([cache.attend(*(x[..., t : t + 1, :] for x in (q, k, v))) for t in range(N)], -2),
          linear_attention(q, k, v, is_causal=True))  # fmt: skip
    with pytest.raises(ValueError, match="function: expected the linear_attention that a copied cache was made for"):
        cache.copy().attend(q, k, v)
    assert isinstance(cache.copy().attend(q, k, v, function=linear_attention), torch.Tensor)
    with pytest.raises(ValueError, match="attention: expected a function or module that takes initial_state"):
        MultiheadAttention(D, H, attention=torch.nn.functional.softmax).new_cache(N)
