"""States written token by token at the edges: any decay, half precision, layouts, memory, errors, compiling."""

from itertools import pairwise, product

import pytest
import torch
from recurrent_operands import (
    ADDING,
    FORMS,
    FUNCTIONS,
    NAMES,
    NORMALISING,
    arguments,
    call,
    close,
    fading,
    with_gradients,
)
from refusals import refuses
from seeded import draw

from ortho import MECHANISMS
from ortho.cost.counting import saved_bytes

NAN, INF = float("nan"), float("inf")
FADING = [name for name in NAMES if name != "delta"]
EMPTIED = [name for name in FADING if name != "vector-gated"]  # vector gates take errors from the state before it fades
LOGARITHMS = [name for name in NAMES if "log_decay" in MECHANISMS[name].gates]


def fading_arguments(name, *lead, **kwargs):
    """Arguments of the functions that `fading` gives."""
    given = arguments(name, *lead, **kwargs)
    if name == "ssd":
        given["log_decay"] = -given.pop("rate") * given.pop("step")
    return given


def to(given, dtype):
    return {name: x.to(dtype) for name, x in given.items()}


@pytest.mark.parametrize(("name", "causal"), list(product(FADING, [False, True])))
@pytest.mark.parametrize("rate", [0.0, -1e-3, -5.0, -1e4, -1e30, "any"])
def test_any_decay(name, causal, rate):
    """With this decay for two tokens in three, or any decays for about one in three, and about -0.1 for the others,
    outputs, states and all gradients are the recurrence's to 1e-12.

    Over a chunk of 64 the decays of e^-5 multiply to about e^-215; in float32 keys could not be divided by that.
    """
    given = fading_arguments(name, 2, length=130)
    shape = given["log_decay"].shape
    if rate == "any":
        exponents = torch.randint(-3, 301, shape, generator=torch.Generator().manual_seed(1)).double()
        strong = draw(*shape, seed=2) > 0.4
        given["log_decay"] = torch.where(strong, -(10**exponents), -draw(*shape, seed=3).abs() / 9)
    else:
        given["log_decay"] = torch.full_like(given["log_decay"], rate)
        given["log_decay"][:, 1::3] = -0.1
    expected = with_gradients(fading(name, "reference"), given, is_causal=causal)
    assert all(x.isfinite().all() for x in expected)
    close(with_gradients(fading(name, "fast"), given, is_causal=causal), expected)


