"""A fast form that computes in pieces (chunks, tiles, blocks or mini-batches) gives what the definition gives.

This holds for every mechanism that has pieces, wherever they end and however many are computed together, with states,
masks and all gradients. (`test_properties.py` tests all mechanisms in a layer, where short sequences are one piece.)
"""

from functools import partial
from itertools import product

import pytest
import torch
from piecewise import PIECEWISE, K, differentiated, operands, part, per_token, pieces, takes, ways, with_gaps
from refusals import refuses
from sample import WHOLE, some
from seeded import draw

from ortho import MECHANISMS
from ortho.attention import FORMS, chunked_recurrence
from ortho.attention.chunked_recurrence import TILE
from ortho.attention.recurrence import CHUNK
from ortho.cost.counting import Allocations

EVERY = pytest.mark.parametrize("name", PIECEWISE)
CAUSAL = pytest.mark.parametrize("name", [name for name, m in PIECEWISE.items() if m.causal])
CUT = 5
SIZES = [(1, 4), (8, 1), (13, 4), (33, 16), (130, CHUNK)]  # lengths of a second call, and of a piece
# Both sides are float64. A sum has at most 150 products, each of at most about 10, and the systems that are solved have
# inverses with entries of at most 4: errors are about 1e-13. Sums over kernels' features, up to 1e3, err by 1e-12. A
# wrong term would show at 1e-2. Totals of signed weights cancel: the smallest is about 1e-3 of its terms, and its
# gradient squares that. Fits solve systems with condition numbers of 1e6.
TOLERANCE, OF_FEATURES, LOOSE = 1e-12, 1e-11, 1e-7


def same(found, expected, m):
    bound = OF_FEATURES if m.family in ("linear", "dynamic_sparse") else TOLERANCE
    bound = LOOSE if m.signed or m.data_dependent else bound
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)


def functions(m, size):
    """(function, its sizes, a tile) of both forms; a tile has all sequences, several, one, or a part of one."""
    for form, tile in (("reference", TILE), ("fast", TILE), ("fast", 5), ("fast", 2)):
        function = m.form(form)
        yield function, pieces(function, size), tile


def growing(m, *lead, length):
    """Operands whose keys grow from token to token."""
    given = operands(m, *lead, length=length)
    return given | {"k": given["k"] * torch.linspace(0.3, 2, length, dtype=torch.float64)[:, None]}


@pytest.mark.parametrize(("name", "sizes"), some(product(PIECEWISE, SIZES), 2))
def test_two_calls_are_the_whole(name, sizes, monkeypatch):
    """Outputs, the state, and all gradients, also those through the state. Operands that lie in memory with gaps, as a
    caller may pass them, are not written to, not even in a backward pass."""
    m, (length, size) = PIECEWISE[name], sizes
    if m.data_dependent:
        return  # it has no state
    given = {x: with_gaps(y) for x, y in growing(m, 2, 3, length=CUT + length).items()}
    versions = {x: y._version for x, y in given.items()}
    for causal in ways(m):
        expected = None
        for function, piece, tile in functions(m, size):
            monkeypatch.setattr(chunked_recurrence, "TILE", tile)
            attend, states = partial(function, is_causal=causal, return_state=True, **piece), []

            def whole(attend=attend, states=states, **x):
                o, state = attend(**x)
                states.append(state)
                return o[:, :, CUT:]

            def in_two(attend=attend, states=states, **x):
                _, state = attend(**part(x, 0, CUT, 2))
                o, state = attend(**part(x, CUT, CUT + length, 2), initial_state=state)
                states.append(state)
                return o

            expected = expected or differentiated(whole, given)
            same(differentiated(in_two, given), expected, m)
            with torch.no_grad():
                whole(**given)
            same(states[-1], states[-2], m)
    assert {x: y._version for x, y in given.items()} == versions


N = 11
SHAPES = [(), (N,), (1, N), (3, 1, N), (2, 1, 1, N), (2, 3, 1, 1)]
OF_PAIRS = [(N, N), (2, 1, N, N)]
TAKES_PAIRS = {("flash", False), ("flash", True), ("alibi", False), ("alibi", True), ("fox", False)}  # name, is_causal
KEEPS_KEYS = ["flash", "alibi", "fox", "path", "position-delta"]  # masks reach into their states


