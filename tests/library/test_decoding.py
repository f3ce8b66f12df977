"""Caches: reading piece by piece gives the outputs of the whole; memory held; the cost of a token; errors."""

from itertools import pairwise, product

import pytest
import sympy as sp
import torch
from extent import some
from refusals import refusals, refuses
from seeded import draw

from ortho import MECHANISMS, LanguageModel, MultiheadAttention, RandomFeatureAttention
from ortho.attention.cache import PatternCache, StateCache, new_cache
from ortho.attention.sparse.block_sparse import BigBird, BlockSparse
from ortho.attention.sparse.dilated import Dilated, LocalDilated, NeitherFarNorMultiple
from ortho.attention.sparse.fixed import Fixed, FixedColumns
from ortho.attention.sparse.global_local import GlobalLocal
from ortho.attention.sparse.pattern import pattern_mechanism
from ortho.attention.sparse.strided import LocalStrided, Strided
from ortho.attention.sparse.window import BlockedWindow, Window
from ortho.cost.attention import decoded, read_keys
from ortho.cost.counting import flops_of

CAUSAL = [name for name, m in MECHANISMS.items() if m.causal]
RECURRENT = [name for name in CAUSAL if MECHANISMS[name].family in ("linear", "recurrent")]
FORMS = ["reference", "fast"]
PATTERNS = {
    "window": Window(5),
    "window of one": Window(1),
    "blocks": BlockedWindow(4),
    "overlapping": BlockedWindow(6, hop=4),
    "dilated": Dilated(3, 4),
    "inverted": NeitherFarNorMultiple(4),
    "global and local": GlobalLocal(4, 3),
    "near blocks": BigBird(3, reach=2, leading=1, random=0),
    "big bird": BigBird(3, reach=2, leading=1, random=1),
    "table": BlockSparse(8, ((0,), (0, 1), (2,), (0, 3), (1, 4))),
    "strided": Strided(5),
    "local-strided": LocalStrided(4),
    "local and dilated": LocalDilated(4),
    "fixed-columns": FixedColumns(4, 2),
    "fixed": Fixed(4, 1),
}
LENGTH = 40
CUTS = {"tokens": range(LENGTH + 1), "pieces": (0, 7, 8, 9, 21, 22, LENGTH), "whole": (0, LENGTH)}
# Sums of at most 1e3 rounded products in another order, with errors magnified by exponentials of scores up to 20 (see
# tests/library/test_properties.py); a wrong term would show at 1e-2.
CLOSE = {"atol": 1e-10, "rtol": 1e-10}


def qkv(*, heads=4, shared=4, length=LENGTH, width=6, dtype=torch.float64):
    sizes = [(2, heads, length, width), (2, shared, length, width), (2, shared, length, width)]
    return [draw(*size, seed=i, dtype=dtype) for i, size in enumerate(sizes)]


def gates_of(mechanism):
    tokens = draw(2, 9, 24, dtype=torch.float32)
    return {gate: make(24, 4)(tokens).detach() for gate, make in mechanism.gates.items()}


def in_pieces(cache, operands, cuts, **kwargs):
    rows = []
    for start, stop in pairwise(cuts):
        rows.append(cache.attend(*(x[..., start:stop, :] for x in operands), **kwargs))
        assert cache.length == stop
    return torch.cat(rows, -2)


@pytest.mark.parametrize(("name", "form", "cuts"), some(product(CAUSAL, FORMS, CUTS.values()), 2))
def test_pieces_give_what_the_whole_gives(name, form, cuts):
    """Tested in a layer, which makes a mechanism's gates; also where three heads of queries share one head of keys, as
    always where tokens come one by one. A copy of the cache reads on independently."""
    x = draw(2, LENGTH, 24)
    for shared in (6, 2) if len(cuts) < LENGTH else (2,):
        generator = torch.Generator().manual_seed(1)
        kind = {"num_kv_heads": shared, "attention": name, "form": form, "dtype": torch.float64}
        layer = MultiheadAttention(24, 6, generator=generator, **kind)
        cache, rows = layer.new_cache(LENGTH), []
        for a, b in pairwise(cuts):
            other = cache.copy()
            layer(-x[:, a:b], is_causal=True, cache=other)
            rows.append(layer(x[:, a:b], is_causal=True, cache=cache))
            assert (other.length, other.nbytes) == (cache.length, cache.nbytes)
        torch.testing.assert_close(torch.cat(rows, 1), layer(x, is_causal=True), **CLOSE)


