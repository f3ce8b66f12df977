"""Check and lighten the built pages, and say where the book is.

    python tools/pages.py [FOLDER]

Fails if a page or a style sheet fetches anything from another host: the book must be readable without a network. Links
that a reader may follow are allowed; what scripts fetch is not checked. Removes from the theme's style sheet the icons
that no page shows, a fifth of its bytes, and from figures the digits and spaces that nobody sees. Then prints the
address of the first page.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Elements whose address a browser fetches by itself.
FETCHED = {"audio", "embed", "iframe", "img", "input", "link", "object", "script", "source", "track", "video"}
NOT_FETCHED = {"alternate", "author", "canonical", "license", "next", "prev", "search"}  # kinds of <link>

ELSEWHERE = ("http:", "https:", "//")
STYLED = re.compile(r"""(?:url\(|@import)\s*["']?(?:https?:)?//[^\s"')]*""", re.IGNORECASE)
STYLES = re.compile(r"<style\b.*?</style>", re.DOTALL | re.IGNORECASE)

ICONS = re.compile(r"\bfa-[a-z0-9-]+")
ICON_RULE = re.compile(r"((?:\.fa-[a-z0-9-]+:before,?)+)\{content:[^{}]*\}")

# Coordinates in a figure, in points or in units of a letter's outline; hundredths of either are too small to be seen.
PLACES = re.compile(r'\b(?:d|x|y)="[^"]*"|translate\([^)]*\)')
DIGITS = re.compile(r"(\.\d\d)\d+")
UNSEEN = re.compile(r"<!--.*?-->|<metadata>.*?</metadata>|(?<=>)\s+(?=<)", re.DOTALL)


class Fetches(HTMLParser):
    """Collects the addresses on other hosts that one page fetches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses = [address for style in STYLES.findall(text) for address in STYLED.findall(style)]
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.addresses += STYLED.findall(values.get("style", ""))
        if tag not in FETCHED or (tag == "link" and values.get("rel") in NOT_FETCHED):
            return
        for name in ("src", "href", "data", "poster", "srcset"):
            value = values.get(name, "")
            several = value.split(",") if name == "srcset" else [value]
            if any(address.strip().startswith(ELSEWHERE) for address in several):
                self.addresses.append(f"<{tag} {name}={value}>")


def foreign(folder: Path) -> list[str]:
    """What pages and style sheets under `folder` fetch from other hosts, one line each with the file that does."""
    found = []
    for file in sorted(path for path in folder.rglob("*") if path.suffix in (".html", ".css")):
        text = file.read_text(encoding="utf-8")
        addresses = Fetches(text).addresses if file.suffix == ".html" else STYLED.findall(text)
        found += [f"{file.relative_to(folder)}: {address}" for address in addresses]
    return found


def leave_out_icons(folder: Path) -> None:
    """Rewrite the style sheets under `folder` without the icons that no page and no script there names."""
    texts = (path.read_text(encoding="utf-8") for kind in ("html", "js") for path in folder.rglob(f"*.{kind}"))
    shown = {name for text in texts for name in ICONS.findall(text)}
    for sheet in folder.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        kept = ICON_RULE.sub(lambda rule: rule[0] if shown.intersection(ICONS.findall(rule[1])) else "", text)
        if kept != text:
            sheet.write_text(kept, encoding="utf-8")


def lighter(figure: str) -> str:
    """A matplotlib SVG with coordinates cut to hundredths, without comments, metadata and space between elements."""
    return PLACES.sub(lambda place: " ".join(DIGITS.sub(r"\1", place[0]).split()), UNSEEN.sub("", figure))


def lighten_figures(folder: Path) -> None:
    """Rewrite the figures under `folder`."""
    for figure in folder.glob("_images/*.svg"):
        figure.write_text(lighter(figure.read_text(encoding="utf-8")), encoding="utf-8")


def main(folder: Path) -> int:
    first = folder / "index.html"
    if not first.exists():
        print(f"There is no book at {folder}: run make html", file=sys.stderr)
        return 1
    if found := foreign(folder):
        print("\n    ".join(["The book must read without a network, but its pages fetch:", *found]), file=sys.stderr)
        return 1
    leave_out_icons(folder)
    lighten_figures(folder)
    print(f"The book: {first.resolve().as_uri()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "_build" / "html"))
