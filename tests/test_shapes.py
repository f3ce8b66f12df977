"""The shape annotations are true: the tests of the mathematics pass with each checked at run time."""

import pytest
from shape_checks import assert_annotations_hold, python

CHECKED = {  # names of tests/test_*.py
    "kernels": "factored factored_limits factored_cost linear efficient",
    "features": "favor redrawn unbiasedness random_features feature_draws variance fitted_features approximation "
    "associativity mercer",
    "memories": "memory delta delta_limits delta_cost delta_product channel_gates channel_gates_limits gate_modules "
    "recall ttt ttt_losses ttt_cost robustness",
    "positions": "positions_rotary positions_distance positions_reflections",
    "patterns": "parts patterns pattern_attention pattern_counts pattern_parts reachability",
    "dynamic": "dynamic_choice dynamic_limits dynamic_properties",
    "weights": "synthesizer synthesizer_limits positional positional_patterns positional_layers positionalness",
    "properties": "properties",
    "layers": "softmax layers orthogonal johnson_lindenstrauss encoders configurations",
    "heads": "hybrid hybrid_properties hybrid_cost stopped projections positional_cost exchanged exchanged_limits",
    "adapters": "adapters_freezing adapters_gradients adapters_errors adapters_heads adapters_heads_limits "
    "adapters_huggingface adapters_huggingface_freezing",
    "hardware": "flash backends experts recomputation decoding structured",
}


@pytest.mark.parametrize("names", CHECKED.values(), ids=CHECKED)
def test_annotations_hold(names):
    assert_annotations_hold(names)


def test_the_check_can_fail():
    done = python("-c", "import tests.conftest, torch, ortho; ortho.attention.softmax_attention(*torch.ones(3, 4))")
    assert done.returncode != 0
    assert "jaxtyping" in done.stderr, done.stderr[-3000:]
