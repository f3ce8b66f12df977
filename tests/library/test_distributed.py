"""Frozen weights in distributed training, with two processes: replicated and sharded, with and without mixed precision,
where each process has drawn other weights; states are gathered and loaded."""

import os
import subprocess
import sys
from pathlib import Path

from adapter_models import tf

TESTS = Path(__file__).parents[1]


def test_two_processes(tmp_path):
    given = [] if tf is not None else ["without-transformers"]
    env = os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "sharded_processes.py")]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "meeting"), *given],
            env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    assert said[0].count("holds") == (7 if tf is not None else 4)
