"""Where a record comes from: the device, the versions, the commit, and the code that it depends on."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from torch import distributed

from paper.experiments.engine import code, records
from paper.experiments.engine.code import Code
from paper.experiments.engine.records import Record, RecordError

# Large allocations are otherwise mapped and unmapped on every step, and a CPU timing then measures page faults.
CPU_ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "OMP_NUM_THREADS": "1"}


def default_results() -> Path:
    """`results/` beside the package's source tree; if the package is installed, in the working directory."""
    installed = code.ROOT.name in ("site-packages", "dist-packages")
    return (Path.cwd() if installed else code.ROOT) / "results"


_STARTED = code.Tree(code.files())  # what this process runs: read before it can have measured anything


@cache
def code_of(run: Any) -> Code:
    """All that an experiment's `run` can reach in the files as they were when this process started (see `code`)."""
    return _STARTED.reached(run)


def edited(run: Any) -> list[str]:
    """The definitions among `code_of(run)` that have changed on disk since this process started."""
    contents = code.files()
    if contents == _STARTED.contents:
        return []
    # Values bound to the function do not count: they are not part of a file, and may be a list that grows.
    return [place for place in code.changes(code_of(run), code.Tree(contents).reached(run)) if ":" in place]


def changes(record: Record, run: Any) -> list[str]:
    """The definitions of a record that its experiment's `run` no longer reaches as they were; [] if it is fresh."""
    return code.changes(records.standing(record)["code"], code_of(run))


def device_name(device: str) -> str:
    """The model of the processor ('cpu') or of the accelerator ('cuda')."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        models = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:  # not a Linux system
        models = []
    return models[0].strip() if models else platform.processor() or platform.machine() or "unknown"


def device_slug(device: str) -> str:
    """The name of a device's files: 'cpu-amd-epyc', 'nvidia-h200'."""
    name = re.sub(r"\((r|tm)\)|\bcpu\b|@.*", " ", device_name(device).lower())
    slug = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    return f"cpu-{slug}" if device == "cpu" else slug


def provenance(device: str, run: Any) -> dict[str, Any]:
    """What a record of this process on this device must say about its origin, except its date (see `now`).

    `run` is the function of the experiment; it leads to the code. The record is `clean` if that is the commit's code,
    whatever else has changed since.
    """
    commit, clean = git_state()
    if commit is not None and clean is False:
        with checkout(commit) as tree:
            clean = code.Tree(code.files(tree)).reached(run) == code_of(run)
    return {
        "device_name": device_name(device),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "processes": distributed.get_world_size() if distributed.is_initialized() else 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda if device == "cuda" else None,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "system": f"{platform.system()} {platform.machine()}",
        "environment": {name: os.environ.get(name) for name in CPU_ENVIRONMENT},
        "commit": commit,
        "clean": clean,
        "code": code_of(run),
    }


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit, for the block. Raises RecordError if the repository lacks it."""
    with TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        try:
            _git("worktree", "add", "--detach", str(tree), commit)
        except subprocess.SubprocessError as error:
            told = str(getattr(error, "stderr", error)).strip()
            raise RecordError(f"{commit}: expected a commit of this repository ({told})") from error
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def now() -> str:
    """The date and time, UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def in_cpu_environment() -> bool:
    """Whether this process was started with the settings that CPU timing needs."""
    return all(os.environ.get(name) == value for name, value in CPU_ENVIRONMENT.items())


def restart_in_cpu_environment() -> None:
    """Start this command over, in the same process, with `CPU_ENVIRONMENT` set; does not return.

    The allocator and OpenMP read these settings only when a process starts.
    """
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **CPU_ENVIRONMENT})


@cache
def git_state() -> tuple[str | None, bool | None]:
    """The commit of the source tree, and whether nothing but `results/` differs from it; None without git.

    Both are kept from the first call in a process, which must come before it measures.
    """
    return _git_state()


def _git_state() -> tuple[str | None, bool | None]:
    try:
        top = _git("rev-parse", "--show-toplevel")
        if Path(top).resolve() != code.ROOT:  # a tree without history, unpacked inside some other repository
            return None, None
        changes = _git("status", "--porcelain", "--", ".", ":(exclude)results")
        return _git("rev-parse", "HEAD"), not changes
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(code.ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
