"""Print the built pages as one PDF with an outline, links and typeset mathematics.

    python tools/pdf.py

The pages in `_build/html` are joined in the order of `_toc.yml` into one document, styled by `tools/pdf.css`; the
reference of the package, guides and the page in Chinese are left out. In it each id carries the name of its page, so
that equal ids do not collide, and links between pages lead to places in the document. Chromium, driven by Playwright,
typesets and prints it. Folded code is left out; folded evidence is unfolded in the chapters and left out of the ledger.
"""

import html
import os
import posixpath
import re
import shutil
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "_build" / "html"
PDF = ROOT / "_build" / "book.pdf"
# Pages to work with at a computer, or of another language.
PARTS_NOT_PRINTED = ("The package", "Guides")
PAGES_NOT_PRINTED = ("book/reproduce", "book/zh")
FOLDED_IN_PRINT = ("book/ledger",)  # each claim's evidence is unfolded in its chapter
WIDTH = 658  # CSS pixels between the margins that tools/pdf.css leaves of A4

ARTICLE = re.compile(r'<article class="bd-article">(.*?)</article>', re.DOTALL)
TITLE = re.compile(r'<h1>(.*?)<a class="headerlink"', re.DOTALL)
HEADING = re.compile(r"(</?h)([1-5])\b")
ATTRIBUTE = re.compile(r' (id|href|src)="([^"]*)"')
ELSEWHERE = re.compile(r"[a-z]+:|//")
FOLDED = '<details class="evidence"'
LOOK = re.compile(r'<link [^>]*rel="stylesheet"[^>]*>|<script>window\.MathJax = .*?</script>')

DOCUMENT = """<!DOCTYPE html>
<html lang="en" data-theme="light">
<head>
<meta charset="utf-8">
<title>{title}</title>
{look}
<style>{css}</style>
<script defer src="_static/{mathjax}"></script>
<script defer src="_static/formulas.js"></script>
</head>
<body class="bd-article">
<header>
<p>{title}</p>
<p>{author}</p>
<p>version {version}</p>
<p>Code that the pages fold is left out here; the notebooks have all of it.</p>
</header>
<nav>{contents}</nav>
{body}
</body>
</html>
"""

# Shrinks what is wider than its column until it fits, and keeps short tables whole. Everything is measured before
# anything is changed, because each change makes the browser lay out the whole document again.
FIT = """() => {
  const measured = [...document.querySelectorAll("mjx-container, table")].map((it) => {
    const column = it.parentElement.closest("td, th, li, dd, p, div, section");
    const { width, height } = it.getBoundingClientRect();
    return { it, share: width / column.getBoundingClientRect().width, short: height < 160 };
  });
  for (const { it, share, short } of measured) {
    if (share > 1) it.style.zoom = 0.99 / share;
    if (short) it.style.breakInside = "avoid";
  }
}"""


def parts(toc: dict[str, Any]) -> dict[str, list[str]]:
    """The names of the pages to print by the captions of their parts; the first page stands before the parts."""
    later = {
        part["caption"]: [page["file"] for page in part["chapters"] if page["file"] not in PAGES_NOT_PRINTED]
        for part in toc["parts"]
        if part["caption"] not in PARTS_NOT_PRINTED
    }
    return {"": [toc["root"]]} | later


def moved(text: str, page: str, pages: Collection[str]) -> str:
    """A page's HTML with its ids, links and pictures as they are in the document of all `pages`.

    A link to a file that is not among the pages keeps only its words.
    """

    def attribute(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name == "id":
            return f' id="{page}/{value}"'
        if ELSEWHERE.match(value):
            return match[0]
        path, _, anchor = value.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else f"{page}.html"
        target = path.removesuffix(".html")
        if target in pages:
            return f' href="#{target}/{anchor}"' if anchor else f' href="#{target}"'
        return f' {name}="{path}"' if name == "src" or path.startswith("_static/") else ""

    return ATTRIBUTE.sub(attribute, text)


def joined(folder: Path) -> str:
    """All pages as one HTML document. ValueError if a link within the book leads nowhere."""
    names = ("_toc.yml", "_config.yml", "CITATION.cff")
    toc, config, cited = (yaml.safe_load((ROOT / name).read_text(encoding="utf-8")) for name in names)
    pages = {page for chapters in parts(toc).values() for page in chapters}
    look: dict[str, None] = {}  # what any page asks for, once
    contents, body = "", ""
    for part, chapters in parts(toc).items():
        if part:
            contents += f"<p>{html.escape(part)}</p>"
            body += f'<h1 class="part">{html.escape(part)}</h1>'
        contents += "<ul>"
        for page in chapters:
            text = moved((folder / f"{page}.html").read_text(encoding="utf-8"), page, pages)
            look |= dict.fromkeys(LOOK.findall(text))
            unfolded = text if page in FOLDED_IN_PRINT else text.replace(FOLDED, f"{FOLDED} open")
            (article,) = ARTICLE.findall(unfolded)
            contents += f'<li><a href="#{page}">{TITLE.findall(article)[0]}</a></li>'
            if part:
                article = HEADING.sub(lambda match: f"{match[1]}{int(match[2]) + 1}", article)
            body += f'<div class="page" id="{page}">{article}</div>'
        contents += "</ul>"
    if lost := set(re.findall(r' href="#([^"]*)"', body)) - set(re.findall(r' id="([^"]*)"', body)):
        raise ValueError(f"these links lead nowhere: {', '.join(sorted(lost))}")
    return DOCUMENT.format(
        title=html.escape(config["title"]),
        author=html.escape(config["author"]),
        version=cited["version"],
        look="\n".join(look),
        css=(Path(__file__).with_suffix(".css")).read_text(encoding="utf-8"),
        mathjax=config["sphinx"]["config"]["mathjax_path"],
        contents=contents,
        body=body,
    )


def chromium(playwright: Any) -> Any:
    """The browser that CHROMIUM names in the environment, by default the system's. Without it, the program ends."""
    name = os.environ.get("CHROMIUM", "chromium")
    path = shutil.which(name)
    if path is None:
        advice = "install it (Debian: apt install chromium), or name one: CHROMIUM=/path/to/chromium"
        sys.exit(f"There is no {name}: {advice}")
    return playwright.chromium.launch(executable_path=path)


def printed(document: Path, pdf: Path) -> None:
    """Print an HTML file. ValueError if a picture or a script is missing."""
    from playwright.sync_api import sync_playwright

    missing: list[str] = []
    with sync_playwright() as playwright, chromium(playwright) as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": 1000})
        page.emulate_media(media="print", color_scheme="light")
        page.on("requestfailed", lambda request: missing.append(request.url))
        page.goto(document.resolve().as_uri(), timeout=0)
        if not missing:  # else it would wait for a script that is missing
            page.evaluate("async () => { await window.MathJax?.startup?.promise; await document.fonts.ready }")
            page.evaluate(FIT)
        if missing:
            raise ValueError(f"these files are missing: {', '.join(missing)}")
        page.pdf(path=pdf, outline=True, tagged=True, prefer_css_page_size=True)


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile("w", dir=PAGES, suffix=".html", encoding="utf-8") as document:
        document.write(joined(PAGES))  # beside the pages, whose pictures and styles it uses
        document.flush()
        printed(Path(document.name), PDF)
    print(f"The book as a PDF: {PDF.as_uri()}")
