"""`python -m paper`: the ledger of claims and the experiments, from the command line."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paper.claims import Entry


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    It is 0 for success; 1 for a damaged ledger or record, a cell that fails, a failed case, a record
    that could not be stored or a missing extra; 130 for Ctrl-C and SIGTERM while experiments run. Bad usage, such as an
    unknown name, raises SystemExit with 2.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["experiments"]:  # its options are its own
        from paper import experiments

        return experiments.main(argv[1:]) or 0
    parser = argparse.ArgumentParser(prog="python -m paper", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{claims,experiments}")
    claims = commands.add_parser("claims", help="list the sources' claims with their verdicts")
    chosen = claims.add_mutually_exclusive_group()
    chosen.add_argument("ids", nargs="*", default=[], metavar="ID", help="these claims, such as S0.1.1a (default: all)")
    chosen.add_argument("--document", metavar="S0", help="one document's claims")
    chosen.add_argument("--run", metavar="ID", help="execute this claim's chapter anew, and judge the claim by it")
    claims.add_argument("--json", action="store_true", help="as JSON, with the evidence in full")
    commands.add_parser("experiments", help="run measurements and write results/", add_help=False)
    args = parser.parse_args(argv)
    ids = args.ids if args.run is None else [args.run]
    return _claims(parser, args.json, args.document, ids, again=args.run is not None)


def _claims(
    parser: argparse.ArgumentParser, as_json: bool, document: str | None, ids: Sequence[str], *, again: bool
) -> int:
    from paper.claims import LedgerError, catalogue, counts_text, ledger

    try:
        known = catalogue()
        if document is not None and document not in known.documents:
            parser.error(f"--document: expected one of {', '.join(known.documents)}, got {document!r}")
        if unknown := [name for name in ids if name not in known.claims]:
            parser.error(f"ID: expected ids of the ledger, such as {next(iter(known.claims))}, got {unknown[0]!r}")
        found = ledger(document)
        entries = [found[name] for name in ids] if ids else list(found.values())
        if again:
            entries = list(map(_executed, entries))
    except LedgerError as error:
        print(f"python -m paper: error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"python -m paper: error: {error}; the ledger needs the extra 'ortho[book]'", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
        return 0
    print(*map(repr, entries), sep="\n\n")
    print(f"\n{len(entries)} claim{'s' if len(entries) != 1 else ''}: {counts_text(entries)}")
    return 0


def _executed(entry: "Entry") -> "Entry":
    """The entry of a claim by its chapter, executed anew; the notebook stays as it is. LedgerError if a cell fails."""
    import nbformat

    from paper.claims import LedgerError
    from paper.claims.gathered import ROOT
    from paper.claims.ledger import judged_anew
    from tools.notebooks import NotebookError, run

    path = ROOT / "notebooks" / f"{entry.chapter}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    try:
        run(notebook, path)
    except NotebookError as error:
        raise LedgerError(f"{entry.chapter}: {error}") from error
    return judged_anew(entry.id, notebook.cells, entry.chapter)


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except OSError as error:  # usually from stdout: it then goes to null, so that nothing is left to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0 if isinstance(error, BrokenPipeError) else 1  # the reader, such as `head`, has seen enough
        if status:
            print(f"python -m paper: error: {error}", file=sys.stderr)
    sys.exit(status)
