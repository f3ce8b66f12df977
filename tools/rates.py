"""Chooses the learning rates of the learning experiments by their tuning runs, for the runs that count.

    python -m tools.rates [DIR]

DIR holds the records, by default results/. `make experiments` calls it between the two.
"""

import sys
from pathlib import Path

from paper.experiments import EXPERIMENTS, RecordError, load
from paper.experiments.learning import rates


def main(arguments: list[str]) -> int:
    """Write the table of rates; returns the exit status."""
    if len(arguments) > 1:
        print(__doc__, file=sys.stderr)
        return 2
    if arguments and not Path(arguments[0]).is_dir():
        print(f"DIR: expected a folder, got {arguments[0]!r}", file=sys.stderr)
        return 2
    try:
        found = {name: load(name, *arguments) for name in EXPERIMENTS}
        rates.write({name: [one for one in some if "rate" in one["configuration"]] for name, some in found.items()})
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
