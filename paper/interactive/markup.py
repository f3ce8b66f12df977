"""HTML that several of the interactives are made of."""

import json
from collections.abc import Iterable
from html import escape
from typing import Any, SupportsFloat

__all__ = ["attribute", "cells", "decimal"]


def cells(tag: str, texts: Iterable[str]) -> str:
    """Cells of a table's row, each in a tag, "td" or "th"."""
    return "".join(f"<{tag}>{text}</{tag}>" for text in texts)


def attribute(data: Any) -> str:
    """Data as the value of an attribute, for a script to read."""
    return escape(json.dumps(data, separators=(",", ":")))


def decimal(number: SupportsFloat, digits: str = ".4g") -> str:
    """A decimal with up to four digits, or in another format, and a typographic minus sign; zero is never negative."""
    return f"{float(number) + 0.0:{digits}}".replace("-", "\N{MINUS SIGN}")
