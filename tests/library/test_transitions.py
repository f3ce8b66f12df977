"""Products of transitions, the chunk's system, several keys at once, gated forms: bounds, closed forms, limits."""

from math import inf, log, pi, sqrt

import pytest
import torch
from seeded import draw as normal
from seeded import filled, generator

from ortho import MECHANISMS
from ortho.theory import transitions
from ortho.theory.estimates import SIGMAS, estimate

EPS = torch.finfo(torch.float64).eps
FACTORS = [0.3, 1.0, 1.9, 2.1, 4.0]  # c = beta |k|^2


def norm(P):
    return float(torch.linalg.matrix_norm(P, 2))


# -------------------------------------------------------------------------------------------------- products of steps


@pytest.mark.parametrize("c", FACTORS)
def test_growth_is_a_walk_with_the_derived_mean_and_spread(c):
    """Mean and variance of 300 sums of 50 steps, two comparisons of error rate 1e-5 each."""
    rate, spread = transitions.growth(c, 8)
    steps = 50
    samples = transitions.sample_growth(c, 8, steps, 300, generator=generator())
    assert abs(estimate(samples).deviation(steps * rate)) < SIGMAS
    assert abs(estimate((samples - steps * rate) ** 2).deviation(steps * spread**2)) < SIGMAS
    assert (rate < 0) == (0 < c < 2)


def test_growth_in_the_plane_by_hand():
    """K = 2, c = 1: u is the squared sine of a uniform angle; the mean of ln |cos| is -ln 2, its variance pi^2/12."""
    rate, spread = transitions.growth(1.0, 2)
    assert rate == pytest.approx(-log(2), rel=1e-9)
    assert spread == pytest.approx(sqrt(pi**2 / 12), rel=1e-9)
    assert transitions.growth(2.0, 5) == transitions.growth(0.0, 5) == (0, 0)


@pytest.mark.parametrize("c", FACTORS)
def test_mean_square_is_the_mean_of_squares(c):
    """One step, whose square is bounded, so that its mean over 2,000 draws is near normal."""
    samples = transitions.sample_growth(c, 6, 1, 2000, generator=generator())
    assert abs(estimate((2 * samples).exp()).deviation(transitions.mean_square(c, 6, 1))) < SIGMAS
    assert transitions.mean_square(c, 6, 7) == pytest.approx(transitions.mean_square(c, 6, 1) ** 7)


@pytest.mark.parametrize(("beta", "length"), [(0.5, 1), (1, 1), (2, 1), (2.1, 1), (1, 1.5)])
def test_no_product_is_above_the_bound_and_one_key_attains_it(beta, length):
    c, steps = beta * length**2, 40
    rounding = 1 + 100 * steps * EPS
    for seed in range(5):
        P = transitions.product(length * transitions.unit_keys(steps, 6, generator=generator(seed)), beta)
        assert norm(P) <= transitions.norm_bound(c, steps) * rounding
    repeated_key = (length * transitions.unit_keys(1, 6, generator=generator())).repeat(steps, 1)
    assert norm(transitions.product(repeated_key, beta)) == pytest.approx(
        transitions.norm_bound(c, steps), rel=rounding - 1
    )


def test_bound_beyond_the_largest_number():
    assert transitions.norm_bound(4.0, 400) == 3.0**400
    assert transitions.norm_bound(4.0, 4000) == inf


def test_products_are_in_order():
    k = normal(3, 4)
    H = [torch.eye(4, dtype=k.dtype) - 0.7 * torch.outer(key, key) for key in k]
    torch.testing.assert_close(transitions.product(k, 0.7), H[2] @ H[1] @ H[0])


def test_orthogonalising_keeps_products_orthogonal_and_no_nearer_to_the_right_one():
    """Each float32 step is off by a few eps; 1,000 steps in random directions by about 30 times that."""
    plain = transitions.reflection_drift(1000, 8, generator=generator())
    mended = transitions.reflection_drift(1000, 8, orthogonalise_every=10, generator=generator())
    eps = torch.finfo(torch.float32).eps
    assert mended.from_orthogonal < 20 * eps < plain.from_orthogonal
    assert mended.from_exact > plain.from_exact / 4
    wide = transitions.reflection_drift(1000, 8, dtype=torch.float64, generator=generator())
    assert wide.from_orthogonal < 1e-6 * plain.from_orthogonal and wide.from_exact < 1e-6 * plain.from_exact


def test_orthogonalising_a_contraction_undoes_it():
    k = transitions.unit_keys(200, 6, generator=generator())
    assert norm(transitions.product(k, 0.7)) < 1e-3
    mended = transitions.product(k, 0.7, orthogonalise_every=20)
    torch.testing.assert_close(mended.T @ mended, torch.eye(6, dtype=k.dtype))


def test_orthogonalising_a_memory_loses_what_it_holds():
    before, after = transitions.recall_errors(12, generator=generator())
    assert before < 100 * EPS
    assert after > 0.5


