"""The notebooks' stored outputs hold on another processor: other vector instructions, another number of threads."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_notebooks_agree_without_vector_instructions_and_with_two_threads():
    """The run around this one has this machine's instructions and one thread; this is the other end of the range."""
    # Threads that wait do not spin: the tests beside this one need the processor.
    other = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", "-p", "no:cacheprovider", "notebooks", "book"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **other}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
