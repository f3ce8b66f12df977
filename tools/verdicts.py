"""Write book/verdicts.json: what the evidence of each claim gives that no chapter judges in a cell of its own, and the
experiments whose records it reads.

    python -m tools.verdicts

The pages that show all claims read this file, so that the evidence, which takes most of a minute, runs once and not on
every page. `tools.notebooks` writes it before it executes one of them, and a test compares it with a new run.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from tools.notebooks import VERDICTS, replace, title

# Fields that stay in the catalogue: a changed word there does not change a verdict.
IN_THE_CATALOGUE = {"id", "document", "kind", "claim", "where", "quote", "note", "records", "code"}


def gathered() -> dict[str, dict[str, Any]]:
    """Claim -> its entry and the experiments its evidence read. Only right in a process that has judged nothing yet."""
    from paper import experiments
    from paper.claims import judge
    from paper.claims.ledger import _ledger

    found = {}
    for claim in _ledger().evident():
        with mock.patch.object(experiments, "load", wraps=experiments.load) as reads:
            entry = asdict(judge(claim))
        records = list(dict.fromkeys(call.args[0] for call in reads.call_args_list))
        found[claim] = {name: value for name, value in entry.items() if name not in IN_THE_CATALOGUE}
        found[claim]["records"] = records
    return found


def text() -> str:
    """The content that the file should have."""
    return json.dumps(gathered(), indent=1, ensure_ascii=False) + "\n"


def main(path: Path = VERDICTS) -> int:
    new = text()
    if not path.exists() or path.read_text(encoding="utf-8") != new:
        replace(path, new)
        print(f"new: {title(path)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
