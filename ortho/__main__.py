"""`python -m ortho`: the attention mechanisms, from the command line."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

MOVED = ("claims", "experiments")  # commands of the paper, which is no part of an installed library


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, 0. Bad usage raises SystemExit with 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m ortho", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{mechanisms}")
    mechanisms = commands.add_parser("mechanisms", help="list the attention mechanisms")
    mechanisms.add_argument("--json", action="store_true", help="as JSON, with the places of the functions")
    if argv[:1] and argv[0] in MOVED:
        parser.error(f"{argv[0]}: expected a command of the library; in the source tree: python -m paper {argv[0]}")
    args = parser.parse_args(argv)
    return _mechanisms(args.json)


def _mechanisms(as_json: bool) -> int:
    from ortho.attention import MECHANISMS

    if as_json:
        places = ("reference", "fast", "cost")
        plain = ["name", "family", "source", "causal", "bidirectional", "exact", "positional", "signed", "fitted"]
        plain += ["one_sequence", "same_tokens"]
        entries = [
            {name: getattr(m, name) for name in plain}
            | {name: _place(getattr(m, name)) for name in places}
            | {"gates": {name: _place(gate) for name, gate in m.gates.items()}, "query_gates": sorted(m.query_gates)}
            for m in MECHANISMS.values()
        ]
        print(json.dumps(entries, indent=2))
        return 0
    flags = ("causal", "exact", "positional", "signed")
    rows = [
        (m.name, m.family, *("yes" if getattr(m, flag) else "no" for flag in flags), m.source)
        for m in MECHANISMS.values()
    ]
    rows = [("name", "family", *flags, "source"), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _place(function: Any) -> str:
    """Module and name of a function or class; of a partial one with what it is bound to."""
    bound = ", ".join(f"{name}={value!r}" for name, value in getattr(function, "keywords", {}).items())
    function = getattr(function, "func", function)
    return f"{function.__module__}.{function.__qualname__}" + (f"({bound})" if bound else "")


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except OSError as error:  # of stdout as a rule, to which nothing is left to be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0 if isinstance(error, BrokenPipeError) else 1  # the reader, such as `head`, has seen enough
        if status:
            print(f"python -m ortho: error: {error}", file=sys.stderr)
    sys.exit(status)
