"""The evidence on fixed patterns, in three documents: its figures against others that are found independently."""

from itertools import product

import pytest
import sympy
import torch

from ortho.attention.sparse.dilated import LocalDilated, NeitherFarNorMultiple
from ortho.attention.sparse.pattern import pattern_cost
from ortho.attention.sparse.window import Window
from ortho.cost.big_o import N, d
from paper import experiments
from paper.claims import Verdict, judge
from paper.claims.evidence import sparse_patterns as s1
from paper.claims.evidence import sparse_patterns as s2
from paper.claims.evidence import sparse_patterns as s4
from paper.experiments.speed import attention_analysis as attention_rows

CONFIRMED, CORRECTED, CONDITIONAL, UNTESTABLE = (
    Verdict.CONFIRMED, Verdict.CORRECTED, Verdict.CONDITIONAL, Verdict.UNTESTABLE,
)  # fmt: skip
SIZES = [(n, k) for n in (1, 2, 9, 20) for k in (1, 2, 5, 9) if k <= n]


def pairs(n, keeps):
    return sum(keeps(i, j) for i in range(n) for j in range(n))


# --------------------------------------------------------------------------------------------------------- document S1


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_closed_forms_of_windows(n, k):
    assert s1.closed(s1.LATEST, N=n, k=k) == pairs(n, lambda i, j: 0 <= i - j < k)
    w = k - 1
    assert s1.closed(s1.EITHER_SIDE, N=n, w=w) == pairs(n, lambda i, j: abs(i - j) <= w)
    for D in (1, 2, 3):
        if D * (k - 1) < n:
            dilated = pairs(n, lambda i, j, D=D: 0 <= i - j < D * k and (i - j) % D == 0)
            assert s1.closed(s1.DILATED, N=n, k=k, D=D) == dilated


@pytest.mark.parametrize(("n", "w", "g"), [(20, 4, 4), (20, 4, 1), (20, 9, 3), (9, 3, 2), (9, 1, 0)])
def test_the_closed_form_with_global_tokens(n, w, g):
    expected = pairs(n, lambda i, j: abs(i - j) <= w or i < g or j < g)
    assert s1.closed(s1.GLOBAL, N=n, w=w, g=g) == expected


def test_sequences_longer_than_the_window():
    """The growth of N w is compared where N >= w: it is not that of N^2, nor of N."""
    assert s1.time("N*k*d", s1.LATEST, "k").verdict == CONFIRMED
    assert s1.time("N^2*d", s1.LATEST, "k").verdict == CORRECTED
    assert s1.time("N*d", s1.LATEST, "k").verdict == Verdict.REFUTED
    m, k = sympy.symbols("m k", positive=True)
    assert sympy.expand(s1.longer("N^2", "k") - (m + k) ** 2) == 0


def test_what_is_saved_does_not_depend_on_the_window():
    saved = {pattern_cost(1, N, 1, d, d, pattern=Window(width), causal=True).saved_bytes for width in (1, 8, 4096)}
    assert len(saved) == 1
    assert {f.verdict for f in s1.either_space("N*k", s1.LATEST, "k").values()} == {CONFIRMED, CORRECTED}


def test_later_keys():
    assert (s1.later_keys(is_causal=False), s1.later_keys(is_causal=True)) == (s1.REACH, 0)
    assert judge("S1.2.4a").verdict == CONDITIONAL


def test_neighbours_share():
    assert s1.shared_keys(Window(s1.REACH + 1)) == 2 * s1.REACH
    assert s1.shared_keys(Window(1)) == 0


def test_a_form_that_is_off_is_noticed(monkeypatch):
    assert max(s1.away(is_causal=c) for c in (False, True)) < s1.EXACT
    wrong = s1.pattern_attention_reference
    monkeypatch.setattr(s1, "pattern_attention", lambda *x, **o: wrong(*x, **o | {"pattern": Window(7)}))
    assert s1.sliding_window().verdict == Verdict.REFUTED


# --------------------------------------------------------------------------------------------------------- document S2


def test_strided_counts():
    for n, stride in product((1, 2, 7, 20), (1, 2, 5, 7, 20, 30)):
        latest = pairs(n, lambda i, j, s=stride: max(0, i - s) <= j <= i)
        every = pairs(n, lambda i, j, s=stride: j <= i and (i - j) % s == 0)
        assert s2.strided_pairs(n, stride) == latest + every
        assert [int(head.sum()) for head in s2.strided_heads(n, stride)] == [latest, every]
        if n % stride == 0:
            assert (s1.closed(s2.NEAREST, N=n, l=stride), s1.closed(s2.EVERY, N=n, l=stride)) == (latest, every)


def test_a_gap_in_a_strided_head_is_noticed(monkeypatch):
    """Without the distance 1 in the first head, strides above 1 miss it."""
    heads = s2.strided_heads
    assert s2.always_missed(is_causal=True) == s2.always_missed(is_causal=False) == 0

    def gap(n, stride):
        latest, every = heads(n, stride)
        return latest.triu() | latest.tril(-2), every

    monkeypatch.setattr(s2, "strided_heads", gap)
    assert s2.always_missed(is_causal=True) > 0
    assert s2.always_missed(is_causal=False) > 0