@pytest.mark.parametrize(("name", "form"), list(product(EMPTIED, FORMS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("strong", [-1e4, "least"])
def test_strong_decays(name, form, dtype, strong):
    """Such a decay empties the state: later outputs and all gradients are those of a sequence that begins there, to
    rounding. A difference of sums that contain -1e4 would have an error of 1e-3 in float32."""
    given = to(fading_arguments(name, 2, length=150), dtype)  # three chunks of 50 or more
    cuts = [0, 1, 20, 21, 49, 50, 51, 97, 100, 150]
    given["log_decay"][given["log_decay"] < -1e4] = -0.1
    given["log_decay"][:, cuts[:-1]] = torch.finfo(dtype).min if strong == "least" else strong

    def in_parts(return_state, initial_state, log_decay, **leaves):
        outputs, S = [], None
        for start, stop in pairwise(cuts):
            mild = torch.cat([0 * log_decay[:, start : start + 1], log_decay[:, start + 1 : stop]], 1)
            part = {x: y[:, start:stop] for x, y in leaves.items()} | {"log_decay": mild}
            o, S = fading(name, "reference")(**part, is_causal=True, return_state=True)
            outputs.append(o)
        return torch.cat(outputs, 1) + 0 * initial_state[0].sum(), S

    found = with_gradients(fading(name, form), given, is_causal=True)
    exact = with_gradients(in_parts, to(given, torch.float64))
    # 50 rounded products, through systems whose inverses have entries of at most 2; with keys of any length, about 10.
    bound = (1e4 if name in ADDING else 1e3) * torch.finfo(dtype).eps
    for one, other in zip(found, exact, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one.double(), other, atol=bound, rtol=bound)


@pytest.mark.parametrize(("name", "form"), list(product(LOGARITHMS, FORMS)))
def test_decays_beyond_float32(name, form):
    """A gate in float64 beside operands in float32: a decay that overflows float32 is one to nothing, and not NaN."""
    given = to(arguments(name, 2, length=70, state=False), torch.float32)
    given["log_decay"] = given["log_decay"].double()
    results = []
    for strong in (-1e300, -1e4):
        given["log_decay"][:, 30] = strong
        results.append(with_gradients(FUNCTIONS[name, form], given, is_causal=True))
    assert all(x.isfinite().all() for x in results[0])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("name", "form"), list(product(NAMES, FORMS)))
@pytest.mark.parametrize("gates", [torch.float32, torch.bfloat16])
def test_half_precision(name, form, gates):
    """Only the operands and the output are rounded, the latter by eps / 2. In between are float32 sums of 70 terms of
    about 10. Gates have a dtype of their own, and the state is in float32."""
    given = {x: y.to(torch.bfloat16 if x in "qkv" else gates) for x, y in arguments(name, 2, length=70).items()}
    given["initial_state"] = given["initial_state"].float()
    exact, state = call(FUNCTIONS[name, "reference"], to(given, torch.float64), is_causal=True)
    o, S = call(FUNCTIONS[name, form], given, is_causal=True)
    assert o.dtype == torch.bfloat16 and S.dtype == torch.float32
    assert ((o - exact).abs() <= torch.finfo(o.dtype).eps / 2 * exact.abs() + 1e-4).all()
    torch.testing.assert_close(S.double(), state, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_rounded_unit_keys_are_unit_keys(dtype, form):
    """If the caller divides keys by their lengths, in any precision, strengths of 2 are served."""
    k = torch.nn.functional.normalize(draw(500, 64, dtype=torch.float32).to(dtype), dim=-1)
    beta = torch.full((500,), 2, dtype=dtype)
    assert FUNCTIONS["delta", form](k, k, k, beta=beta, qk_l2norm=False).isfinite().all()
    with pytest.raises(ValueError, match=r"^k: expected beta \|k\|\^2 within 0 and 2.*, got 2"):
        FUNCTIONS["delta", form](k, 1.2 * k, k, beta=beta, qk_l2norm=False)


@pytest.mark.parametrize("name", ["delta", "gated-delta"])
def test_backward_under_autocast(name):
    """A causal backward pass with code of its own is also computed in float32 inside autocast."""
    given = to(arguments(name, 2, length=9), torch.float32)
    expected = with_gradients(FUNCTIONS[name, "fast"], given, is_causal=True, chunk=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = with_gradients(FUNCTIONS[name, "fast"], given, is_causal=True, chunk=4)
    assert all(map(torch.equal, found, expected))


def test_one_state_a_chunk_is_kept():
    """Nothing else of size K V is kept by autograd for the delta rule."""

    def kept(form, width, **kwargs):
        q, k, v = (torch.ones(1, 48, width, requires_grad=True) for _ in range(3))
        with saved_bytes() as count:
            FUNCTIONS["delta", form](q, k, v, beta=torch.ones(1, 48), is_causal=True, **kwargs)
        return count()

    for form, kwargs, states in (("fast", {"chunk": 16}, 3), ("fast", {"chunk": 4}, 12), ("reference", {}, 49)):
        small, middle, large = (kept(form, width, **kwargs) for width in (10, 20, 30))
        assert large - 2 * middle + small == 4 * 2 * 10**2 * states  # the second difference of 4 K^2 a state


ONES = torch.ones(2, 5, dtype=torch.float64)
KEYS = torch.ones(2, 5, 4, dtype=torch.float64)
STATE = torch.zeros(2, 4, 3, dtype=torch.float64)
HIDDEN = torch.ones(5, dtype=torch.bool)
BAD = [  # besides what every mechanism refuses, which test_softmax.py has
    ({"beta": ONES[:, :4]}, r"beta: expected shape \(2, 5\) like the keys, got \(2, 4\)"),
    ({"beta": ONES[0]}, r"beta: expected shape \(2, 5\) like the keys, got \(5,\)"),
    ({"beta": ONES[..., None]}, r"beta: expected shape \(2, 5\) like the keys, got \(2, 5, 1\)"),
    ({"beta": ONES * -0.1}, "beta: expected write strengths within 0 and [12], got -0.1 to -0.1"),
    ({"beta": ONES * 2.1}, "beta: expected write strengths within 0 and [12], got 2.1 to 2.1"),
    ({"beta": ONES * NAN}, "beta: expected write strengths within 0 and [12], got nan to nan"),
    ({"beta": 0.5}, "beta: expected a floating-point tensor, got float 0.5", TypeError),
    ({"beta": ONES.long()}, "beta: expected a floating-point tensor, got a int64", TypeError),
    ({"beta": ONES.to("meta")}, "beta: expected a tensor on cpu like the keys, got one on meta", TypeError),
    ({"qk_l2norm": False}, r"k: expected beta \|k\|\^2 within 0 and 2, got \d[\d.]* to \d"),
    ({"k": KEYS * 1e200}, "k: expected squared lengths within 0 and 1.8e.308, got inf"),
    ({"attn_mask": HIDDEN.expand(5, 5)}, r"attn_mask: expected a mask of keys, of shape"),
    ({"initial_state": 5}, r"initial_state: expected a tuple of tensors \(S\), got int 5", TypeError),
    ({"initial_state": STATE}, r"initial_state: expected a tuple of tensors \(S\), got a", TypeError),
    ({"initial_state": ()}, r"initial_state: expected a tuple of tensors \(S\), got tuple of 0"),
    ({"initial_state": (STATE, STATE)}, r"initial_state: .* \(S\), got tuple of 2"),
    *(
        (
            {"initial_state": (x,)},
            r"initial_state: expected S torch.float64 of shape \(2, 4, 3\), got a float\d+ tensor of",
        )
        for x in (STATE.mT, STATE[0], STATE.float())
    ),
    ({"initial_state": (STATE,), "attn_mask": HIDDEN}, "attn_mask: expected None beside an initial_state"),
    ({"log_decay": "shape"}, r"log_decay: expected shape \(2, 5.*\) like the keys, got \(2, 5"),
    ({"log_decay": 1.0}, "log_decay: expected logarithms of decays within .* 0, got 1 to 1"),
    ({"log_decay": NAN}, "log_decay: expected logarithms of decays .* got nan to nan"),
    ({"log_decay": -INF}, "log_decay: expected logarithms of .* got -inf to -inf"),
    ({"log_decay": [0.0]}, "log_decay: expected a floating-point tensor, got list of 1: float 0.0", TypeError),
]
ERASURE = "beta", "qk_l2norm", "k"  # mechanisms that only add do not take these, or take them as they are


@pytest.mark.bad_input
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("change", "message", "error"), [(*row, ValueError)[:3] for row in BAD])
def test_errors(form, change, message, error):
    argument, value = next(iter(change.items()))
    for name in NAMES:
        if (name in ADDING and argument in ERASURE) or (name not in LOGARITHMS and argument == "log_decay"):
            continue
        if name not in NORMALISING and argument == "qk_l2norm":
            continue
        given = arguments(name, 2, length=5, state=False)
        given.pop("beta", None)
        if argument == "log_decay":
            rates = given["log_decay"]
            if value == "shape":
                change = {argument: KEYS if rates.dim() == 2 else ONES}
            elif isinstance(value, float):
                change = {argument: torch.full_like(rates, value)}
        refuses(f"^{message}", FUNCTIONS[name, form], error=error, **given | change)


@pytest.mark.bad_input
@pytest.mark.parametrize("form", FORMS)
def test_bad_steps_and_rates(form):
    """Steps and rates beside half-precision keys are served if float32 holds them."""
    q, k, v = (KEYS.to(torch.bfloat16),) * 3
    ssd, single = FUNCTIONS["ssd", form], ONES.float()
    for change, message in (
        ({"step": -0.1 * single}, "step: expected steps within 0 and 3.4e.38, got -0.1 to -0.1"),
        ({"rate": -0.1 * single}, "rate: expected rates within 0 and 3.4e.38, got -0.1 to -0.1"),
        ({"rate": 1e39 * ONES}, r"rate: expected rates within 0 and 3.4e.38, got 1e\+39"),
        ({"step": KEYS}, r"step: expected shape \(2, 5\) like the keys, got \(2, 5, 4\)"),
        (
            {"step": 1e30 * single, "v": 1e9 * v},
            "v: expected values times their steps within -3.4e.38 and 3.4e.38, got",
        ),
    ):
        refuses(f"^{message}", ssd, **{"q": q, "k": k, "v": v} | change)
    assert ssd(q, k, v, step=1e30 * single, rate=1e30 * single, is_causal=True).isfinite().all()
