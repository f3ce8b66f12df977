"""Evidence on layers, projections, memory and printed tables: its figures against others found independently."""

import pytest
import torch

from ortho import MultiheadAttention
from ortho.attention.linear.favor import PositiveFeatures
from ortho.attention.linear.feature_maps import EluPlusOne
from ortho.attention.linear.linear_attention import linear_attention_reference
from ortho.cost import block, layer, of
from ortho.cost.big_o import H, N, d
from ortho.cost.counting import flops_of
from ortho.layers.synthesizer import SynthesizerAttention
from ortho.projections import FrozenProjection, StructuredProjection
from paper.claims import Verdict
from paper.claims.evidence import cheaper_heads as cheaper
from paper.claims.evidence import hardware, methods
from paper.claims.evidence import measured_step as measured
from paper.claims.evidence import printed_speed_ups as printed
from paper.claims.evidence.frozen_layer import PRODUCTS, backward_products, r, saved_share, speed_up
from paper.claims.evidence.printed_models import (
    SCENARIOS,
    even_length,
    fewer_weights,
    memory,
    millions,
    saved_megabytes,
    whole_limit,
)
from paper.claims.evidence.printed_speed_ups import (
    SPEED_UPS,
    limit,
    needed_share,
    ratios_that_fit,
    step_gain,
    update_share,
    weights_that_fit,
)
from paper.claims.shared import lookup
from paper.experiments.speed import analysis as summary
from paper.experiments.speed import training_step
from paper.memory import layer_bytes

CONFIRMED, REFUTED = Verdict.CONFIRMED, Verdict.REFUTED
CONDITIONAL, UNTESTABLE = Verdict.CONDITIONAL, Verdict.UNTESTABLE

# ---------------- The products found on autograd's graph are those that the closed forms declare and the counter counts


@pytest.mark.parametrize("projection", ["learned", "frozen", "stopped"])
@pytest.mark.parametrize("form", ["reference", "fast"])
@pytest.mark.parametrize("input_grad", [True, False])
def test_products_add_up(projection, form, input_grad):
    found = backward_products(projection, form=form, input_grad=input_grad)
    total = sum(PRODUCTS[name][1] for name, state in found.items() if state != "absent")
    declared = layer(1, N, d, H, projection=projection, form=form, input_grad=input_grad)
    assert total.expand() == declared.backward.expand()
    x = torch.zeros(1, 5, 8, requires_grad=input_grad)
    counts = of(MultiheadAttention(8, 2, projection=projection, form=form), x)
    assert counts.backward == total.subs({N: 5, d: 8})
    discarded = {name for name, state in found.items() if state == "discarded"}
    idle = form == "fast" and (projection == "stopped" or (projection == "frozen" and not input_grad))
    assert discarded == ({"dP", "dQ", "dK"} if idle else set())


def test_shares_by_hand():
    """Section 2's bounds at N = d, by hand: steps of 36, 32 and 22 units of N d^2, or 38, 34 and 30 with the kernel."""
    assert [speed_up(p).subs(r, 1) * s for p, s in (("frozen", 32), ("stopped", 22))] == [36, 36]
    assert [speed_up(p, form="fast").subs(r, 1) * s for p, s in (("frozen", 34), ("stopped", 30))] == [38, 38]
    assert [saved_share(p).subs(r, 1) * 24 for p in ("frozen", "stopped")] == [4, 14]


# --------------------------------------------------------------------------------------------- S2, sections 4.2 and 4.3