def test_nearest_orthogonal():
    """For an orthogonal matrix times a positive one it is the first factor."""
    Q = transitions.nearest_orthogonal(normal(5, 5))
    torch.testing.assert_close(Q @ Q.T, torch.eye(5, dtype=Q.dtype))
    X = normal(5, 5, seed=1)
    torch.testing.assert_close(transitions.nearest_orthogonal(Q @ (X @ X.T)), Q)


# ------------------------------------------------------------------------------------------------- the chunk's system


@pytest.mark.parametrize("kind", transitions.KEYS)
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.5, 2.0])
def test_inverse_and_condition(kind, beta):
    """The inverse's formula, its bound, and the condition number's; errors of both inverses grow with the latter."""
    C = 64
    k, b = transitions.chunk_keys(kind, C, 32, generator=generator()), filled(C, beta)
    inverse = torch.linalg.inv(transitions.chunk_system(k, b))
    number = transitions.condition(k, b)
    torch.testing.assert_close(inverse, transitions.inverse_by_products(k, b), rtol=0, atol=C * EPS * number)
    assert inverse.tril(-1).abs().max() <= beta * (1 + C * EPS * number)
    assert number <= transitions.condition_bound(C, beta)


def test_identical_keys_by_hand():
    """The inverse is -b (1 - b)^(i - j - 1) below the diagonal; at b = 2 the bound is met up to a factor of 1.3."""
    k, b = transitions.chunk_keys("identical", 6, 4, generator=generator()), filled(6, 1.5)
    inverse = torch.linalg.inv(transitions.chunk_system(k, b))
    i, j = torch.tril_indices(6, 6, -1)
    torch.testing.assert_close(inverse[i, j], -1.5 * (-0.5) ** (i - j - 1).double())
    k, b = transitions.chunk_keys("identical", 64, 4, generator=generator()), filled(64, 2.0)
    assert transitions.condition(k, b) > transitions.condition_bound(64, 2) / 1.3


def test_keys_are_what_their_name_says():
    for kind, least, most in (("random", -1, 0.9), ("near-parallel", 0.95, 1), ("identical", 1, 1)):
        k = transitions.chunk_keys(kind, 10, 16, generator=generator())
        cosines = (k @ k.T)[~torch.eye(10, dtype=torch.bool)]
        assert cosines.min() >= least - 10 * EPS and cosines.max() <= most + 10 * EPS
        assert cosines.std() > 0 or kind == "identical"


def test_a_narrow_inverse_costs_digits():
    """bfloat16 keeps 8 bits: errors are above 2^-10. float32's errors are below its eps times the condition number."""
    k, b = transitions.chunk_keys("near-parallel", 64, 32, generator=generator()), filled(64, 1.0)
    eps = torch.finfo(torch.float32).eps
    assert transitions.solve_error(k, b, torch.float32) < eps * transitions.condition(k, b)
    assert transitions.solve_error(k, b, torch.bfloat16) > 2**-10


# --------------------------------------------------------------------------------------------- several keys in one go


def test_at_once_diverges_where_in_turn_does_not():
    """Near-parallel unit keys, beta = 1.5: modulus 2 along both; the product of two contractions is a contraction."""
    keys, beta = transitions.pair(1 - 1e-12), filled(2, 1.5)
    values = normal(2, 3)
    eigenvalues = torch.linalg.eigvalsh(transitions.transition("at once", keys, beta))
    assert eigenvalues.min() == pytest.approx(-2, abs=1e-9)
    assert norm(transitions.transition("in turn", keys, beta)) <= 1 + 10 * EPS
    assert transitions.repeated("at once", keys, values, beta, 30)[-1] > 1e6
    assert transitions.repeated("in turn", keys, values, beta, 30)[-1] < 1.5


@pytest.mark.parametrize("cosine", [-1, -0.5, 0, 0.3, 1 / 3, 0.9, 1])
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.5, 2.0])
def test_norm_of_a_pair(cosine, beta):
    strengths = filled(2, beta)
    assert norm(transitions.transition("at once", transitions.pair(cosine), strengths)) == pytest.approx(
        transitions.pair_norm(cosine, beta)
    )
    assert (transitions.pair_norm(cosine, beta) > 1 + 1e-9) == (beta * (1 + abs(cosine)) > 2 + 1e-9)
    assert norm(transitions.transition("in turn", transitions.pair(cosine), strengths)) <= 1 + 10 * EPS


