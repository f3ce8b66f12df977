"""`python -m ortho`: the names that the library knows, from the command line."""

import argparse
from collections.abc import Collection, Sequence

from ortho import HEADS, PROJECTIONS, __version__
from ortho.attention import MECHANISMS
from ortho.attention.positional.patterns import PATTERNS
from ortho.layers.synthesizer import SOURCES

OTHERS: dict[str, Collection[str]] = {
    "Projections: MultiheadAttention(projection=NAME)": PROJECTIONS,
    "Kinds of heads: HybridAttention(heads={NAME: COUNT})": HEADS,
    "Positional patterns: PositionalHeads(patterns=[NAME, ...])": PATTERNS,
    "Synthesizers: SynthesizerAttention(source=NAME)": SOURCES,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the names; returns the exit status, 0. Bad usage raises SystemExit with 2, and --version with 0."""
    parser = argparse.ArgumentParser(prog="python -m ortho", description=__doc__)
    parser.add_argument("--version", action="version", version=f"ortho {__version__}")
    parser.add_argument("command", choices=["mechanisms"], help="list mechanisms and all other names")
    parser.parse_args(argv)
    print("Mechanisms: MultiheadAttention(attention=NAME)")
    for m in MECHANISMS.values():
        kind = " ".join(word for word in ("causal", "exact", "positional") if getattr(m, word))
        print(f"  {m.name:20}{m.family:16}{kind:28}{m.source}".rstrip())
    for title, names in OTHERS.items():
        print(f"{title}\n  {', '.join(names)}")
    return 0


if __name__ == "__main__":
    main()
