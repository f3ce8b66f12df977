"""The pages become one document, with unique ids and links that stay inside; the document becomes one PDF."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from tools import pdf

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "_toc.yml": {
        "root": "book/index",
        "parts": [
            {"caption": "Work & time", "chapters": [{"file": "notebooks/01-a"}]},
            {"caption": "The package", "chapters": [{"file": "book/reference/cost"}]},  # not printed, and not built
            {"caption": "Back matter", "chapters": [{"file": "book/status"}]},  # nor this page
        ],
    },
    "_config.yml": {"title": "A book", "author": "nobody", "sphinx": {"config": {"mathjax_path": "tex-svg-full.js"}}},
    "CITATION.cff": {"version": "1.2.3"},
}
PAGE = """<html><head>
<link rel="stylesheet" href="../_static/look.css" />
<script>window.MathJax = {{"options": {{"processHtmlClass": "math"}}}}</script>
</head><body><nav id="sidebar"></nav><article class="bd-article">
<section class="tex2jax_ignore" id="limits"><h1>{title}<a class="headerlink" href="#limits">#</a></h1>{text}</section>
</article></body></html>"""
TEXTS = {
    "book/index": '<p><a href="../notebooks/01-a.html#limits">there</a> <a href="../notebooks/01-a.html">begin</a></p>',
    "notebooks/01-a": '<p><a href="#limits">here</a> <a href="../book/index.html#limits">back</a>'
    ' <a href="https://example.org/#x">out</a> <a class="file" href="../_sources/01-a.ipynb">file</a>'
    ' <img src="../_images/a.svg" alt=""> <span class="math">\\(x^2\\)</span></p><h2>Costs</h2>'
    '<details class="evidence"><summary>Evidence</summary></details>',
}
PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'


def build(folder, texts):
    """A folder with a book of two pages, laid out as `make html` leaves a larger book."""
    for name, content in SETTINGS.items():
        (folder / name).write_text(yaml.safe_dump(content))
    html = folder / "html"
    for name, text in texts.items():
        (html / name).parent.mkdir(parents=True)
        (html / f"{name}.html").write_text(PAGE.format(title=name[-1].upper(), text=text))
    for name, text in (("_static/look.css", "p {}"), ("_images/a.svg", PICTURE)):
        (html / name).parent.mkdir()
        (html / name).write_text(text)
    for name in ("tex-svg-full.js", "formulas.js"):
        (html / "_static" / name).symlink_to(ROOT / "book" / "_static" / name)
    return html


@pytest.fixture
def html(tmp_path):
    return build(tmp_path, TEXTS)


def test_pages_are_joined_in_order_below_their_parts(html):
    text = pdf.joined(html, html.parent)
    order = ["<title>A book", "version 1.2.3", 'href="#notebooks/01-a">A<', "<h1>X<", ">Work &amp; time</h1>", "<h2>A<"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert '<details class="evidence" open>' in text
    assert "<h3>Costs</h3>" in text
    assert '<link rel="stylesheet" href="_static/look.css" />' in text
    assert "window.MathJax = " in text
    assert "sidebar" not in text


def test_evidence_that_is_told_elsewhere_stays_folded(html, monkeypatch):
    monkeypatch.setattr(pdf, "FOLDED_IN_PRINT", ("notebooks/01-a",))
    assert '<details class="evidence">' in pdf.joined(html, html.parent)


def test_links_and_ids_of_two_pages_do_not_meet(html):
    text = pdf.joined(html, html.parent)
    assert '<a href="#notebooks/01-a/limits">there</a> <a href="#notebooks/01-a">begin</a>' in text
    assert '<a href="#notebooks/01-a/limits">here</a> <a href="#book/index/limits">back</a>' in text
    assert '<a href="https://example.org/#x">out</a> <a class="file">file</a> <img src="_images/a.svg" alt="">' in text
    assert text.count('id="book/index/limits"') == text.count('id="notebooks/01-a/limits"') == 1


def test_a_link_that_leads_nowhere_and_a_page_that_is_missing_are_named(html):
    page = html / "notebooks" / "01-a.html"
    page.write_text(page.read_text().replace('href="#limits">here', 'href="#limit">here'))
    with pytest.raises(pdf.PdfError, match="these links lead nowhere: notebooks/01-a/limit$"):
        pdf.joined(html, html.parent)
    page.unlink()
    with pytest.raises(pdf.PdfError, match=r"html has no page notebooks/01-a.html: run make html"):
        pdf.joined(html, html.parent)


def test_what_printing_needs_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CHROMIUM", "no-such-browser")
    with pytest.raises(pdf.PdfError, match=r"no no-such-browser: install it \(Debian: apt install chromium\)"):
        pdf.chromium(None)
    monkeypatch.setattr(pdf, "joined", lambda _: "")
    monkeypatch.setitem(sys.modules, "playwright.sync_api", None)
    assert pdf.main(tmp_path, tmp_path / "book.pdf") == 1
    assert "printing needs the extra 'ortho[browser]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


needs_browser = pytest.mark.skipif(
    shutil.which(os.environ.get("CHROMIUM", "chromium")) is None or importlib.util.find_spec("playwright") is None,
    reason="needs Chromium and Playwright",
)


@needs_browser
def test_the_pdf_has_an_outline_and_links_and_lacks_no_file(html, tmp_path):
    document = html / "all.html"
    document.write_text(pdf.joined(html, html.parent))
    pdf.printed(document, tmp_path / "book.pdf")
    printed = (tmp_path / "book.pdf").read_bytes()
    for title in (b"X", b"Work & time", b"A", b"Costs"):
        assert b"/Title (" + title + b")" in printed
    assert b"/Title (A book)" in printed
    for place in (b"/book#2Findex#2Flimits", b"/notebooks#2F01-a", b"/notebooks#2F01-a#2Flimits"):
        assert b"/Dest " + place in printed
    assert b"(https://example.org/#x)" in printed
    for name in ("_images/a.svg", "_static/tex-svg-full.js"):
        (html / name).rename(tmp_path / "away")
        with pytest.raises(pdf.PdfError, match=f"these files are missing: .*/{name}$"):
            pdf.printed(document, tmp_path / "other.pdf")
        (tmp_path / "away").rename(html / name)
    assert not (tmp_path / "other.pdf").exists()


@needs_browser
def test_what_is_too_wide_is_made_to_fit_and_short_tables_are_kept_whole():
    from playwright.sync_api import sync_playwright

    wide, tall = "<td>" + "x" * 200, "<td>x<tr>" * 20
    with sync_playwright() as playwright, pdf.chromium(playwright) as browser:
        page = browser.new_page(viewport={"width": pdf.WIDTH, "height": 1000})
        page.set_content(f"<section><table>{wide}</table><table>{tall}</table></section>")
        page.evaluate(pdf.FIT)
        sizes = "(tables) => tables.map((it) => [it.getBoundingClientRect().width, it.style.breakInside])"
        (width, whole), (_, broken) = page.eval_on_selector_all("table", sizes)
    assert 0.9 * pdf.WIDTH < width < pdf.WIDTH
    assert (whole, broken) == ("avoid", "")