def cache_of(pattern, capacity, form="fast"):
    whole = pattern_mechanism("under test", type(pattern), "", **vars(pattern)).form(form)
    return PatternCache("under test", pattern, MECHANISMS["softmax"].form(form), whole, capacity), whole


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_a_ring_forgets_nothing_that_is_read(pattern, form, cuts):
    """The patterns reach less far than the sequence is long, so that the ring turns several times."""
    q, k, v = qkv()
    expected = pattern_mechanism("under test", type(pattern), "", **vars(pattern)).form(form)(q, k, v, is_causal=True)
    cache, _ = cache_of(pattern, LENGTH, form)
    torch.testing.assert_close(in_pieces(cache, (q, k, v), cuts), expected, **CLOSE)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_what_is_kv_window_is_what_is_read(pattern):
    """No query reads a key beyond the first few and the last few; the farthest of these is read."""
    mask = pattern.mask(LENGTH, is_causal=True)
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    kv_window = pattern.kv_window()
    if kv_window is None:
        assert (mask & (i - j >= LENGTH // 2)).any()
    else:
        first, last = kv_window
        assert not (mask & (j >= first) & (i - j >= last)).any()
        assert (mask & (i - j == last - 1)).any()
        assert not first or (mask & (j == first - 1) & (i - j >= last)).any()


@pytest.mark.parametrize("pattern", [Window(5), GlobalLocal(4, 3)])
def test_a_ring_reads_without_end(pattern):
    q, k, v = qkv()
    cache, whole = cache_of(pattern, None)
    expected = whole(q, k, v, is_causal=True)
    torch.testing.assert_close(in_pieces(cache, (q, k, v), CUTS["tokens"]), expected, **CLOSE)
    assert cache.nbytes == 2 * 8 * 2 * 4 * 6 * sum(pattern.kv_window())


@pytest.mark.parametrize("name", CAUSAL)
def test_counted(name):
    """FLOPs of each token, and bytes of a cache that is exactly full, are as declared, with shared heads or not."""
    for shared, lengths in ((4, range(1, 10)), (1, (1, 9))):
        mechanism = MECHANISMS[name]
        gates = gates_of(mechanism)
        operands = qkv(shared=shared, length=9, dtype=torch.float32)
        for length in lengths:
            cache = new_cache(name, length)
            if length > 1:
                before = {gate: _tokens(value, 0, length - 1) for gate, value in gates.items()}
                cache.attend(*(x[..., : length - 1, :] for x in operands), **before)
            last = {gate: _tokens(value, length - 1, length) for gate, value in gates.items()}
            flops = flops_of(cache.attend, *(x[..., length - 1 : length, :] for x in operands), **last)
            declared = decoded(name, 2, length, 4, 6, 6, num_kv_heads=shared)
            assert (flops, cache.nbytes) == (declared.forward, declared.nbytes), length


def _tokens(gate, start, stop):
    """The numbers of some tokens, from a gate (B, H, N) or (B, H, N, ...)."""
    return gate[:, :, start:stop]


def test_kinds():
    """Softmax attention keeps keys and values, a pattern what may be read, anything else its state."""
    kinds = {name: type(new_cache(name, 64)).__name__ for name in CAUSAL}
    for name, kind in kinds.items():
        family = {"sparse": "PatternCache", "softmax": "KeyValueCache"}.get(MECHANISMS[name].family, "StateCache")
        assert kind == ("RotaryCache" if name == "rotary" else family)
    assert isinstance(new_cache(RandomFeatureAttention(6), None), StateCache)


def test_grouped_queries_divide_the_bytes():
    """One head of keys for eight of queries takes an eighth of the bytes; a window's cache has one size at all
    lengths."""
    whole, shared = (decoded("softmax", 1, 4096, 8, 64, 64, num_kv_heads=G) for G in (8, 1))
    assert (whole.nbytes, whole.forward) == (8 * shared.nbytes, shared.forward)
    assert whole.nbytes == 2 * 8 * 64 * 4096 * 4
    lengths = (4096, 65536)
    assert len({decoded("window", 1, n, 8, 64, 64).nbytes for n in lengths}) == 1
    assert read_keys(Window(256), 4096) == 256


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["softmax", "rotary", "window", "linear", "delta"])
def test_half_precision(name, dtype):
    """Outputs are averages of values of size 1, and rounded to the dtype only a few times."""
    q, k, v = (x.to(dtype) for x in qkv(shared=2))
    spread = [x.repeat_interleave(2, 1) for x in (k, v)]
    got = in_pieces(new_cache(name, LENGTH), (q, k, v), CUTS["tokens"])
    expected = MECHANISMS[name].fast(q, *spread, is_causal=True)
    assert got.dtype == dtype
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, atol=bound * float(expected.abs().max()), rtol=bound)


