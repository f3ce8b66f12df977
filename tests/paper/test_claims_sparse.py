"""Evidence on fixed, dynamic and positional patterns: its figures against others found independently."""

import math
from fractions import Fraction
from itertools import product
from math import exp, sqrt

import pytest
import sympy
import torch
from learning_fakes import along_budgets

from ortho.attention.sparse.window import Window
from paper import experiments
from paper.claims import Verdict
from paper.claims.evidence import positional_patterns as positional
from paper.claims.evidence import sparse_patterns as patterns
from paper.claims.shared import inputs
from paper.experiments.speed import attention_analysis as attention_rows

CONFIRMED, CORRECTED, REFUTED = Verdict.CONFIRMED, Verdict.CORRECTED, Verdict.REFUTED
CONDITIONAL, UNTESTABLE = Verdict.CONDITIONAL, Verdict.UNTESTABLE

# ------------------------------------------------------------------- The evidence on fixed patterns, in three documents


SIZES = [(n, k) for n in (1, 2, 9, 20) for k in (1, 2, 5, 9) if k <= n]


def pairs(n, keeps):
    return sum(keeps(i, j) for i in range(n) for j in range(n))


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_closed_forms_of_windows(n, k):
    assert patterns.closed(patterns.LATEST, N=n, k=k) == pairs(n, lambda i, j: 0 <= i - j < k)
    w = k - 1
    assert patterns.closed(patterns.EITHER_SIDE, N=n, w=w) == pairs(n, lambda i, j: abs(i - j) <= w)
    for D in (1, 2, 3):
        if D * (k - 1) < n:
            dilated = pairs(n, lambda i, j, D=D: 0 <= i - j < D * k and (i - j) % D == 0)
            assert patterns.closed(patterns.DILATED, N=n, k=k, D=D) == dilated


@pytest.mark.parametrize(("n", "w", "g"), [(20, 4, 4), (20, 4, 1), (20, 9, 3), (9, 3, 2), (9, 1, 0)])
def test_the_closed_form_with_global_tokens(n, w, g):
    expected = pairs(n, lambda i, j: abs(i - j) <= w or i < g or j < g)
    assert patterns.closed(patterns.GLOBAL, N=n, w=w, g=g) == expected


def test_sequences_longer_than_the_window():
    """Growth is compared where N >= w; there the order N w is neither N^2 nor N."""
    assert patterns.time("N*k*d", patterns.LATEST, "k").verdict == CONFIRMED
    assert patterns.time("N^2*d", patterns.LATEST, "k").verdict == CORRECTED
    assert patterns.time("N*d", patterns.LATEST, "k").verdict == REFUTED
    m, k = sympy.symbols("m k", positive=True)
    assert sympy.expand(patterns.longer("N^2", "k") - (m + k) ** 2) == 0


def test_neighbours_share():
    assert patterns.shared_keys(Window(patterns.REACH + 1)) == 2 * patterns.REACH
    assert patterns.shared_keys(Window(1)) == 0


def test_strided_counts():
    for n, stride in product((1, 2, 7, 20), (1, 2, 5, 7, 20, 30)):
        latest = pairs(n, lambda i, j, s=stride: max(0, i - s) <= j <= i)
        every = pairs(n, lambda i, j, s=stride: j <= i and (i - j) % s == 0)
        assert patterns.strided_pairs(n, stride) == latest + every
        assert [int(head.sum()) for head in patterns.strided_heads(n, stride)] == [latest, every]
        if n % stride == 0:
            assert (
                patterns.closed(patterns.NEAREST, N=n, l=stride),
                patterns.closed(patterns.EVERY, N=n, l=stride),
            ) == (latest, every)


