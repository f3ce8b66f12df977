"""`python -m ortho`: the mechanisms, the ledger of claims, and the experiments, from the command line."""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    That is 0; 1 for a damaged ledger or record, claims whose records are not there, a failed case, records that could
    not be stored, an impossible launch or a missing extra; 130 for Ctrl-C and 143 for SIGTERM while experiments run.
    Bad usage, as by a name that is not known, raises SystemExit with 2.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["experiments"]:  # its options are its own
        from ortho import experiments

        return experiments.main(argv[1:]) or 0
    parser = argparse.ArgumentParser(prog="python -m ortho", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{mechanisms,claims,experiments}")
    mechanisms = commands.add_parser("mechanisms", help="list the attention mechanisms")
    mechanisms.add_argument("--json", action="store_true", help="as JSON, with the places of the functions")
    claims = commands.add_parser("claims", help="list the sources' claims with their verdicts")
    chosen = claims.add_mutually_exclusive_group()
    chosen.add_argument("ids", nargs="*", default=[], metavar="ID", help="these claims, such as S0.1.1a (default: all)")
    chosen.add_argument("--document", metavar="S0", help="one document's claims")
    claims.add_argument("--json", action="store_true", help="as JSON, with the evidence in full")
    commands.add_parser("experiments", help="run measurements and write results/", add_help=False)
    args = parser.parse_args(argv)
    if args.command == "mechanisms":
        return _mechanisms(args.json)
    return _claims(parser, args.json, args.document, args.ids)


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
    from ortho.claims.report import table

    flags = ("causal", "exact", "positional", "signed")
    rows = [
        (m.name, m.family, *("yes" if getattr(m, flag) else "no" for flag in flags), m.source)
        for m in MECHANISMS.values()
    ]
    print(table(rows, ("name", "family", *flags, "source")))
    return 0


def _place(function: Any) -> str:
    """Module and name of a function or class; of a partial one with what it is bound to."""
    bound = ", ".join(f"{name}={value!r}" for name, value in getattr(function, "keywords", {}).items())
    function = getattr(function, "func", function)
    return f"{function.__module__}.{function.__qualname__}" + (f"({bound})" if bound else "")


def _claims(parser: argparse.ArgumentParser, as_json: bool, document: str | None, ids: Sequence[str]) -> int:
    from ortho.claims import LedgerError, UnjudgedError, catalogue, judge_all, ledger
    from ortho.experiments import RecordError

    status = 0
    try:
        known = catalogue()
        if document is not None and document not in known.documents:
            parser.error(f"--document: expected one of {', '.join(known.documents)}, got {document!r}")
        if unknown := [name for name in ids if name not in known.claims]:
            parser.error(f"ID: expected ids of the ledger, such as {next(iter(known.claims))}, got {unknown[0]!r}")
        entries = judge_all(ids) if ids else ledger(document)
    except UnjudgedError as error:
        print(f"python -m ortho: error: {error}", file=sys.stderr)
        entries, status = error.entries, 1
    except (LedgerError, RecordError) as error:
        print(f"python -m ortho: error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"python -m ortho: error: {error}; the ledger needs the extra 'ortho[book]'", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
        return status
    print(*map(repr, entries), sep="\n\n")
    counts = Counter(entry.verdict for entry in entries)
    print(f"\n{len(entries)} claims:", ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    return status


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
