"""The notebooks' stored outputs hold on another processor: other vector instructions, another number of threads.

One notebook in thirty is run, always the same one, so that a failure can be repeated. With ORTHO_TESTS=all, as in the
nightly run, all of them are run.
"""

import os
import subprocess
import sys

import pytest
from sample import some

from tools import notebooks

NOTEBOOKS = some(notebooks.every_notebook(), 30)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=notebooks.title)
def test_a_notebook_agrees_without_vector_instructions_and_with_two_threads(path):
    """The surrounding run uses this machine's instructions and one thread; this run is the other end of the range."""
    # Threads must not spin while they wait: the tests beside this one need the processor.
    other = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", "-p", "no:cacheprovider", str(path)]
    environment = {**os.environ, **other}
    done = subprocess.run(command, cwd=notebooks.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