def test_summaries_by_sets():
    n, block = 30, 6
    own, cells = patterns.fixed_heads(n, block)
    for i in range(n):
        held = {i} | set(own[i].nonzero().flatten().tolist())
        for cell in cells[i].nonzero().flatten().tolist():
            held |= {cell} | set(own[cell].nonzero().flatten().tolist())
        assert held == set(range(i + 1))
    assert patterns.missed(own, cells) == 0
    before = pairs(n, lambda i, j: j // block < i // block and j % block != block - 1)
    assert patterns.missed(cells, own) == before


@pytest.mark.parametrize("hubs_read", [False, True])
def test_the_picture_by_sets(hubs_read):
    n, stride = 22, 4

    def read(i):
        """What token i reads in the first layer: a token reads its hub, or a hub reads its tokens."""
        block = range(i, min(i + stride, n)) if i % stride == 0 else ()
        return {i, *block} if hubs_read else {i, i // stride * stride}

    count = 0
    for i in range(n):
        hubs = range(0, n, stride) if i % stride == 0 else ()
        count += len(set().union(*map(read, {i, *hubs})))
    assert patterns.picture_share(n, stride, hubs_read=hubs_read) == count / n**2


def timed(arm, ratio, flops, N=4096, device="gpu-a"):
    return {"device": device, "N": N, "arm": arm, "ratio_alike": (ratio,) * 3, "flops_alike": flops}


@pytest.fixture
def beside(monkeypatch):
    """Sets what pattern-speed's records say of patterns beside the attention that sees the same keys."""
    monkeypatch.setattr(experiments, "load", lambda name: [name])
    return lambda *rows: monkeypatch.setattr(attention_rows, "beside_alike", lambda *_: list(rows))


@pytest.mark.parametrize(("ratio", "verdict"), [(0.3, CONFIRMED), (0.5, REFUTED)])
def test_blocks_by_the_clock(beside, ratio, verdict):
    """The time of a FLOP in blocks is compared with those of the others, which are 2 to 4 times softmax's."""
    others = [timed(name, flops * 0.1, 0.1) for name, flops in zip(patterns.OTHERS, (2, 3, 4), strict=True)]
    beside(timed(patterns.BLOCKS, ratio, 0.2), *others)
    assert patterns.friendly().verdict == verdict
    causal = [row | {"arm": f"{row['arm']} causal"} for row in others]
    beside(timed(patterns.BLOCKS, ratio, 0.2), timed(f"{patterns.BLOCKS} causal", 0.39, 0.2), *others, *causal)
    assert patterns.friendly().verdict == (CONFIRMED if ratio < 0.4 else CONDITIONAL)


def test_a_processor_does_not_answer_for_gpus(beside):
    beside(*(timed(name, 0.3, 0.2, device="cpu-a") for name in (patterns.BLOCKS, *patterns.OTHERS)))
    found = patterns.friendly()
    assert found.verdict == UNTESTABLE and "On CPUs the ratio is $N = 4,096$, cpu-a: 1" in found.ours


def test_without_a_record_blocks_are_not_judged(beside):
    beside(timed("dilated", 0.1, 0.1), timed(patterns.BLOCKS, 0.1, 0.1))
    assert patterns.friendly().verdict == patterns.others().verdict == UNTESTABLE


# ------------------------------------------------------------------- The evidence on dynamic sparsity, in two documents


@pytest.mark.parametrize("kind", inputs.INPUTS)
def test_weights_by_hand(kind):
    q, k, _ = inputs.drawn(kind)
    for i in (0, 1, 40, inputs.TOKENS - 1):
        numbers = [exp(float(q[3, i] @ k[3, j]) / sqrt(inputs.WIDTH)) for j in range(i + 1)]
        expected = torch.tensor(numbers, dtype=torch.float64) / sum(numbers)
        torch.testing.assert_close(inputs.weights(kind)[3, i, : i + 1], expected, rtol=1e-12, atol=1e-15)
        assert not inputs.weights(kind)[3, i, i + 1 :].any()


def test_inputs_are_what_they_are_called():
    """Checked by correlations of unit vectors; for random vectors of width 32 these are about 0.2."""
    q, k, _ = inputs.drawn("one far key")
    copies = (q[..., None, :] - 2 * k[:, None]).abs().amax(-1) == 0
    assert (copies.sum(-1) == 1).all()
    assert not copies.triu(1).any()
    _, k, _ = inputs.drawn("topics")
    unit = k / k.norm(dim=-1, keepdim=True)
    stretch = unit.unflatten(1, (-1, inputs.STRETCH))
    assert (stretch @ stretch.mT).mean() > 0.7
    _, k, _ = inputs.drawn("drifting")
    unit = k / k.norm(dim=-1, keepdim=True)
    near, far = ((unit[:, gap:] * unit[:, :-gap]).sum(-1).mean() for gap in (1, 128))
    assert near > 0.6
    assert abs(far) < 0.2
    q, k, _ = inputs.drawn("flat")
    scores = q @ k.mT / sqrt(inputs.WIDTH)
    assert abs(scores.std() - 0.5) < 0.01


# ---------------------------------------------------------------------------------- The evidence on positional patterns


def test_empty_rows_by_hand():
    assert positional.empty_rows(5) == {"previous": [0], "next": [4], "left": [0, 1], "right": [3, 4]}
    assert positional.empty_rows(1) == {name: [0] for name in ("previous", "next", "left", "right")}


def test_the_printed_cubes():
    """They are 1, 8 and 27 of 36."""
    assert [positional.printed_left(4, j) for j in range(5)] == [Fraction(x, 36) for x in (1, 8, 27, 0, 0)]
    assert [positional.printed_left(1, j) for j in range(3)] == [0, 0, 0]
    assert [positional.printed_previous(2, j) for j in range(4)] == [0, 1, 0, 0]


def test_printed_positions():
    assert positional.printed_position(3, 0, 8) == pytest.approx(math.sin(3), abs=1e-15)
    assert positional.printed_position(3, 5, 8) == pytest.approx(math.cos(3 / 10000**0.5), abs=1e-15)


def record(task, shares, device="abacus", stage="trained"):
    right = {"correct_fraction": [0.9], "correct_without_fraction": [0.5]}
    return {
        "device": device,
        "configuration": {"task": task, "arm": "softmax", "seed": 1},
        "repetitions": {f"{stage}, head {i}": {"absolute_fraction": [x], **right} for i, x in enumerate(shares)},
        "facts": {"nearest": {f"{stage}, head {i}": "start" for i in range(len(shares))}},
    }


def test_heads_are_counted_by_task(stored):
    records = [record("recall", [0.2, 0.6]), record("recall", [0.7]), record("parity", [0.1])]
    for other in records:
        other["repetitions"]["untrained, head 0"] = other["repetitions"]["trained, head 0"]
        other["facts"]["nearest"]["untrained, head 0"] = "start"
    stored(positional_heads=records)
    found = positional.heads()
    assert found.verdict == UNTESTABLE
    assert "recall 2 and 0 of 3, parity 0 and 0 of 1 (abacus)" in found.remark


def pruned(*shares):
    """A record of an encoder of two layers of two heads: shares of faultless sentences by number of heads removed."""
    tests = {f"{n} removed, least needed first": {"faultless_fraction": [share]} for n, share in enumerate(shares)}
    return {"device": "abacus", "configuration": {"seed": 1, "H": 2, "L": 2}, "repetitions": tests}


@pytest.mark.parametrize(
    ("positions", "pruning", "verdict"),
    [
        ([0.9, 0.6, 0.1], pruned(1.0, 1.0, 0.99), CONFIRMED),
        ([0.9, 0.1, 0.1], pruned(1.0, 1.0, 0.99), REFUTED),
        ([0.9, 0.6, 0.1], pruned(1.0, 0.5, 0.5), REFUTED),
    ],
)
def test_encoders_are_judged_once_there_are_records(stored, positions, pruning, verdict):
    """Encoders of one layer of three heads. Only standard ones count, once all seeds have run."""
    trained = along_budgets("8 learned", (3.0,), (10,), positional=[positions])
    others = along_budgets("8 frozen", (3.0,), (10,), positional=[[1.0]])
    stored(positional_heads=[record("recall", [0.5])], pruning=[pruning], translation_budgets=[*trained, *others])
    assert positional.heads().verdict == verdict
    stored(positional_heads=[record("recall", [0.5])], pruning=[pruning], translation_budgets=[*trained[1:], *others])
    assert "no records of the attention maps of a trained encoder" in positional.heads().ours


def test_without_a_record_nothing_is_counted(stored):
    assert positional.heads().verdict == UNTESTABLE
    assert "more than half" not in positional.heads().ours
