"""Convert records from a file for each experiment and device to a file for each case. To be removed when all are.

    python -m tools.convert_results FILE ...

A FILE is `results/<experiment>/<device>.json`; it is removed when its records are written beside it.
"""

import json
import sys
from pathlib import Path

from paper.experiments import EXPERIMENTS
from paper.experiments.engine import records

OURS = ("experiment", "device", "configuration", "seeds", "repetitions", "facts", "failures", "elapsed_s")


def convert(file: Path) -> int:
    """Write the records of a file; returns their number. The digests of the code are left out, and so are checksums."""
    results, name = file.parent.parent, file.parent.name
    label = EXPERIMENTS[name].label
    found = json.loads(file.read_text(encoding="utf-8"))["records"]
    for old in found:
        origin = {key: value for key, value in old["provenance"].items() if key != "code"}
        new = {key: old[key] for key in OURS[:1]} | {"version": 1} | {key: old[key] for key in OURS[1:]}
        case = old["configuration"]
        path = records.path(results, name, old["device"], case, label(case))
        records.write(path, new | {"provenance": origin})
    file.unlink()
    return len(found)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(f"{convert(Path(argument)):5} records of {argument}")