def test_summaries_by_sets():
    n, block = 30, 6
    own, cells = s2.fixed_heads(n, block)
    for i in range(n):
        held = {i} | set(own[i].nonzero().flatten().tolist())
        for cell in cells[i].nonzero().flatten().tolist():
            held |= {cell} | set(own[cell].nonzero().flatten().tolist())
        assert held == set(range(i + 1))
    assert s2.missed(own, cells) == 0
    before = pairs(n, lambda i, j: j // block < i // block and j % block != block - 1)
    assert s2.missed(cells, own) == before


def test_the_picture_by_sets():
    n, stride = 20, 4
    count = 0
    for i in range(n):
        stops = {i} | (set(range(0, i + 1, stride)) if i % stride == 0 else set())
        count += len(set().union(*({s, s // stride * stride} for s in stops)))
    assert s2.picture_share(n, stride) == count / (n * (n + 1) / 2)


def row(N, ratio=1.0, seconds=1.0):
    return {"N": N, "ratio_alike": (ratio, ratio, ratio), "seconds": (seconds, seconds, seconds)}


@pytest.fixture
def recorded(monkeypatch):
    """Sets what the records of pattern-speed say, arm -> rows on one device."""
    monkeypatch.setattr(experiments, "load", lambda name: [name])

    def enter(**lines):
        named = {arm.replace("_", " "): rows for arm, rows in lines.items()}
        found = {"cpu-a": {arm.replace("blocks", s2.BLOCKS): rows for arm, rows in named.items()}}
        monkeypatch.setattr(
            attention_rows,
            "curves",
            lambda records, arms: found if (records, arms) == (["pattern-speed"], "patterns") else {},
        )

    return enter


def timed(arm, ratio, flops, N=4096):
    return {"device": "cpu-a", "N": N, "arm": arm, "ratio_alike": (ratio,) * 3, "flops_alike": flops}


@pytest.fixture
def beside(monkeypatch):
    """Sets what the records of pattern-speed say of patterns beside the attention that sees the same keys."""
    monkeypatch.setattr(experiments, "load", lambda name: [name])
    return lambda *rows: monkeypatch.setattr(attention_rows, "beside_alike", lambda *_: list(rows))


@pytest.mark.parametrize(("ratio", "verdict"), [(0.3, CONFIRMED), (0.5, Verdict.REFUTED)])
def test_blocks_by_the_clock(beside, ratio, verdict):
    """A FLOP in blocks against those of the others, 2 to 4 times softmax's."""
    others = [timed(name, flops * 0.1, 0.1) for name, flops in zip(s2.OTHERS, (2, 3, 4), strict=True)]
    beside(timed(s2.BLOCKS, ratio, 0.2), *others)
    assert s2.friendly().verdict == verdict
    causal = [row | {"arm": f"{row['arm']} causal"} for row in others]
    beside(timed(s2.BLOCKS, ratio, 0.2), timed(f"{s2.BLOCKS} causal", 0.39, 0.2), *others, *causal)
    assert s2.friendly().verdict == (CONFIRMED if ratio < 0.4 else CONDITIONAL)


def test_without_a_record_blocks_are_not_judged(beside):
    beside(timed("dilated", 0.1, 0.1), timed(s2.BLOCKS, 0.1, 0.1))
    assert s2.friendly().verdict == s2.others().verdict == UNTESTABLE


# --------------------------------------------------------------------------------------------------------- document S4


def test_the_printed_rule():
    n, k = 13, 4
    for i, j in product(range(n), range(n)):
        far, multiple = abs(i - j) > k, abs(i - j) % k == 0
        assert bool(s4.as_printed(n, k)[i, j]) == (not far and not multiple)
        assert bool(s4.as_meant(n, k)[i, j]) == (not far or multiple)
    assert torch.equal(LocalDilated(k).mask(n), s4.as_meant(n, k))
    assert torch.equal(NeitherFarNorMultiple(k).mask(n), s4.as_printed(n, k))


def test_weights_that_depend_on_the_input_are_noticed(monkeypatch):
    (pattern, *_) = s4.PATTERNS.values()
    assert s4.depends_on_input(pattern) == 0

    def largest(q, k, v, **_):
        scores = q @ k.mT
        return (scores * (scores == scores.amax(-1, keepdim=True))).abs() @ v

    monkeypatch.setattr(s4, "pattern_attention", largest)
    monkeypatch.setattr(experiments, "load", lambda _: [])
    assert s4.depends_on_input(pattern) > 0
    assert s4.by_hand_and_made_for_it().verdict == Verdict.REFUTED


def test_products_of_both_forms():
    for pattern in s4.PATTERNS.values():
        assert s4.products(pattern, "mask") == 1
        kept = pattern.pairs(s4.COUNTED, is_causal=True) / s4.COUNTED**2
        assert kept <= s4.products(pattern, "parts") < 0.5


@pytest.mark.parametrize(("seconds", "verdict"), [(0.2, CONFIRMED), (2.0, Verdict.REFUTED)])
def test_a_mask_by_the_clock(recorded, seconds, verdict):
    lines = {"sdpa_masked": [row(4096)], "window": [row(4096, seconds=seconds), row(8192, seconds=9.0)]}
    recorded(**lines)
    assert s4.timed() == {"$N = 4,096$ on cpu-a": 1 / seconds}
    assert s4.by_hand_and_made_for_it().verdict == verdict
    recorded(window=lines["window"])
    assert s4.timed() == {}
    assert s4.by_hand_and_made_for_it().verdict == CONFIRMED
