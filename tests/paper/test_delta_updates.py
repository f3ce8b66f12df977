"""Several keys at once, gated forms: what they are equal to, where they grow."""

import pytest
import torch
from seeded import draw as normal
from seeded import filled, generator

from ortho import MECHANISMS
from ortho.theory import transitions
from paper.theory import delta_updates

EPS = torch.finfo(torch.float64).eps


def norm(P):
    return float(torch.linalg.matrix_norm(P, 2))


def test_at_once_diverges_where_in_turn_does_not():
    """Near-parallel unit keys, beta = 1.5: modulus 2 along both; the product of two contractions is a contraction."""
    keys, beta = delta_updates.pair(1 - 1e-12), filled(2, 1.5)
    values = normal(2, 3)
    eigenvalues = torch.linalg.eigvalsh(delta_updates.transition("at once", keys, beta))
    assert eigenvalues.min() == pytest.approx(-2, abs=1e-9)
    assert norm(delta_updates.transition("in turn", keys, beta)) <= 1 + 10 * EPS
    assert delta_updates.repeated("at once", keys, values, beta, 30)[-1] > 1e6
    assert delta_updates.repeated("in turn", keys, values, beta, 30)[-1] < 1.5


@pytest.mark.parametrize("cosine", [-1, -0.5, 0, 0.3, 1 / 3, 0.9, 1])
@pytest.mark.parametrize("beta", [0.5, 1.0, 1.5, 2.0])
def test_norm_of_a_pair(cosine, beta):
    strengths = filled(2, beta)
    assert norm(delta_updates.transition("at once", delta_updates.pair(cosine), strengths)) == pytest.approx(
        delta_updates.pair_norm(cosine, beta)
    )
    assert (delta_updates.pair_norm(cosine, beta) > 1 + 1e-9) == (beta * (1 + abs(cosine)) > 2 + 1e-9)
    assert norm(delta_updates.transition("in turn", delta_updates.pair(cosine), strengths)) <= 1 + 10 * EPS


def test_both_are_the_delta_rule_for_one_key_and_the_same_for_orthogonal_ones():
    S, v, beta = normal(4, 3), normal(3, 3, seed=1), torch.tensor([0.5, 1.5, 2.0]).double()
    orthogonal = transitions.nearest_orthogonal(normal(4, 4, seed=2))[:3]
    torch.testing.assert_close(
        delta_updates.at_once(S, orthogonal, v, beta), delta_updates.in_turn(S, orthogonal, v, beta)
    )
    k = transitions.unit_keys(3, 4, generator=generator())
    for j in range(3):
        one = slice(j, j + 1)
        _, (after,) = MECHANISMS["delta"].reference(
            k[one], k[one], v[one], beta=beta[one], qk_l2norm=False, initial_state=(S,), return_state=True
        )
        torch.testing.assert_close(delta_updates.at_once(S, k[one], v[one], beta[one]), after)
        S = after
    assert not torch.allclose(delta_updates.at_once(S, k, v, beta), delta_updates.in_turn(S, k, v, beta))


@pytest.mark.parametrize("form", ["reference", "fast"])
def test_the_input_form_is_gated_delta_net(form):
    q, v = normal(2, 90, 6), normal(2, 90, 5, seed=1)
    k = transitions.unit_keys(2, 90, 6, generator=generator(2))
    one, other = torch.rand(2, 2, 90, generator=generator(3), dtype=torch.float64)
    gamma, eta = (1 + one) / 2, (1 + one) * other  # eta <= 2 gamma
    mapped = delta_updates.as_erasing(v, gamma, eta)
    o = MECHANISMS["gated-delta"].form(form)(q, k, is_causal=True, qk_l2norm=False, **mapped._asdict())
    torch.testing.assert_close(o, delta_updates.gated_recurrence(q, k, v, gamma, eta), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", ["reference", "fast"])
def test_the_input_form_with_vector_gates(form):
    """The mechanism divides by about 5e-7 more than |k|."""
    q, v = normal(2, 90, 6), normal(2, 90, 5, seed=1)
    k = transitions.unit_keys(2, 90, 6, generator=generator(2))
    gamma, eta = (torch.rand(2, 90, *rest, generator=generator(3), dtype=torch.float64) for rest in ([6], []))
    o = MECHANISMS["vector-gated"].form(form)(q, k, v, is_causal=True, log_decay=gamma.log(), beta=eta)
    unit_q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    expected = delta_updates.gated_recurrence(unit_q, k / (1 + 1e-6) ** 0.5, v, gamma, eta)
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-10)


def test_transition_of_the_input_form():
    """Its eigenvalues are gamma and gamma - eta |k|^2, so that `contracts` is exact; `maps` implies it."""
    k = 1.3 * transitions.unit_keys(1, 4, generator=generator())[0]
    inside = 0
    for gamma in torch.linspace(-1.2, 1.2, 13).tolist():
        for eta in torch.linspace(-0.5, 2, 11).tolist():
            gate = torch.tensor([gamma, eta]).double()
            A = delta_updates.gated_step(torch.eye(4, dtype=k.dtype), k, k.new_zeros(4), *gate)
            assert delta_updates.contracts(gamma, eta, 1.3) == (norm(A) <= 1 + 10 * EPS)
            assert delta_updates.contracts(gamma, eta, 1.3) or not delta_updates.maps(gamma, eta, 1.3)
            inside += delta_updates.contracts(gamma, eta, 1.3) and not delta_updates.maps(gamma, eta, 1.3)
    assert inside > 0


def test_channel_gates_have_no_such_map():
    """With one value for all channels they are the scalar gate; else the mapped form's erasure is not symmetric."""
    k, v, S = transitions.unit_keys(2, 4, generator=generator())[0], normal(3), normal(4, 3, seed=1)
    gamma, eta = torch.tensor(0.8).double(), torch.tensor(0.6).double()
    torch.testing.assert_close(
        delta_updates.gated_step(S, k, v, gamma.repeat(4), eta),
        delta_updates.gated_step(S, k, v, gamma, eta),
        rtol=0,
        atol=10 * EPS,
    )
    channels = torch.tensor([0.5, 0.7, 0.9, 1.0]).double()
    A = delta_updates.gated_step(torch.eye(4, dtype=k.dtype), k, k.new_zeros(4), channels, eta)
    torch.testing.assert_close(A, channels.diag() - eta * torch.outer(k, k))
    erased = torch.eye(4, dtype=k.dtype) - A @ channels.reciprocal().diag()  # I - A Diag(gamma)^-1
    assert (erased - erased.T).norm() > 0.1 * erased.norm()


def test_gates_made_of_the_memory_are_not_affine():
    k, v = transitions.unit_keys(1, 4, generator=generator())[0], normal(3)
    memories = normal(4, 3, seed=1), normal(4, 3, seed=2)
    gamma, eta = torch.tensor([0.8, 0.6]).double()
    assert delta_updates.affinity_error(lambda S: delta_updates.gated_step(S, k, v, gamma, eta), *memories) < 100 * EPS
    assert (
        delta_updates.affinity_error(
            lambda S: delta_updates.gated_step(S, k, v, torch.sigmoid(S.sum()), eta), *memories
        )
        > 1e-3
    )


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.bad_input
def test_refusals():
    with pytest.raises(ValueError, match=r"cosine: expected a number in \[-1, 1\], got 2"):
        delta_updates.pair(2)
    with pytest.raises(ValueError, match="gamma: expected .* above 0, got 0"):
        delta_updates.as_erasing(normal(1, 2), torch.zeros(1), torch.ones(1))
