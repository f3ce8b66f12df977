"""The sources' claims, read from `claims.toml` and checked when read."""

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

KINDS = ("formula", "table", "number", "property", "comparison", "open")
FIELDS = ("id", "kind", "part", "claim", "where", "quote")
OPTIONAL = ("note",)
_ID = re.compile(r"(S\d+)(\.\d+)+[a-z]")


class LedgerError(ValueError):
    """The ledger is damaged, or is asked for something it does not hold; the message names the place."""


@dataclass(frozen=True)
class Claim:
    """One statement of a source: in our words and with its figures, where it stands, and in its own words.

    `note` says how the passage is read where it can be read in two ways, or why the verdict stands though it could be
    contested; as a rule there is none.
    """

    id: str
    kind: str
    part: str
    text: str
    where: str
    quote: str
    note: str = ""

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
    if unknown := raw.keys() - {"documents", "parts", "claims"}:
        raise LedgerError(f"top level: expected documents, parts and claims, got {min(unknown)!r} besides")
    documents, parts = _titles(raw, "documents"), _titles(raw, "parts")
    entries = raw.get("claims")
    if not isinstance(entries, list) or not entries:
        raise LedgerError("claims: expected at least one [[claims]] entry, got none")
    claims: dict[str, Claim] = {}
    for number, entry in enumerate(entries, 1):
        where = f"claim {number}"
        if not isinstance(entry, dict):
            raise LedgerError(f"{where}: expected a table, got {entry!r}")
        if isinstance(entry.get("id"), str):
            where += f" ({entry['id']})"
        claim = _claim(where, entry)
        expect_one_of(where, "id: the document", claim.document, documents)
        expect_one_of(where, "part", claim.part, parts)
        if claim.id in claims:
            raise LedgerError(f"{where}: id: expected each once, got {claim.id!r} again")
        claims[claim.id] = claim
    return Catalogue(documents, parts, claims)


def _titles(raw: dict[str, Any], name: str) -> dict[str, str]:
    table = raw.get(name)
    if not isinstance(table, dict) or not table or not all(isinstance(title, str) for title in table.values()):
        raise LedgerError(f"[{name}]: expected a table of names and titles, got {table!r}")
    return table


def _claim(where: str, entry: dict[str, Any]) -> Claim:
    if unknown := entry.keys() - {*FIELDS, *OPTIONAL}:
        raise LedgerError(f"{where}: expected the fields {', '.join(FIELDS)}, got {min(unknown)!r} besides")
    for field in (*FIELDS, *(entry.keys() & set(OPTIONAL))):
        if field not in entry:
            raise LedgerError(f"{where}: {field}: expected a string, but the field is missing")
        if not isinstance(entry[field], str) or not entry[field].strip():
            raise LedgerError(f"{where}: {field}: expected a string with text, got {entry[field]!r}")
    if not _ID.fullmatch(entry["id"]):
        raise LedgerError(f"{where}: id: expected a key like 'S0.1.1a', got {entry['id']!r}")
    expect_one_of(where, "kind", entry["kind"], KINDS)
    return Claim(*(entry[field] for field in FIELDS), *(entry.get(field, "") for field in OPTIONAL))


def expect_one_of(where: str, field: str, value: str, known: Any) -> None:
    """LedgerError, naming the entry and the field, for a value that is not among the known ones."""
    if value not in known:
        raise LedgerError(f"{where}: {field}: expected one of {', '.join(known)}, got {value!r}")
