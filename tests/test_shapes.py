"""The shape annotations are true: the tests of the mathematics pass with each checked at run time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHECKED = {
    "kernels": [
        "test_factored.py",
        "test_factored_limits.py",
        "test_factored_cost.py",
        "test_linear.py",
        "test_efficient.py",
    ],
    "features": [
        *(
            "test_favor.py",
            "test_redrawn.py",
            "test_unbiasedness.py",
            "test_random_features.py",
            "test_feature_draws.py",
        ),
        *(
            "test_variance.py",
            "test_fitted_features.py",
            "test_approximation.py",
            "test_associativity.py",
            "test_mercer.py",
        ),
    ],
    "memories": [
        *("test_memory.py", "test_delta.py", "test_delta_limits.py", "test_delta_cost.py", "test_delta_product.py"),
        *("test_channel_gates.py", "test_channel_gates_limits.py", "test_gate_modules.py", "test_recall.py"),
        *("test_ttt.py", "test_ttt_losses.py", "test_ttt_cost.py", "test_robustness.py"),
    ],
    "positions": ["test_positions_rotary.py", "test_positions_distance.py", "test_positions_reflections.py"],
    "layers": [
        *(
            "test_softmax.py",
            "test_synthesizer.py",
            "test_synthesizer_limits.py",
            "test_properties.py",
            "test_layers.py",
            "test_orthogonal.py",
        ),
        "test_johnson_lindenstrauss.py",
    ],
}


def run(code_or_args, **kwargs):
    environment = {**os.environ, "ORTHO_CHECK_SHAPES": "1"}
    return subprocess.run(
        [sys.executable, *code_or_args],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        **kwargs,
    )


@pytest.mark.parametrize("files", CHECKED.values(), ids=CHECKED)
def test_annotations_hold(files):
    files = [str(Path("tests") / name) for name in files]
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not bad_input", "-k", "not compiles", *files])
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_check_can_fail():
    code = "import tests.conftest, torch, ortho; ortho.attention.softmax_attention(*torch.ones(3, 4))"
    done = run(["-c", code])
    assert done.returncode != 0
    assert "jaxtyping" in done.stderr, done.stderr[-3000:]
