"""Caches: reading piece by piece gives the outputs of the whole; memory held; the cost of a token; errors."""

import copy
import io
import pickle
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from extent import some
from refusals import refuses
from seeded import draw

from ortho import (
    MECHANISMS,
    ConvolvedAttention,
    HybridAttention,
    LanguageModel,
    MultiheadAttention,
    PositionalHeads,
)
from ortho.attention import cache as caches
from ortho.attention.cache import RingCache, new_cache
from ortho.attention.sparse.block_sparse import BigBird, BlockSparse
from ortho.attention.sparse.blocked_window import BlockedWindow
from ortho.attention.sparse.dilated import Dilated, LocalDilated, NeitherFarNorMultiple
from ortho.attention.sparse.fixed import Fixed, FixedColumns
from ortho.attention.sparse.global_local import GlobalLocal
from ortho.attention.sparse.pattern import pattern_mechanism
from ortho.attention.sparse.strided import LocalStrided, Strided
from ortho.attention.sparse.window import Window
from ortho.cost.attention import decoded
from ortho.cost.counting import flops_of

CAUSAL = [name for name, m in MECHANISMS.items() if m.causal]
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


@pytest.fixture(autouse=True)
def none_under_test():
    yield
    MECHANISMS.pop("under test", None)


def cache_of(pattern, capacity, form="fast"):
    MECHANISMS["under test"] = made = pattern_mechanism("under test", type(pattern), "", **vars(pattern))
    return RingCache("under test", capacity, form), made.form(form)


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
                cache.attend(*(x[..., : length - 1, :] for x in operands), **_tokens(gates, 0, length - 1))
            last = _tokens(gates, length - 1, length)
            flops = flops_of(cache.attend, *(x[..., length - 1 : length, :] for x in operands), **last)
            declared = decoded(name, 2, length, 4, 6, 6, num_kv_heads=shared)
            assert (flops, cache.nbytes) == (declared.forward, declared.nbytes), length


def _tokens(operands, start, stop):
    """The numbers of some tokens, from operands (B, H, N) or (B, H, N, ...); A of a selective scan belongs to none."""
    return {name: x if name == "A" and x.dim() == 4 else x[:, :, start:stop] for name, x in operands.items()}


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


@pytest.mark.parametrize("name", ["softmax", "rotary", "window", "linear", "delta"])
@pytest.mark.parametrize("wrong", ["dtype", "batch", "heads", "width", "room"])
def test_a_refused_token_leaves_the_cache_as_it_was(name, wrong):
    """What would be broadcast, cast or lost; the next token is read as if nothing had been."""
    q, k, v = qkv(length=8)
    cache, undisturbed = new_cache(name, 9), new_cache(name, 9)
    for one in (cache, undisturbed):
        one.attend(*(x[..., :7, :] for x in (q, k, v)))
    last = [x[..., 7:, :] for x in (q, k, v)]
    spoil = {
        "dtype": lambda x: x.float(),
        "batch": lambda x: x[:1],
        "heads": lambda x: x[:, :1],
        "width": lambda x: x[..., :5],
        "room": lambda x: x.expand(-1, -1, 3, -1),
    }[wrong]
    with pytest.raises((TypeError, ValueError), match="expected"):
        cache.attend(*map(spoil, last))
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
    assert cache.length == 0
    q, k, v = (x.float() for x in (q, k, v))
    assert torch.equal(cache.attend(q, k, v), MECHANISMS[name].fast(q, k, v, is_causal=True))


@pytest.mark.parametrize("pattern", [Window(5), GlobalLocal(4, 3)])
def test_a_piece_that_fails_leaves_the_ring_as_it_was(pattern, monkeypatch):
    q, k, v = qkv()
    cache, whole = cache_of(pattern, None)
    expected = whole(q, k, v, is_causal=True)
    cache.attend(*(x[..., :9, :] for x in (q, k, v)))

    def fails(*_, **__):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(caches, "_shared_attention", fails)
        refuses("out of memory", cache.attend, *(x[..., 9:30, :] for x in (q, k, v)), error=RuntimeError)
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
    buffers = {key: x.clone() for key, x in _tokens(first, 0, 8).items()}
    cache.attend(**buffers)
    for buffer in buffers.values():
        buffer.fill_(0.5)
    got = cache.attend(**_tokens(first, 8, 9))
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


@pytest.mark.parametrize("name", ["softmax", "rotary", "window", "favor", "gated-delta", "alibi"])
@pytest.mark.parametrize("kind", ["copy", "pickle", "save"])
def test_caches_can_be_copied_and_saved(name, kind):
    """In the middle of a sequence; a copy goes its own way."""
    heads = [(name, 2), ("induction", 1), (partial(PositionalHeads, patterns=["left"]), 1)]
    layer = ConvolvedAttention(16, 4, of=HybridAttention, heads=heads, dtype=torch.float64)
    torch.nn.init.normal_(layer.kernel)
    x, cache = draw(2, 6, 16), layer.new_cache(9)
    layer(x[:, :4], is_causal=True, cache=cache)
    if kind == "copy":
        other = copy.deepcopy(cache)
    elif kind == "pickle":
        other = pickle.loads(pickle.dumps(cache))
    else:
        torch.save(cache, file := io.BytesIO())
        file.seek(0)
        other = torch.load(file, weights_only=False)
    layer(-x[:, 4:], is_causal=True, cache=cache)
    torch.testing.assert_close(layer(x[:, 4:], is_causal=True, cache=other), layer(x, is_causal=True)[:, 4:], **CLOSE)
    assert not any(isinstance(part, torch.nn.Module) for part in reachable(other))


def reachable(cache):
    """All that a copied cache and its parts hold."""
    held = [*vars(cache).values()]
    return held + [each for part in vars(cache).get("_parts", ()) for each in reachable(part)]


@pytest.mark.parametrize("name", ["softmax", "window", "rotary", "delta"])
def test_a_copy_made_in_inference_mode_is_used_outside_it(name):
    q, k, v = (draw(2, 4, 6, 4, seed=i) for i in range(3))
    cache = new_cache(name, 32)
    cache.attend(q, k, v)
    with torch.inference_mode():
        copied = cache.copy()
    last = [x[:, :, :1] for x in (q, k, v)]
    assert torch.equal(copied.attend(*last), cache.attend(*last))
