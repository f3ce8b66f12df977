"""Each check of a page finds its fault, on a page that has this one fault."""

import pytest
from visits import PHONE, ROOT, Visit, missing, new_context, served

MATHJAX = ROOT / "book" / "_static" / "tex-svg-full.js"
PAGE = """<!DOCTYPE html>
<html lang="en" data-theme="light"><head><meta charset="utf-8"><title>{title}</title><link rel="icon" href="data:,">
<script defer src="tex-svg-full.js"></script></head>
<body><main><article><h1>A page</h1>{body}</article></main></body></html>"""
SOUND = r"""<p>The cost is <span class="math">\(N^2\)</span>; <code>$x$ {y}</code>; <q lang="zh">$x$</q>.</p>
<div style="overflow-x: auto"><table style="width: 2000px"><tr><td>wide</td></tr></table></div>
<img src="data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA=" alt="One dot.">"""


@pytest.fixture
def visit(browser, tmp_path):
    (tmp_path / MATHJAX.name).symlink_to(MATHJAX)

    def open_page(body, title="A page"):
        (tmp_path / "index.html").write_text(PAGE.format(title=title, body=body), encoding="utf-8")
        return Visit(context, address)

    with served(tmp_path) as address, new_context(browser) as context:
        yield open_page


def found(visit):
    """What all checks say, in one list."""
    found = visit.check("formulas") + visit.check("signs") + visit.check("text") + visit.check("pictures")
    visit.page.set_viewport_size(PHONE)
    return found + visit.check("width") + visit.violations() + visit.trouble


@pytest.mark.browser
def test_a_sound_page_passes(visit):
    assert found(visit(SOUND)) == []


@pytest.mark.browser
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (r'<span class="math mathjax_ignore">one</span>', 'not typeset: span.math.mathjax_ignore "one"'),
        (r'<span class="math">\(\frac{1}\)</span>', "not understood"),
        (r'<span class="math">\(\nosuchmacro\)</span>', "not understood"),
        (r'<p style="width: 10px"><span class="math">\(N^2\)</span>. So</p>', 'begins a line: ". So" in p'),
        (r'<p style="width: 10px"><span class="math">\(N^2\)</span>] So</p>', 'begins a line: "] So" in p'),
        (r'<p style="width: 20px">So (<span class="math">\(N^2 + N^2\)</span></p>', 'ends a line: "So (" in p'),
        (r'<p class="mathjax_ignore">It is \(N\).</p>', r"raw text: \( in p.mathjax_ignore"),
        ("<p>It is $N d$ or less.</p>", 'raw text: $ in p "It is $N d$'),
        ("<p>It is x_{t-1}.</p>", "raw text: _{"),
        ("<p>It takes a ~torch.Tensor.</p>", "raw text: ~torch.T"),
        ("<p>See {ref}<code>there</code>.</p>", "raw text: {ref}"),
        ("<p>It is ({chapter(2)}).</p>", "raw text: {chapter(2)}"),
        ('<img src="data:," alt="_images/a.svg">', "without words"),
        ('<p style="width: 2000px">wide</p>', 'too wide: p "wide"'),
        ('<div style="overflow: hidden"><table style="width: 2000px"><tr><td>a</table></div>', "cut off: table"),
        ('<img src="data:,">', "image-alt: <img"),
        ('<p style="color: #999">Pale.</p>', "color-contrast: <p"),
        ('<img src="http://example.org/a.gif" alt="Elsewhere.">', "asks another machine: http://example.org/a.gif"),
        ('<img src="nowhere.gif" alt="Nowhere.">', "404: "),
        ("<script>console.warn('beware')</script>", "console, warning: beware"),
        ("<script>throw Error('broken')</script>", "script: broken"),
    ],
)
def test_a_fault_is_found(visit, body, words):
    assert [line for line in found(visit(SOUND + body)) if words in line]


@pytest.mark.browser
def test_a_raw_title_is_found(visit):
    assert visit("", title=r"The cost \(N^2\)").check("text") == [r"raw title: The cost \(N^2\)"]


@pytest.mark.browser
def test_specimens_keep_one_text_of_each_kind(visit):
    page = visit(
        '<ul><li>-<li>one<li>two<li class="other">three</ul><p>four</p><div><p>five</p><p>six</p></div>'
        '<p>seven</p><p style="color: #999">eight</p><p style="color: #999">nine</p>'
    )
    page.check("specimens")
    assert page.page.inner_text("article").split() == ["A", "page", "one", "three", "four", "five", "eight"]
    assert [line.split()[0] for line in page.violations(runOnly=["color-contrast"])] == ["color-contrast:"]


@pytest.mark.browser
def test_bytes_are_counted_without_mathjax(visit, tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(1000))
    page = visit("<script>fetch('a.txt').then((answer) => answer.text())</script>")
    page.page.wait_for_load_state("networkidle")
    assert page.weight == (tmp_path / "index.html").stat().st_size + 1000


# ----------------------------------------------------------------------------------------------- without what is needed


@pytest.mark.parametrize(("wanted", "outcome"), [("", pytest.skip.Exception), ("required", pytest.fail.Exception)])
def test_what_is_missing_is_named(monkeypatch, wanted, outcome):
    monkeypatch.setenv("ORTHO_BROWSER", wanted)
    with pytest.raises(outcome, match="words"):
        missing("words")
