"""The sources' claims, read from `claims.toml` and checked when read."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from paper.claims.verdicts import Verdict

KINDS = ("formula", "table", "number", "property", "comparison", "open")
FIELDS = ("id", "kind", "part", "claim", "where", "quote")
PLAIN = tuple(map(str, Verdict))  # a claim may have its finding in plain words, for a verdict
_ID = re.compile(r"(S\d+)(\.\d+)+[a-z]")


class LedgerError(ValueError):
    """The ledger is damaged, or is asked for something it does not hold; the message names the place."""


@dataclass(frozen=True)
class Claim:
    """One statement of a source: in our words and with its figures, where it stands, and in its own words.

    `note` says how the passage is read where it can be read in two ways, or why the verdict stands though it could be
    contested; as a rule there is none. `plain` has the finding in a plain sentence, by the verdict that it is for.
    """

    id: str
    kind: str
    part: str
    text: str
    where: str
    quote: str
    note: str = ""
    plain: Mapping[str, str] = field(default_factory=dict)

    @property
    def document(self) -> str:
        return self.id.partition(".")[0]


@dataclass(frozen=True)
class Catalogue:
    """All claims by id, in the order of the file; titles of the documents and of the parts of the book."""

    documents: dict[str, str]
    parts: dict[str, str]
    claims: dict[str, Claim]


def load(path: Path | None = None) -> Catalogue:
    """The catalogue in `path`, by default the one that comes with the package.

    Raises LedgerError, naming the file, the entry, what was found and what was expected, for a file that is missing, is
    not TOML, or has an entry with a missing, unknown or ill-typed field, an unknown kind, document or part, or a
    repeated id.
    """
    source = files(__package__) / "claims.toml" if path is None else path
    raw = read_toml(source)
    try:
        return _catalogue(raw)
    except LedgerError as error:
        raise LedgerError(f"{source}: {error}") from None


def read_toml(source: Traversable) -> dict[str, Any]:
    """The content of a TOML file; LedgerError, naming the file, if it is missing or is not TOML."""
    try:
        return tomllib.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise LedgerError(f"{source}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LedgerError(f"{source}: expected TOML in UTF-8: {error}") from error


def _catalogue(raw: dict[str, Any]) -> Catalogue:
    if raw.keys() != {"documents", "parts", "claims"}:
        raise LedgerError(f"top level: expected documents, parts and claims, got {', '.join(raw) or 'nothing'}")
    claims: dict[str, Claim] = {}
    for number, entry in enumerate(raw["claims"], 1):
        where = f"claim {number} ({entry.get('id')})"
        if wrong := (entry.keys() ^ set(FIELDS)) - {"note", *PLAIN}:
            raise LedgerError(f"{where}: expected the fields {', '.join(FIELDS)}, missing or besides is {min(wrong)!r}")
        for name, text in entry.items():
            if not isinstance(text, str) or not text.strip():
                raise LedgerError(f"{where}: {name}: expected a string with text, got {text!r}")
        if not _ID.fullmatch(entry["id"]):
            raise LedgerError(f"{where}: id: expected a key like 'S0.1.1a', got {entry['id']!r}")
        plain = {name: entry[name] for name in PLAIN if name in entry}
        claim = replace(Claim(*(entry.get(name, "") for name in (*FIELDS, "note"))), plain=plain)
        known = {"document": raw["documents"], "part": raw["parts"], "kind": KINDS}
        for name, names in known.items():
            if (value := getattr(claim, name)) not in names:
                raise LedgerError(f"{where}: {name}: expected one of {', '.join(names)}, got {value!r}")
        if claim.id in claims:
            raise LedgerError(f"{where}: id: expected each once, got {claim.id!r} again")
        claims[claim.id] = claim
    return Catalogue(raw["documents"], raw["parts"], claims)
