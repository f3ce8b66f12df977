"""`python -m ortho`: the attention mechanisms, from the command line."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from ortho import __version__

BUDGET = "the most of a figure, as forward=1e9 (FLOPs), decode, step, state_bytes, saved_bytes, trained; several may be"
MOVED = ("claims", "experiments")  # commands of the paper, which is no part of an installed library


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, 0. Bad usage raises SystemExit with 2, and --version with 0."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m ortho", description=__doc__)
    parser.add_argument("--version", action="version", version=f"ortho {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{mechanisms,choose}")
    mechanisms = commands.add_parser("mechanisms", help="list the attention mechanisms")
    mechanisms.add_argument("--json", action="store_true", help="as JSON, with the places of the functions")
    choose = commands.add_parser("choose", help="list the mechanisms whose layer fits a budget, the cheapest first")
    choose.add_argument("N", type=int, help="tokens of a sequence")
    choose.add_argument("d", type=int, help="width of the layer")
    choose.add_argument("--budget", action="append", required=True, metavar="FIGURE=MOST", help=BUDGET)
    choose.add_argument("--heads", type=int, default=1, help="heads of the layer (1)")
    choose.add_argument("--batch", type=int, default=1, help="sequences (1)")
    choose.add_argument("--bidirectional", action="store_true", help="calls that are not causal")
    choose.add_argument("--exact", action="store_true", help="softmax attention itself alone")
    choose.add_argument("--json", action="store_true", help="as JSON, with all figures")
    if argv[:1] and argv[0] in MOVED:
        parser.error(f"{argv[0]}: expected a command of the library; in the source tree: python -m paper {argv[0]}")
    args = parser.parse_args(argv)
    if args.command == "choose":
        try:
            _choose(args)
        except (TypeError, ValueError) as error:
            parser.error(str(error))
    else:
        _mechanisms(args.json)
    return 0


def _choose(args: argparse.Namespace) -> None:
    from ortho.cost.budgets import FIGURES, choose

    bounds = {}
    for given in args.budget:
        name, sign, most = given.rpartition("=")
        try:
            bounds[name if sign else "forward"] = float(most)
        except ValueError:
            raise ValueError(f"--budget: expected FIGURE=MOST, as forward=1e9, got {given!r}") from None
    kind = {"num_heads": args.heads, "batch": args.batch, "causal": not args.bidirectional, "exact": args.exact}
    found = choose(args.N, args.d, bounds, **kind)
    if args.json:
        rows = [{"name": name} | {figure: getattr(cost, figure) for figure in FIGURES} for name, cost in found]
        print(json.dumps(rows, indent=2))
    else:
        _table(("name", *bounds), [(name, *(f"{getattr(cost, x):,}" for x in bounds)) for name, cost in found])


def _mechanisms(as_json: bool) -> None:
    from ortho.attention import MECHANISMS

    if as_json:
        places = ("reference", "fast", "cost")
        plain = ["name", "family", "source", "causal", "bidirectional", "exact", "positional", "signed", "fitted"]
        plain += ["one_sequence", "gives_weights", "same_tokens"]
        entries = [
            {name: getattr(m, name) for name in plain}
            | {name: _place(getattr(m, name)) for name in places}
            | {"gates": {name: _place(gate) for name, gate in m.gates.items()}, "query_gates": sorted(m.query_gates)}
            for m in MECHANISMS.values()
        ]
        print(json.dumps(entries, indent=2))
        return
    flags = ("causal", "exact", "positional", "signed")
    rows = [
        (m.name, m.family, *("yes" if getattr(m, flag) else "no" for flag in flags), m.source)
        for m in MECHANISMS.values()
    ]
    _table(("name", "family", *flags, "source"), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as what they hold."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


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
