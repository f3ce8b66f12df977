"""Caches: reading piece by piece gives the outputs of the whole; memory held; the cost of a token; errors."""

import copy
import pickle
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from sample import some
from seeded import draw
from static_patterns import RULES

from ortho import MECHANISMS, ConvolvedAttention, HybridAttention, LanguageModel, MultiheadAttention, PositionalHeads
from ortho.attention.cache import RingCache, new_cache
from ortho.attention.sparse.pattern import pattern_mechanism
from ortho.cost.attention import decoded
from ortho.cost.counting import flops_of

CAUSAL = [name for name, m in MECHANISMS.items() if m.causal]
FORMS = ["reference", "fast"]
LENGTH = 40
# Patterns that reach less far than the sequence is long, so that the ring turns several times, or to its beginning.
PATTERNS = [p for p, _ in RULES if p.kv_window() is None or sum(p.kv_window()) < LENGTH // 2]
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
@pytest.mark.parametrize("pattern", some(PATTERNS, 3), ids=str)
def test_a_ring_forgets_nothing_that_is_read(pattern, form, cuts):
    """With a capacity, and without where the pattern reaches back only so far."""
    q, k, v = qkv()
    expected = pattern_mechanism("under test", type(pattern), "", **vars(pattern)).form(form)(q, k, v, is_causal=True)
    for capacity in [LENGTH] + [None] * (pattern.kv_window() is not None):
        cache, _ = cache_of(pattern, capacity, form)
        torch.testing.assert_close(in_pieces(cache, (q, k, v), cuts), expected, **CLOSE)
    if capacity is None:  # it holds no more than is read, keys and values of two sequences
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


def model(**kwargs):
    generator = torch.Generator().manual_seed(0)
    return LanguageModel(13, 8, 2, 2, max_length=16, generator=generator, dtype=torch.float64, **kwargs)


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


@pytest.mark.parametrize("name", ["softmax", "rotary", "window", "favor", "gated-delta", "alibi"])
@pytest.mark.parametrize("kind", ["copy", "pickle"])
def test_caches_can_be_copied_and_saved(name, kind):
    """In the middle of a sequence; a copy goes its own way."""
    heads = [(name, 2), ("induction", 1), (partial(PositionalHeads, patterns=["left"]), 1)]
    layer = ConvolvedAttention(16, 4, of=HybridAttention, heads=heads, dtype=torch.float64)
    torch.nn.init.normal_(layer.kernel)
    x, cache = draw(2, 6, 16), layer.new_cache(9)
    layer(x[:, :4], is_causal=True, cache=cache)
    other = copy.deepcopy(cache) if kind == "copy" else pickle.loads(pickle.dumps(cache))
    layer(-x[:, 4:], is_causal=True, cache=cache)
    torch.testing.assert_close(layer(x[:, 4:], is_causal=True, cache=other), layer(x, is_causal=True)[:, 4:], **CLOSE)
    assert not any(isinstance(part, torch.nn.Module) for part in reachable(other))


def reachable(cache):
    """All that a copied cache and its parts hold."""
    held = [*vars(cache).values()]
    return held + [each for part in vars(cache).get("_parts", ()) for each in reachable(part)]
