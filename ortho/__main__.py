"""`python -m ortho`: what the library has, from the command line."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from ortho import __version__

MOVED = ("claims", "experiments")  # commands of the paper, which is not part of an installed library

# Lists beside the mechanisms, by their key in the JSON: what they hold, and the call that takes their names.
BESIDE = {
    "projections": "Projections: MultiheadAttention(projection=NAME)",
    "heads": "Kinds of heads: HybridAttention(heads={NAME: COUNT})",
    "patterns": "Positional patterns: PositionalHeads(patterns=[NAME, ...])",
    "synthesizers": "Synthesizers: SynthesizerAttention(source=NAME)",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, 0. Bad usage raises SystemExit with 2, and --version with 0."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m ortho", description=__doc__)
    parser.add_argument("--version", action="version", version=f"ortho {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{mechanisms}")
    mechanisms = commands.add_parser(
        "mechanisms", help="list mechanisms, projections, kinds of heads, patterns, Synthesizers"
    )
    mechanisms.add_argument("--json", action="store_true", help="as JSON, with the places of the functions")
    if argv[:1] and argv[0] in MOVED:
        parser.error(f"{argv[0]}: expected a command of the library; in the source tree: python -m paper {argv[0]}")
    args = parser.parse_args(argv)
    _mechanisms(args.json)
    return 0


def _mechanisms(as_json: bool) -> None:
    from ortho.attention import MECHANISMS

    beside = _beside()
    if as_json:
        places = ("reference", "fast", "cost")
        plain = ["name", "family", "source", "causal", "bidirectional", "exact", "positional", "signed"]
        plain += ["data_dependent", "self_attention_only", "has_weights", "same_tokens", "option_names"]
        entries = [
            {name: getattr(m, name) for name in plain}
            | {name: _place(getattr(m, name)) for name in places}
            | {"gates": {name: _place(gate) for name, gate in m.gates.items()}, "query_gates": sorted(m.query_gates)}
            for m in MECHANISMS.values()
        ]
        lists = {key: [{"name": name, "made_by": place} for name, place in rows] for key, rows in beside.items()}
        print(json.dumps({"mechanisms": entries} | lists, indent=2))
        return
    flags = ("causal", "exact", "positional", "signed")
    rows = [
        (m.name, m.family, *("yes" if getattr(m, flag) else "no" for flag in flags), m.source)
        for m in MECHANISMS.values()
    ]
    print("Mechanisms: MultiheadAttention(attention=NAME)")
    _table(("name", "family", *flags, "source"), rows)
    for key, title in BESIDE.items():
        print(f"\n{title}")
        _table(("name", "made by"), beside[key])


def _beside() -> dict[str, list[tuple[str, str]]]:
    """The lists beside the mechanisms: in each, the names and the functions or classes that they stand for."""
    from ortho import HEADS, PROJECTIONS
    from ortho.attention.positional.patterns import PATTERNS
    from ortho.layers.synthesizer import SOURCES

    lists: tuple[Mapping[str, Any], ...] = (PROJECTIONS, HEADS, PATTERNS, SOURCES)
    return {
        key: [(name, _place(entry)) for name, entry in entries.items()]
        for key, entries in zip(BESIDE, lists, strict=True)
    }


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns as wide as their widest entry."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _place(made: Any) -> str:
    """Module and name of a function or class, with the arguments bound by a partial one, or a pattern's fields."""
    bound = getattr(made, "keywords", {})
    if is_dataclass(made) and not isinstance(made, type):
        bound = {field.name: getattr(made, field.name) for field in fields(made)[1:]}  # the first is its name
        made = type(made)
    made = getattr(made, "func", made)
    if made is None:  # a mechanism without a closed form
        return ""
    said = ", ".join(f"{name}={value!r}" for name, value in bound.items())
    return f"{made.__module__}.{made.__qualname__}" + (f"({said})" if said else "")


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except OSError as error:  # usually of stdout, which must not be flushed again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0 if isinstance(error, BrokenPipeError) else 1  # the reader, such as `head`, has seen enough
        if status:
            print(f"python -m ortho: error: {error}", file=sys.stderr)
    sys.exit(status)