def test_both_are_the_delta_rule_for_one_key_and_the_same_for_orthogonal_ones():
    S, v, beta = normal(4, 3), normal(3, 3, seed=1), torch.tensor([0.5, 1.5, 2.0]).double()
    orthogonal = transitions.nearest_orthogonal(normal(4, 4, seed=2))[:3]
    torch.testing.assert_close(transitions.at_once(S, orthogonal, v, beta), transitions.in_turn(S, orthogonal, v, beta))
    k = transitions.unit_keys(3, 4, generator=generator())
    for j in range(3):
        one = slice(j, j + 1)
        _, (after,) = MECHANISMS["delta"].reference(
            k[one], k[one], v[one], beta=beta[one], qk_l2norm=False, initial_state=(S,), return_state=True
        )
        torch.testing.assert_close(transitions.at_once(S, k[one], v[one], beta[one]), after)
        S = after
    assert not torch.allclose(transitions.at_once(S, k, v, beta), transitions.in_turn(S, k, v, beta))


# --------------------------------------------------------------------------------------------------------- gated forms


@pytest.mark.parametrize("form", ["reference", "fast"])
def test_the_input_form_is_gated_delta_net(form):
    q, v = normal(2, 90, 6), normal(2, 90, 5, seed=1)
    k = transitions.unit_keys(2, 90, 6, generator=generator(2))
    one, other = torch.rand(2, 2, 90, generator=generator(3), dtype=torch.float64)
    gamma, eta = (1 + one) / 2, (1 + one) * other  # eta <= 2 gamma
    mapped = transitions.as_erasing(v, gamma, eta)
    o = MECHANISMS["gated-delta"].form(form)(q, k, is_causal=True, qk_l2norm=False, **mapped._asdict())
    torch.testing.assert_close(o, transitions.gated_recurrence(q, k, v, gamma, eta), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", ["reference", "fast"])
def test_the_input_form_with_vector_gates(form):
    """The mechanism divides by about 5e-7 more than |k|."""
    q, v = normal(2, 90, 6), normal(2, 90, 5, seed=1)
    k = transitions.unit_keys(2, 90, 6, generator=generator(2))
    gamma, eta = (torch.rand(2, 90, *rest, generator=generator(3), dtype=torch.float64) for rest in ([6], []))
    o = MECHANISMS["vector-gated"].form(form)(q, k, v, is_causal=True, log_decay=gamma.log(), beta=eta)
    unit_q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    expected = transitions.gated_recurrence(unit_q, k / (1 + 1e-6) ** 0.5, v, gamma, eta)
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-10)


def test_transition_of_the_input_form():
    """Its eigenvalues are gamma and gamma - eta |k|^2, so that `contracts` is exact; `maps` implies it."""
    k = 1.3 * transitions.unit_keys(1, 4, generator=generator())[0]
    inside = 0
    for gamma in torch.linspace(-1.2, 1.2, 13).tolist():
        for eta in torch.linspace(-0.5, 2, 11).tolist():
            gate = torch.tensor([gamma, eta]).double()
            A = transitions.gated_step(torch.eye(4, dtype=k.dtype), k, k.new_zeros(4), *gate)
            assert transitions.contracts(gamma, eta, 1.3) == (norm(A) <= 1 + 10 * EPS)
            assert transitions.contracts(gamma, eta, 1.3) or not transitions.maps(gamma, eta, 1.3)
            inside += transitions.contracts(gamma, eta, 1.3) and not transitions.maps(gamma, eta, 1.3)
    assert inside > 0


def test_channel_gates_have_no_such_map():
    """With one value for all channels they are the scalar gate; else the mapped form's erasure is not symmetric."""
    k, v, S = transitions.unit_keys(2, 4, generator=generator())[0], normal(3), normal(4, 3, seed=1)
    gamma, eta = torch.tensor(0.8).double(), torch.tensor(0.6).double()
    torch.testing.assert_close(
        transitions.gated_step(S, k, v, gamma.repeat(4), eta),
        transitions.gated_step(S, k, v, gamma, eta),
        rtol=0,
        atol=10 * EPS,
    )
    channels = torch.tensor([0.5, 0.7, 0.9, 1.0]).double()
    A = transitions.gated_step(torch.eye(4, dtype=k.dtype), k, k.new_zeros(4), channels, eta)
    torch.testing.assert_close(A, channels.diag() - eta * torch.outer(k, k))
    erased = torch.eye(4, dtype=k.dtype) - A @ channels.reciprocal().diag()  # I - A Diag(gamma)^-1
    assert (erased - erased.T).norm() > 0.1 * erased.norm()


def test_gates_made_of_the_memory_are_not_affine():
    k, v = transitions.unit_keys(1, 4, generator=generator())[0], normal(3)
    memories = normal(4, 3, seed=1), normal(4, 3, seed=2)
    gamma, eta = torch.tensor([0.8, 0.6]).double()
    assert transitions.affinity_error(lambda S: transitions.gated_step(S, k, v, gamma, eta), *memories) < 100 * EPS
    assert (
        transitions.affinity_error(lambda S: transitions.gated_step(S, k, v, torch.sigmoid(S.sum()), eta), *memories)
        > 1e-3
    )


# -------------------------------------------------------------------------------------------------------------- errors