def test_a_cache_has_no_gradients():
    q, k, v = (x.requires_grad_() for x in qkv())
    for name in ("softmax", "window", "linear"):
        assert not new_cache(name, LENGTH).attend(q, k, v).requires_grad
    layer, x = MultiheadAttention(8, 2), torch.zeros(1, 3, 8, requires_grad=True)
    assert not layer(x, is_causal=True, cache=layer.new_cache(3)).requires_grad
    one = model()
    assert not one(torch.zeros(1, 3, dtype=torch.long), caches=one.new_caches()).requires_grad


def test_random_features_of_its_own():
    attend = RandomFeatureAttention(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, k, v = qkv()
    got = in_pieces(new_cache(attend, LENGTH), (q, k, v), CUTS["pieces"])
    torch.testing.assert_close(got, attend(q, k, v, is_causal=True), **CLOSE)


def model(**kwargs):
    generator = torch.Generator().manual_seed(0)
    return LanguageModel(13, 8, 2, 2, max_length=16, generator=generator, dtype=torch.float64, **kwargs)


@pytest.mark.parametrize("attention", ["softmax", "window", "delta"])
def test_a_model_reads_on(attention):
    one = model(attention=attention, num_kv_heads=1, bias=True)
    tokens = torch.randint(13, (2, 16), generator=torch.Generator().manual_seed(1))
    caches = one.new_caches()
    rows = [one(tokens[:, a:b], caches=caches) for a, b in pairwise((0, 5, 6, 7, 16))]
    torch.testing.assert_close(torch.cat(rows, 1), one(tokens), **CLOSE)


def test_generate():
    """At temperature 0 each token is the likeliest after those before it; drawn ones depend on the generator alone."""
    one = model()
    tokens = torch.randint(13, (3, 4), generator=torch.Generator().manual_seed(1))
    greedy = one.generate(tokens, 12, temperature=0.0)
    assert torch.equal(greedy[:, :4], tokens)
    for stop in range(4, 16):
        assert torch.equal(greedy[:, stop], one(greedy[:, :stop])[:, -1].argmax(-1))
    drawn = [one.generate(tokens, 12, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def change(names, function):
    """A call in which some of q, k and v are replaced by `function` of them."""
    return lambda call, *qkv: call(*(function(x) if name in names else x for name, x in zip("qkv", qkv, strict=True)))


KIND, SHAPE = "expected torch.float64 on cpu like", r"expected shape \(2, 4, 1, 6\) like"
REFUSED = {
    "k alone": (
        change("k", torch.Tensor.float),
        "q: expected torch.float32 on cpu like k, got torch.float64",
        TypeError,
    ),
    "q alone": (change("q", torch.Tensor.float), f"q: {KIND} k", TypeError),
    "another dtype": (change("qkv", torch.Tensor.float), f"k: {KIND} the tokens before, got torch.float32", TypeError),
    "another device": (change("qkv", lambda x: x.to("meta")), f"k: {KIND} the tokens before, .* on meta", TypeError),
    "another batch": (change("qkv", lambda x: x[:1]), f"k: {SHAPE} the tokens before, got"),
    "q of another batch": (change("q", lambda x: x[:1]), f"q: {SHAPE} k with a multiple of 4 for 4, got"),
    "heads": (change("kv", lambda x: x[:, :3]), "q: expected shape .* like k with a multiple of 3 for 3, got"),
    "width of q": (change("q", lambda x: x[..., :5]), f"q: {SHAPE} k"),
    "widths": (change("qk", lambda x: x[..., :5]), f"k: {SHAPE} the tokens before, got"),
    "width of v": (change("v", lambda x: x[..., :5]), f"v: {SHAPE} the tokens before, got"),
    "length of v": (
        change("v", lambda x: x.expand(-1, -1, 2, -1)),
        r"v: expected shape \(2, 4, 1, 'V'\) like k, got \(2, 4, 2, 6\)",
    ),
    "no tensor": (change("k", lambda _: None), "k: expected a floating-point tensor, got NoneType None", TypeError),
    "no token": (change("qkv", lambda x: x[..., :0, :]), r"k: expected shape \(..., n, width\) without empty"),
    "NaN": (change("k", lambda x: x * torch.nan), "k: expected finite numbers, got 48 NaN"),
    "infinity": (change("q", lambda x: x * torch.inf), "q: expected finite numbers"),
    "no room": (
        change("qkv", lambda x: x.expand(-1, -1, 3, -1)),
        "k: expected at most 2 tokens more in a cache of capacity 9, got 3",
    ),
}


@pytest.mark.parametrize("name", ["softmax", "rotary", "window", "linear", "delta"])
@refusals(REFUSED.values())
def test_a_refused_token_leaves_the_cache_as_it_was(name, refused):
    q, k, v = qkv(length=8)
    cache, undisturbed = new_cache(name, 9), new_cache(name, 9)
    for one in (cache, undisturbed):
        one.attend(*(x[..., :7, :] for x in (q, k, v)))
    last = [x[..., 7:, :] for x in (q, k, v)]
    refused(cache.attend, *last)
    assert cache.length == 7
    assert torch.equal(cache.attend(*last), undisturbed.attend(*last))


@pytest.mark.parametrize("name", ["softmax", "rotary", "window"])
def test_first_tokens_that_are_refused_leave_nothing(name):
    """They are refused, as the kernel needs values as wide as keys; then other tokens come, of another dtype."""
    q, k, v = qkv(length=5)
    cache = new_cache(name, 9)
    for piece in (slice(0, 1), slice(0, 5)):
        tokens = [x[..., piece, :] for x in (q, k, v[..., :4])]
        refuses("v: expected width 6 like q, for the fused kernel", cache.attend, *tokens)
    assert (cache.length, cache.nbytes) == (0, 0)
    q, k, v = (x.float() for x in (q, k, v))
    assert torch.equal(cache.attend(q, k, v), MECHANISMS[name].fast(q, k, v, is_causal=True))


@pytest.mark.parametrize("pattern", [Window(5), GlobalLocal(4, 3)])
def test_a_piece_that_fails_leaves_the_ring_as_it_was(pattern):
    q, k, v = qkv()
    cache, whole = cache_of(pattern, None)
    softmax, expected = cache._softmax, whole(q, k, v, is_causal=True)
    cache.attend(*(x[..., :9, :] for x in (q, k, v)))

    def fails(*_, **__):
        raise RuntimeError("out of memory")

    cache._softmax = fails
    refuses("out of memory", cache.attend, *(x[..., 9:30, :] for x in (q, k, v)), error=RuntimeError)
    cache._softmax = softmax
    rest = [cache.attend(*(x[..., a:b, :] for x in (q, k, v))) for a, b in ((9, 20), (20, LENGTH))]
    torch.testing.assert_close(torch.cat(rest, -2), expected[..., 9:, :], **CLOSE)


@pytest.mark.parametrize("name", CAUSAL)
def test_what_was_read_is_the_callers_again(name):
    """The caller may reuse a buffer of tokens for the next tokens."""
    mechanism = MECHANISMS[name]
    gates = gates_of(mechanism)
    q, k, v = qkv(length=9, dtype=torch.float32)
    expected = mechanism.fast(q, k, v, is_causal=True, **gates)[..., -1:, :]
    cache = new_cache(name, 9)
    first = {"q": q, "k": k, "v": v, **gates}
    buffers = {key: _tokens(x, 0, 8).clone() for key, x in first.items()}
    cache.attend(**buffers)
    for buffer in buffers.values():
        buffer.fill_(0.5)
    got = cache.attend(**{key: _tokens(x, 8, 9) for key, x in first.items()})
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)  # float32 in other sums; 0.5 for k would show at 1


def test_what_inference_mode_has_read_is_read_on_outside():
    q, k, v = qkv()
    for name in ("softmax", "window", "delta", "alibi"):
        cache = new_cache(name, LENGTH)
        with torch.inference_mode():
            cache.attend(*(x[..., :30, :] for x in (q, k, v)))
        rest = cache.attend(*(x[..., 30:, :] for x in (q, k, v)))
        expected = MECHANISMS[name].fast(q, k, v, is_causal=True)[..., 30:, :]
        torch.testing.assert_close(rest, expected, **CLOSE)


def test_positions_stay_on_the_cpu():
    q, k, v = qkv(length=9)
    with torch.device("meta"):
        cache, _ = cache_of(Window(5), None)
    expected = pattern_mechanism("under test", Window, "", width=5).fast(q, k, v, is_causal=True)
    torch.testing.assert_close(in_pieces(cache, (q, k, v), range(10)), expected, **CLOSE)


@pytest.mark.bad_input
def test_errors():
    refuses("attention: expected one of .*, got 'sofmax'; did you mean 'softmax'", new_cache, "sofmax", 4)
    refuses("attention: expected a causal mechanism, got 'efficient'", new_cache, "efficient", 4)
    for name in ("softmax", "rotary", "strided"):
        refuses("capacity: expected a number of tokens, as .* got None", new_cache, name)
    for name in ("softmax", "window"):
        with pytest.raises(TypeError, match="gates: expected none for this mechanism, got beta"):
            new_cache(name, 9).attend(*qkv(length=1), beta=torch.ones(2, 4, 1))
    refuses("scale: expected a number", new_cache("linear").attend, *qkv(length=1), scale="large", error=TypeError)
    with pytest.raises(ValueError, match="num_kv_heads: expected a divisor of num_heads = 4, got 3"):
        decoded("window", 1, 4, 4, 4, 4, num_kv_heads=3)
    with pytest.raises(TypeError, match="N: expected an integer, as the pairs of a pattern are counted"):
        decoded("window", 1, sp.Symbol("N"), 2, 4, 4)


@pytest.mark.bad_input
def test_errors_of_layers():
    layer, x = MultiheadAttention(8, 2), torch.zeros(1, 3, 8)
    refuses("cache: expected a Cache, got tuple of 0", layer, x, is_causal=True, cache=(), error=TypeError)
    with pytest.raises(ValueError, match="cache: expected one for 'softmax', got one for 'window'"):
        layer(x, is_causal=True, cache=new_cache("window"))
    refuses("is_causal: expected True beside a cache", layer, x, cache=layer.new_cache(4))
    mask, state = torch.ones(3, 3, dtype=torch.bool), (torch.zeros(1, 2, 1, 4),) * 2
    others = {"context": x, "attn_mask": mask, "initial_state": state, "return_state": True}
    for name, value in others.items():
        with pytest.raises(ValueError, match=f"{name}: expected none beside a cache"):
            layer(x, is_causal=True, cache=layer.new_cache(4), **{name: value})
    for kind in ({"num_kv_heads": 3}, {"num_kv_heads": 4}):
        refuses("num_kv_heads: expected a divisor of num_heads = 2", MultiheadAttention, 8, 2, **kind)
    with pytest.raises(ValueError, match="projection: expected d_model, num_heads, head_dim, num_kv_heads and bias"):
        MultiheadAttention(8, 2, num_kv_heads=1, projection=layer.projection)
    refuses("num_kv_heads: expected num_heads = 2, got 1", MultiheadAttention(8, 2, num_kv_heads=1).to_torch)


@pytest.mark.bad_input
def test_errors_of_models():
    one, tokens = model(), torch.zeros(1, 3, dtype=torch.long)
    refuses("caches: expected 2, one a block, got 1", one, tokens, caches=one.new_caches()[:1])
    assert one.generate(tokens, 14).shape == (1, 17)  # the last one is not read
    refuses("count: expected an integer of at least 1", one.generate, tokens, 2.0, error=TypeError)
    caches = one.new_caches(4)
    one(tokens, caches=caches)
    refuses("k: expected at most 1 tokens more in a cache of capacity 4, got 2", one, tokens[:, :2], caches=caches)
    assert [cache.length for cache in caches] == [3, 3]
    refuses("caches: expected a sequence .of a Cache each., got list of 2", one, tokens, caches=[None, None])
    one.blocks[0].attention(torch.zeros(1, 1, 8, dtype=torch.float64), is_causal=True, cache=caches[0])
    refuses(r"caches: expected caches that have read as many tokens, got \[4, 3\]", one, tokens[:, :1], caches=caches)


@pytest.mark.parametrize("name", ["softmax", "window", "rotary", "delta"])
def test_a_copy_made_in_inference_mode_is_used_outside_it(name):
    q, k, v = (draw(2, 4, 6, 4, seed=i) for i in range(3))
    cache = new_cache(name, 32)
    cache.attend(q, k, v)
    with torch.inference_mode():
        copied = cache.copy()
    last = [x[:, :, :1] for x in (q, k, v)]
    assert torch.equal(copied.attend(*last), cache.attend(*last))


@pytest.mark.parametrize("name", ["softmax", "window", "strided", "big-bird"])
def test_narrow_values_are_refused_before_anything_is_kept(name):
    q, k, v = (draw(2, 4, 6, 4, seed=i) for i in range(3))
    cache = new_cache(name, 64)
    refuses(r"^v: expected width 4 like q", cache.attend, q, k, v[..., :2])
    assert (cache.length, cache.nbytes) == (0, 0)
    whole = new_cache(name, 64).attend(q, k, v)
    assert torch.equal(cache.attend(q, k, v), whole)


@pytest.mark.bad_input
def test_options_that_are_no_tensors_reach_the_mechanism():
    q, k, v = (draw(2, 4, 6, 4, seed=i) for i in range(3))
    whole, cut = (new_cache("delta", 16).attend(q, k, v, **option) for option in ({}, {"chunk": 2}))
    assert torch.allclose(whole, cut, atol=1e-12)
