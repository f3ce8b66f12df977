"""The notebooks' stored outputs hold on another processor: other vector instructions, another number of threads.

Of every thirty notebooks one is run, always the same, so that a run that fails fails again; with ORTHO_TESTS=all,
as in the nightly run, all are.
"""

import os
import subprocess
import sys

import pytest
from extent import some

from tools import notebooks

NOTEBOOKS = some(notebooks.every_notebook(), 30)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=notebooks.title)
def test_a_notebook_agrees_without_vector_instructions_and_with_two_threads(path):
    """The run around this one has this machine's instructions and one thread; this is the other end of the range."""
    # Threads that wait do not spin: the tests beside this one need the processor.
    other = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", "-p", "no:cacheprovider", str(path)]
    environment = {**os.environ, **other}
    done = subprocess.run(command, cwd=notebooks.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
