"""Write `requirements/exact.txt`: the packages of constraints.txt with the hashes of their files, for every platform.

    python tools/lock.py

It asks the public index with uv, which has to be installed. PyTorch is left out: its hashes, taken by hand from its own
index, are in `requirements/torch.txt`. The CUDA libraries that another build of it would need are left out, too.
"""

import re
import subprocess
import sys
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
EXACT = ROOT / "requirements" / "exact.txt"
HEADER = (
    "# Made by `python tools/lock.py` from constraints.txt: every package but PyTorch, with the hashes of its files."
)
PYTHON = "3.11.5"  # the oldest that all pinned versions allow


def pinned(text: str) -> dict[str, str]:
    """The requirements of a file, each with the lines of its hashes, by their canonical names."""
    found = re.finditer(r"^([\w.-]+)(?:\[.*\])?==[^\\\n]*(?:\\\n[^\\\n]*)*", text, re.MULTILINE)
    return {canonicalize_name(requirement[1]): requirement[0] for requirement in found}


def main() -> int:
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--universal", "--python-version", PYTHON]
    command += ["--generate-hashes", "--no-annotate", "--no-header", "--constraints", "constraints.txt"]
    command += ["--all-extras", "pyproject.toml"]
    try:
        resolved = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        print(f"Nothing is written: {error}", file=sys.stderr)
        return 1
    wanted = pinned((ROOT / "constraints.txt").read_text(encoding="utf-8")).keys() - {"torch"}
    lines = [requirement for name, requirement in pinned(resolved).items() if name in wanted]
    EXACT.write_text("\n".join([HEADER, *lines, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