@EVERY
def test_masks_of_every_shape(name, monkeypatch):
    """Every shape that broadcasts over the queries, and masks of pairs where these are served; all gradients. Rows with
    nothing to attend to are zeros."""
    m = PIECEWISE[name]
    given = growing(m, 2, 3, length=N)
    for causal, shape in [(c, s) for c in ways(m) for s in SHAPES + OF_PAIRS * ((name, c) in TAKES_PAIRS)]:
        mask = draw(*shape, seed=4) > 0
        results = []
        for function, sizes, tile in functions(m, 4):
            monkeypatch.setattr(chunked_recurrence, "TILE", tile)

            def call(function=function, causal=causal, mask=mask, sizes=sizes, **x):
                return function(**x, is_causal=causal, attn_mask=mask, **sizes)

            results.append(differentiated(call, given))
            same(results[-1], results[0], m)
        allowed = mask.expand(2, 3, N, N)
        assert not results[0][0][~(allowed.tril() if causal else allowed).any(-1)].any()


@pytest.mark.parametrize("name", KEEPS_KEYS)
def test_masks_beside_a_state(name):
    """Masks also span the state's keys."""
    m, mask = PIECEWISE[name], draw(2, 1, 1, CUT + N, seed=4) > 0
    given = operands(m, 2, 3, length=CUT + N)
    for causal in ways(m):

        def in_two(function, causal=causal, **x):
            attend = partial(function, is_causal=causal, **pieces(function, 4))
            _, state = attend(**part(x, 0, CUT, 2), attn_mask=mask[..., :CUT], return_state=True)
            return attend(**part(x, CUT, CUT + N, 2), attn_mask=mask, initial_state=state)

        whole = partial(m.reference, is_causal=causal, attn_mask=mask)
        expected = differentiated(lambda whole=whole, **x: whole(**x)[:, :, CUT:], given)
        for form in FORMS:
            same(differentiated(partial(in_two, m.form(form)), given), expected, m)


BY_PLACE = {"cosformer", "alibi", "sparse-linear"}  # for these a hidden token still counts as a place
KEPT = [name for name in PIECEWISE if name not in BY_PLACE and not name.startswith("ttt")]
OF_QUERIES = {"q", "bias_queries", "log_linear_weight"}


@EVERY
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kept", ["left", "scattered", "none"])
def test_hidden_tokens(name, form, kept):
    """Hidden tokens are as good as cut out of the sequence: rows of the other tokens and all gradients are the same,
    and so is the state if its size is fixed. What a hidden token holds makes no difference, and only its query has a
    gradient."""
    m, index = PIECEWISE[name], torch.arange(N)
    mask = {"left": index > 4, "scattered": index % 3 == 1, "none": index < 0}[kept]
    given = growing(m, 1, length=N)
    tokens = per_token(given)
    own = (
        {"same_tokens": True} if m.data_dependent else {}
    )  # otherwise a fit takes queries for those of another sequence
    function = partial(m.form(form), **pieces(m.form(form), 4), **own)
    for causal in ways(m):
        masked = partial(function, is_causal=causal, attn_mask=mask)
        found = differentiated(masked, given)
        gradients = dict(zip(given, found[1:], strict=True))
        assert not any(gradients[x][:, ~mask].any() for x in tokens if x not in OF_QUERIES)
        wild = {x: y.clone() for x, y in given.items()}
        wild["k"][:, ~mask] *= 1e3
        wild["v"][:, ~mask] *= -1e3
        same([masked(**wild)[:, mask]], [found[0][:, mask]], m)
        if name in KEPT and mask.any():
            cut = given | {x: given[x][:, mask] for x in tokens}
            expected = differentiated(lambda causal=causal, **x: function(**x, is_causal=causal), cut)
            rows = differentiated(lambda masked=masked, **x: masked(**x)[:, mask], given)
            left = [y[:, mask] if x in tokens else y for x, y in zip(given, rows[1:], strict=True)]
            same([rows[0], *left], expected, m)
            if m.family == "recurrent":
                states = [f(**x, is_causal=causal, return_state=True)[1] for f, x in ((masked, given), (function, cut))]
                same(*states, m)


