"""Lighten the built pages, and say where the book is.

    python tools/pages.py [FOLDER]

Removes from the theme's style sheet the icons that no page shows, a fifth of its bytes, and from figures the digits and
spaces that nobody sees. Then prints the address of the first page.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

ICONS = re.compile(r"\bfa-[a-z0-9-]+")
ICON_RULE = re.compile(r"((?:\.fa-[a-z0-9-]+:before,?)+)\{content:[^{}]*\}")

# Coordinates in a figure, in points or in units of a letter's outline; hundredths of either are too small to be seen.
PLACES = re.compile(r'\b(?:d|x|y)="[^"]*"|translate\([^)]*\)')
DIGITS = re.compile(r"(\.\d\d)\d+")
UNSEEN = re.compile(r"<!--.*?-->|<metadata>.*?</metadata>|(?<=>)\s+(?=<)", re.DOTALL)


def leave_out_icons(folder: Path) -> None:
    """Rewrite the style sheets under `folder` without the icons that no page and no script there names."""
    texts = (path.read_text(encoding="utf-8") for kind in ("html", "js") for path in folder.rglob(f"*.{kind}"))
    shown = {name for text in texts for name in ICONS.findall(text)}
    for sheet in folder.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        kept = ICON_RULE.sub(lambda rule: rule[0] if shown.intersection(ICONS.findall(rule[1])) else "", text)
        sheet.write_text(kept, encoding="utf-8")


def lighten_figures(folder: Path) -> None:
    """Rewrite matplotlib's figures with coordinates cut to hundredths, without comments, metadata and spaces."""
    for figure in folder.glob("_images/*.svg"):
        text = UNSEEN.sub("", figure.read_text(encoding="utf-8"))
        short = PLACES.sub(lambda place: " ".join(DIGITS.sub(r"\1", place[0]).split()), text)
        figure.write_text(short, encoding="utf-8")


def main(folder: Path) -> None:
    leave_out_icons(folder)
    lighten_figures(folder)
    print(f"The book: {(folder / 'index.html').resolve(strict=True).as_uri()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "_build" / "html")