@pytest.mark.parametrize("d", [128, 512])
def test_shares_are_counted(d):
    """Counted on running projections; FLOPs are twice the multiplications."""
    x = torch.randn(1, 1, d)
    dense = flops_of(FrozenProjection(d, 2, draw="gaussian"), x)
    assert dense == 2 * 2 * d**2
    assert flops_of(StructuredProjection(d, d // 64, rounds=1), x) / dense == pytest.approx(cheaper.structured(d) / 100)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_several_merged_heads(heads):
    """A head's scores are the products of x (W_Q W_K^T) with x; they cost the FLOPs of one matrix for each head."""
    d = 16
    both = FrozenProjection(d, heads, dtype=torch.float64)
    w_q, w_k = (w.view(heads, d // heads, d) for w in (both.weight_q, both.weight_k))
    products = w_q.mT @ w_k  # (heads, d, d)
    x = torch.randn(1, 5, d, dtype=torch.float64)
    q, k = both(x)
    found = (x[:, None] @ products) @ x[:, None].mT
    torch.testing.assert_close(found, q @ k.mT, atol=1e-12, rtol=0)
    flops = flops_of(lambda x: x @ products, x.expand(heads, -1, -1)) / flops_of(both, x)
    assert 1 - flops == pytest.approx(cheaper.merged(heads) / 100)


# ------------------------------------------------------------------------------------- Evidence of S1 on FlashAttention


def row(N, ratio, memory, device="cuda-a", arm="materialised"):
    return {
        "N": N,
        "arm": arm,
        "device": device,
        "dtype": "float32",
        "ratio_alike": (ratio, ratio, ratio),
        "bytes_ratio": memory,
    }


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([row(1024, 4.0, 3.3)], CONFIRMED),
        ([row(1024, 1.0, 20.0)], REFUTED),
        ([row(1024, 1.0, 3.3, "cpu-a"), row(4096, 4.0, 3.3)], CONDITIONAL),
        ([row(1024, 1.0, 3.3, "cpu-a")], UNTESTABLE),
        ([row(1024, 4.0, 3.3), row(4096, 4.0, None)], CONFIRMED),
        ([], UNTESTABLE),
    ],
)
def test_by_the_clock(monkeypatch, found, verdict):
    monkeypatch.setattr(hardware, "rows", lambda: found)
    assert hardware.faster_and_leaner().verdict == verdict


def test_rows_are_of_the_materialised_form(monkeypatch):
    rows = [row(1024, 1.0, 2.0, arm=arm) for arm in ("flash", "materialised", "materialised causal")]
    monkeypatch.setattr(hardware.experiments, "load", lambda name: [name])
    monkeypatch.setattr(hardware.attention_rows, "beside_alike", lambda records, arms: rows if arms == "exact" else [])
    assert [found["arm"] for found in hardware.rows()] == ["materialised", "materialised causal"]


# ------------------------------------------------------------------------------------------ Evidence that reads records


def record(device="cpu-a", seconds=(2.0, 1.0), threads=1, **case):
    """A record in which each phase takes `seconds` (learned, frozen) by the process's own clock."""
    arms = {}
    for arm, value in zip(("learned", "frozen"), seconds, strict=True):
        arms[arm] = {f"{p}_cpu_s": [value] * 3 for p in measured.PHASES} | {
            f"{p}_s": [9.0] * 3 for p in measured.PHASES
        }
    origin = {"threads": threads, "device_name": "A", "torch": "2", "python": "3", "commit": None, "clean": None}
    origin |= {"date_utc": "2026-01-02T00:00:00+00:00"}
    configuration = training_step.case(**case)
    return {"device": device, "configuration": configuration, "repetitions": arms, "provenance": origin}


def test_the_main_setting_is_one_case_a_length():
    records = [record(N=N) for N in (512, 128)]
    others = [{"N": 64, "d": 512}, {"causal": True}, {"input_grad": False}, {"compiled": True}, {"dtype": "bfloat16"}]
    records += [record(**{"N": 96, **other}) for other in others]
    records += [record("gpu", N=256, dtype=dtype) for dtype in ("bfloat16", "bfloat16", "float32")][1:]
    chosen = measured.main_setting(records, "layer")
    assert [(r["device"], r["configuration"]["N"], r["configuration"]["dtype"]) for r in chosen] == [
        ("cpu-a", 128, "float32"),
        ("cpu-a", 512, "float32"),
        ("gpu", 256, "bfloat16"),
    ]


def test_phases_are_compared_by_the_process_own_time():
    assert measured.phase_ratio(record(), "frozen", "backward") == (0.5, 0.5, 0.5)
    assert measured.phase_ratio(record(threads=2), "frozen", "backward") == (1, 1, 1)
    assert measured.seconds is summary.seconds  # the one rule for every page


def test_time_saved_beside_the_flops_saved():
    saved = measured.saved_time(record(N=768, d=768))
    assert saved["flops"] == 4 * 768**3  # two products of 2 N d^2
    assert saved["flops_share"] == pytest.approx(4 / 26)
    assert (saved["seconds"], saved["seconds_share"]) == (1.0, 0.5)


def test_provenance_of_records_without_a_commit():
    rows = dict(measured.provenance([record(), record()]))
    assert rows["commit"] == "`unknown`"
    assert (rows["measured on"], rows["cases"]) == ("2026-01-02", "2")


def test_provenance_says_how_much_ran_at_once_and_how_often():
    few, many = record(B=16), record(B=2, H=4)
    del few["configuration"]["H"]
    many["repetitions"]["learned"]["forward_s"].append(9.0)
    rows = dict(measured.provenance([few, many]))
    assert (rows["sequences"], rows["heads"], rows["repetitions"]) == ("2, 16", "4", "3 to 4")
    assert dict(measured.provenance([few]))["heads"] == "\u2013"


def test_the_table_of_provenance_has_a_column_for_each_device_or_says_that_there_is_none():
    head, *lines = repr(measured.provenance_table([record(), record(device="cpu-b")])).splitlines()
    assert head.split() == ["`cpu-a`", "`cpu-b`"]
    assert [line.split() for line in lines[-2:]] == [["cases", "1", "1"], ["repetitions", "3", "3"]]
    assert repr(measured.provenance_table([])) == measured.NO_TIMES
    assert repr(measured.provenance_table([], "Nothing.")) == "Nothing."


def test_verdicts_without_any_record(stored):
    assert measured.parts_of_a_step().verdict == REFUTED
    assert measured.inference().verdict == UNTESTABLE


def test_measured_parts_enter_the_verdict(stored):
    stored(training_step=[record(N=4096), record(N=128)])
    ours = measured.parts_of_a_step().ours
    assert "backward, $N \\gg d$: holds at $N = 4,096$ on cpu-a, measured; not at" in ours
    assert "optimiser, measured: median on cpu-a: 0.5 (confirmed)" in ours
    assert "forward, measured: least on cpu-a: 0.5, most on cpu-a: 0.5: outside everywhere (refuted)" in ours


# -------------------------------- The rules found behind S0's printed tables, and the limits that they are held against


def test_the_search_finds_a_planted_ratio(monkeypatch):
    planted = {(n, d): f"{100 * (2 * d + 3 * n) / (7 * d + 5 * n):.1f}" for n, d in SPEED_UPS}
    monkeypatch.setattr(printed, "SPEED_UPS", planted)
    assert (2, 3, 7, 5) in ratios_that_fit(12)


def test_the_weights_give_the_rule():
    found = weights_that_fit()
    assert ("saved", "N d^2", printed.BACKWARD, printed.OPTIMISER, printed.DROPPED) in found
    assert {(reading, part) for reading, part, *_ in found} == {("saved", "N d^2")}
    for n, width in SPEED_UPS:
        gain = step_gain(n / width, printed.BACKWARD, printed.OPTIMISER, printed.DROPPED)
        assert gain == pytest.approx(printed.table_rule(n, width), rel=1e-12)
    total = 1 + printed.BACKWARD + printed.OPTIMISER
    assert printed.OPTIMISER / total == pytest.approx(float(printed.OPTIMISER_SHARE), rel=1e-12)


def test_speed_up_and_share_saved_say_the_same():
    saved, speed_up = (step_gain(1.5, 2, 0.5, 1, reading=reading) / 100 for reading in ("saved", "speed-up"))
    assert 1 / (1 - saved) == pytest.approx(1 + speed_up, rel=1e-12)
    assert step_gain(1.0, 0, 0, 2, reading="speed-up") == float("inf")


@pytest.mark.parametrize("n", [128, 768, 8192])
def test_limits_in_closed_form(n):
    r = n / 768
    assert limit(n, 768) == pytest.approx(100 / (5 + 3 * r), rel=1e-12)
    assert limit(n, 768, of=block) == pytest.approx(100 / (17 + 3 * r), rel=1e-12)
    assert limit(n, 768, form="fast") < limit(n, 768)
    for s in (1 / 7, 0.5, 0.9):
        left = 1 - (1 - s) / (6 + 3 * r) - s / 2  # the share of the standard step that is left
        assert limit(n, 768, optimiser=s) == pytest.approx(100 / left - 100, rel=1e-12)
        left = 1 - (1 - s) / (18 + 3 * r) - s / 6
        assert limit(n, 768, optimiser=s, of=block) == pytest.approx(100 / left - 100, rel=1e-3)  # up to the norms
        assert limit(n, 768, optimiser=s, of=block) < 20


def test_the_share_of_an_update_by_hand():
    """28 bytes a weight and 26 N d^2 FLOPs, N = d/6, both at peak rates; with many sequences the share vanishes."""
    update, products = 28 * 4 * 768**2 / 3.35e12, 26 * 128 * 768**2 / 989e12
    assert update_share(128, 768) == pytest.approx(update / (update + products), rel=1e-12)
    assert update_share(128, 768, sequences=10**6) < 1e-4


def test_the_needed_share_is_just_enough():
    share = needed_share(30.0, 512, 768)
    assert limit(512, 768, optimiser=share) == pytest.approx(30.0, rel=1e-12)


@pytest.mark.parametrize("form", ["fast", "reference"])
def test_even_length_is_the_shortest(form):
    length = even_length(128, form=form)
    # The definition keeps float32; the sources' bytes are those of half precision.
    itemsize = {"fast": 2, "reference": 4}[form]
    dtype = {2: torch.float16, 4: torch.float32}[itemsize]
    kept = [layer_bytes(n, 128, 2, form=form, dtype=dtype) * 2 // itemsize for n in (length - 1, length)]
    assert kept[0] < sum(memory(128).values()) <= kept[1]


def test_limits_of_whole_models_by_hand():
    """Each model's products, with pairs of tokens as either form counts them; the form that allows more is the
    bound."""
    N, d = 512, 768
    pooler = 3 * 2 * d * d
    step = 12 * (72 * N * d**2 + 12 * N**2 * d) + pooler
    assert whole_limit("BERT-base") == pytest.approx(100 * (step / (step - 12 * 4 * N * d**2) - 1))
    N, d = 1024, 1024
    read_out, pairs = 3 * 2 * N * d * 50257, 14 * d * N * (N + 1) / 2  # fused: forward 4, backward 10, by pairs
    step = 24 * (72 * N * d**2 + pairs) + read_out
    assert whole_limit("GPT-2 medium") == pytest.approx(100 * (step / (step - 24 * 4 * N * d**2) - 1))
    N, d = 197, 768
    ends = 2 * 2 * 196 * d * d + 3 * 2 * 1000 * d  # patches (of the gradients only the weights'), and the head
    step = 12 * (72 * N * d**2 + 12 * N**2 * d) + ends
    assert whole_limit("ViT") == pytest.approx(100 * (step / (step - 12 * 4 * N * d**2) - 1))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_whole_model_gains_less_than_its_layers(name):
    at = SCENARIOS[name]
    assert 0 < whole_limit(name) < limit(at.length, at.width) < at.speed_up
    assert whole_limit(name) < fewer_weights(name) < at.speed_up
    assert whole_limit(name) < whole_limit(name, "stopped")


def test_weights_of_whole_models():
    """Two matrices and their biases are frozen in each layer; in FP16 a gradient and two moments of each are saved."""
    for name, layers, width, published in (
        ("BERT-base", 12, 768, 109_482_240),
        ("GPT-2 medium", 24, 1024, 354_823_168),
    ):
        frozen = layers * 2 * (width * width + width)
        for whole in (False, True):
            fall = millions(name, whole=whole) - millions(name, "frozen", whole=whole)
            assert fall == pytest.approx(frozen / 1e6, rel=1e-12)
        assert millions(name, whole=True) == published / 1e6
        assert saved_megabytes(name) == 3 * 2 * frozen / 1e6


# ------ Section 3's rows are those of running layers; the lookup's bounds are met, and passed by nothing that was tried


def test_the_task_in_words():
    """A token's key is found among the axes, and its target is the value beside the next key."""
    embedding = lookup.apart(entries=5)
    x, target = lookup.sequences(embedding, 7)
    assert torch.allclose(x.square().mean(-1), torch.ones(7, 5).double())  # mean square one
    keys = x[..., :5].argmax(-1)
    values = x @ torch.linalg.pinv(embedding.values)
    for item in range(7):
        assert sorted(keys[item].tolist()) == list(range(5))
        for i, key in enumerate(keys[item].tolist()):
            wanted = keys[item].tolist().index((key + 1) % 5)
            assert torch.allclose(values[item, wanted], target[item, i])
    assert not torch.equal(x, lookup.sequences(embedding, 7, seed=2).x)


def test_least_error_is_a_minimum():
    """No random attempt has a smaller error, and the layer that solves the task has next to no error."""
    data = lookup.sequences(lookup.apart(6), 40)
    frozen = lookup.attention_layer("frozen")
    least = lookup.least_error(frozen, data)
    with torch.no_grad():
        for _ in range(20):
            frozen.weight_v.normal_(std=0.1)
            assert lookup.error(frozen(data.x), data.target) > least
    assert lookup.least_error(lookup.standard_solution(lookup.apart(6)), data) <= lookup.SOLVED


@pytest.mark.bad_input
def test_fixed_weights_reach_their_bound():
    """The error of a Synthesizer with equal weights on all other tokens is the bound, up to the sample's spread."""
    embedding = lookup.apart()
    data = lookup.sequences(embedding, 400)
    module = SynthesizerAttention(lookup.D_MODEL, lookup.HEADS, lookup.ENTRIES, dtype=torch.float64)
    with torch.no_grad():
        module.sources[0].matrix.copy_(-1e3 * torch.eye(lookup.ENTRIES).expand(lookup.HEADS, -1, -1))
        lookup.pass_values(module, embedding)
        found = lookup.error(module(data.x), data.target)
    # 51,200 outputs; the error of one has a standard deviation below 1
    assert abs(found - lookup.fixed_weights_error(lookup.ENTRIES)) < 4 / 51_200**0.5


@pytest.mark.parametrize("name", ["linear", "favor"])
def test_rank_bound(name):
    """In random attempts the weights of few features stay as far from a permutation as their rank requires."""
    generator = torch.Generator().manual_seed(3)
    eye = torch.eye(12, dtype=torch.float64)
    width = 3
    rows = torch.randn(width, width, generator=generator).double()
    feature_map = EluPlusOne() if name == "linear" else PositiveFeatures(rows)
    for size in (0.5, 2.0, 6.0):
        q, k = size * torch.randn(2, 12, width, generator=generator, dtype=torch.float64)
        weights = linear_attention_reference(q, k, eye, feature_map=feature_map)
        assert (weights - eye.roll(1, 1)).square().sum() / 12 >= lookup.low_rank_error(12, width)
    assert lookup.low_rank_error(12, width) == pytest.approx(1 - width / 12)
    assert lookup.low_rank_error(12, 12) == 0


def test_heads_of_linear_attention_solve_the_lookup_together():
    """They fail without the head that subtracts the means; if all features are in use, none is left for that head."""
    embedding = lookup.apart()
    data = lookup.sequences(embedding)
    layer = lookup.linear_solution(embedding)
    assert lookup.error(layer(data.x), data.target) <= lookup.SOLVED
    K, last = lookup.D_MODEL // lookup.HEADS, 3  # 16 keys in three heads, 7 at most in each
    with torch.no_grad():
        layer.weight_o[:, K * last : K * (last + 1)] = 0
    assert lookup.error(layer(data.x), data.target) > 0.1
    with pytest.raises(ValueError, match="at most 49 keys, got 50"):
        lookup.linear_solution(lookup.apart(50))


def test_codes_are_apart():
    products = lookup.codes(7, 4) @ lookup.codes(7, 4).T
    assert torch.equal(products.diag(), torch.ones(7).double())
    assert products.fill_diagonal_(0).max() <= 0
    with pytest.raises(ValueError, match="entries: expected at most 2 width = 8, got 9"):
        lookup.codes(9, 4)


def test_misplaced_weight():
    exact = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert methods.misplaced(exact, exact) == 0
    assert methods.misplaced(exact.flip(1), exact) == 50  # all of the first row, none of the second
