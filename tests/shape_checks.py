"""Tests run again in a process of their own, in which every shape annotation is checked."""

import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

ROOT = Path(__file__).parent.parent


def python(*arguments: str) -> CompletedProcess[str]:
    """What a Python that checks annotations says and writes."""
    environment = {**os.environ, "ORTHO_CHECK_SHAPES": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def assert_annotations_hold(names: str) -> None:
    """Raise AssertionError unless tests/test_*.py of these names, in one text, pass."""
    files = [f"tests/test_{name}.py" for name in names.split()]
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not bad_input", "-k", "not compiles", *files)
    assert done.returncode == 0, done.stdout[-3000:]