@CAUSAL
@pytest.mark.parametrize("tile", [TILE, 2])
def test_the_future_leaves_the_prefix(name, tile, monkeypatch):
    """Bit for bit, at cuts inside and between pieces, whether the tokens that come are large or vanish."""
    monkeypatch.setattr(chunked_recurrence, "TILE", tile)
    m = PIECEWISE[name]
    given, other = (operands(m, 2, length=150, seed=seed) for seed in (0, 1))  # three chunks of 50, or two of 64

    def call(x):
        sizes = pieces(m.fast, 16) if {"tile", "block", "rows"} & set(takes(m.fast)) else {}
        return m.fast(**x, is_causal=True, **sizes)

    before = call(given)
    for cut, size in product((1, 16, 49, 50, 64, 65, 149), (0.0, 10.0)):
        mixed = given | {x: torch.cat([given[x][:, :cut], other[x][:, cut:]], 1) for x in per_token(given)}
        for x in ("k", "v"):
            mixed[x][:, cut:] *= size
        assert torch.equal(call(mixed)[:, :cut], before[:, :cut])


@EVERY
def test_gradients_of_some(name):
    """Whichever operands need a gradient, their gradients are the same as if all did."""
    m = PIECEWISE[name]
    given = operands(m, 2, length=N)
    for causal in ways(m):

        def call(causal=causal, **x):
            return m.fast(**x, is_causal=causal, **pieces(m.fast, 4))

        _, *gradients = differentiated(call, given)
        everything = dict(zip(given, gradients, strict=True))
        wanted = [[x] for x in given] + [[x for x in given if x not in left] for left in (["q", "k"], ["v"], ["beta"])]
        for part_ in wanted:
            same(differentiated(call, given, part_)[1:], [everything[x] for x in part_], m)


TWICE = "create_graph: expected False: the fast form cannot be differentiated twice"


@pytest.mark.parametrize("name", MECHANISMS)
def test_second_derivatives(name):
    """Those of the definition equal finite differences; a fast form has the same or refuses, for whichever operand."""
    m = MECHANISMS[name]
    given = [draw(1, 4, width, seed=seed).requires_grad_() for seed, width in enumerate((K, K, K))]
    for causal in ways(m):
        if not m.data_dependent and m.family != "dynamic_sparse":  # a fit's gradient is no derivative, and choices jump
            reference = lambda *x, causal=causal: m.reference(*x, is_causal=causal)  # noqa: E731
            assert torch.autograd.gradgradcheck(reference, given, fast_mode=not WHOLE)

        def twice(form, x, causal=causal):
            o = m.form(form)(*given, is_causal=causal).square().sum()
            (first,) = torch.autograd.grad(o, x, create_graph=True, allow_unused=True, materialize_grads=True)
            return torch.autograd.grad(first.square().sum(), given, allow_unused=True, materialize_grads=True)

        for x in given:
            try:
                found = twice("fast", x)
            except RuntimeError as error:
                refused = str(error)
            else:
                refused = ""
                same(found, twice("reference", x), m)
            assert not refused or TWICE in refused or name in ("softmax", "rotary")  # the kernel is PyTorch's


@pytest.mark.parametrize("name", [name for name in PIECEWISE if name != "sparse-linear"])
def test_memory_is_linear(name):
    """The peak of a step, forward and backward, grows by the same from 4 pieces to 8 as from 8 to 12."""
    m, peaks = PIECEWISE[name], []
    for number in (4, 8, 12):
        given = {x: y.requires_grad_() for x, y in operands(m, 1, length=number * CHUNK).items()}
        with Allocations() as memory:
            o = m.fast(**given, is_causal=m.causal, **pieces(m.fast, CHUNK))
            torch.autograd.grad(o.sum(), list(given.values()), allow_unused=True)
        peaks.append(memory.peak)
    assert abs((peaks[2] - peaks[1]) - (peaks[1] - peaks[0])) <= 0.02 * peaks[0] < peaks[1] - peaks[0]


@pytest.mark.bad_input
@EVERY
def test_bad_sizes(name):
    m = PIECEWISE[name]
    given = operands(m, 2, length=5)
    for argument, (wrong, error) in product(takes(m.fast), ((0, ValueError), (-1, ValueError), (2.5, TypeError))):
        message = f"^{argument}: expected an integer of at least 1, got "
        refuses(message, m.fast, **given, is_causal=m.causal, error=error, **{argument: wrong})
