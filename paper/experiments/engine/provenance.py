"""Where a record comes from: the device, the versions, the commit."""

import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "results"
# One thread, so that a result does not depend on how many cases run at once. Large allocations are otherwise mapped and
# unmapped on every step, and a CPU timing then measures page faults.
CPU_ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "OMP_NUM_THREADS": "1"}


def device_name(device: str) -> str:
    """The model of the processor ('cpu') or of the accelerator ('cuda')."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")  # of a Linux system
    model = re.search(r"^model name\s*:\s*(.+)$", info.read_text() if info.exists() else "", re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine() or "unknown"


def device_slug(device: str) -> str:
    """The name of a device's folders: 'cpu-amd-epyc', 'nvidia-h200'."""
    name = re.sub(r"\((r|tm)\)|\bcpu\b|@.*", " ", device_name(device).lower())
    slug = re.sub(r"[^a-z0-9]+", "-", name).strip("-")
    return f"cpu-{slug}" if device == "cpu" else slug


def provenance(device: str) -> dict[str, Any]:
    """What a record that is made in this process on this device says about its origin."""
    commit, clean = git_state()
    return {
        "device_name": device_name(device),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda if device == "cuda" else None,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "system": f"{platform.system()} {platform.machine()}",
        "environment": {name: os.environ.get(name) for name in CPU_ENVIRONMENT},
        "commit": commit,
        "clean": clean,
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def restart_in_cpu_environment() -> None:
    """Start this command over, in the same process, with `CPU_ENVIRONMENT` set, unless it is.

    The allocator and OpenMP read these settings only when a process starts. A test or a notebook goes on as it is.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name == "paper.__main__" and not CPU_ENVIRONMENT.items() <= os.environ.items():
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **CPU_ENVIRONMENT})


@cache
def git_state() -> tuple[str | None, bool | None]:
    """The commit of the source tree, and whether nothing but `results/` differs from it; None without git.

    Both are kept from the first call in a process, which must come before it measures.
    """
    try:
        if Path(_git("rev-parse", "--show-toplevel")).resolve() != ROOT:  # a tree without history, in some repository
            return None, None
        return _git("rev-parse", "HEAD"), not _git("status", "--porcelain", "--", ".", ":(exclude)results")
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
