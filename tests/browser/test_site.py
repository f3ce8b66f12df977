"""What readers do with the book: search it, filter the ledger, download a notebook, and read without scripts."""

from urllib.parse import quote

import pytest
from visits import WRITTEN, new_context

from paper.claims import catalogue

pytestmark = pytest.mark.browser

CHAPTERS = [name for name in WRITTEN if name.startswith("notebooks/")]


def test_the_address_of_the_book_leads_to_its_first_page(page, book):
    page.goto(book)
    page.wait_for_url(f"{book}{WRITTEN[0]}.html")


def test_every_page_leads_to_the_search(page, book):
    page.goto(f"{book}{CHAPTERS[0]}.html")
    page.keyboard.press("Control+k")
    page.locator("dialog[open] input[name=q]").fill("delta rule")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{book}search.html?q=delta+rule")


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("delta rule", "12-memories-that-erase"),
        ("FAVOR", "11-favor"),
        ("cite", "book/index"),
        ("what is new", "notebooks/14-what-is-new"),
    ],
)
def test_the_search_begins_with_what_was_asked_for_and_ends_with_names_of_the_package(page, book, words, first):
    page.goto(f"{book}search.html?q={quote(words)}")
    page.wait_for_function("/finished/.test(document.querySelector('#search-results').textContent)")
    links = page.locator("#search-results .search li > a")
    found = links.evaluate_all("links => links.map((link) => new URL(link.href).pathname)")
    assert first in found[0]
    names = ["/reference/" in address for address in found]
    assert names == sorted(names), found


def test_figures_are_dark_in_the_dark(page, book):
    page.emulate_media(color_scheme="dark")
    page.goto(f"{book}{CHAPTERS[0]}.html")
    figures = page.locator("div.cell_output img")
    assert figures.count() > 0
    for figure in figures.all():
        assert figure.evaluate("(image) => getComputedStyle(image).filter") == "invert(0.9) hue-rotate(180deg)"


def test_writes_into_a_memory_are_gone_through(page, book):
    page.goto(f"{book}notebooks/12-memories-that-erase.html")
    stepper = page.locator(".delta-writes")
    slider = stepper.get_by_label("Writes so far")
    writes = stepper.locator("tbody tr:has(td:nth-of-type(6))")
    slider.fill("2")
    assert stepper.locator("tr.later").count() == writes.count() - 2
    assert stepper.locator("tr.later td:visible").count() > 0  # dim, but there
    assert stepper.locator("tr.now th").inner_text() == "2"
    assert "10" in stepper.locator(".bars").inner_text()
    assert stepper.locator(".bars .last").count() == 4  # both keys have a value, in both memories
    before = stepper.locator(".bars").inner_text()
    slider.press("ArrowRight")
    assert stepper.locator("tr.now th").inner_text() == "3"
    assert stepper.locator(".bars").inner_text() != before


def test_a_chunk_is_solved_row_by_row(page, book):
    page.goto(f"{book}notebooks/systems/chunked-form.html")
    stepper = page.locator(".chunk-solve")
    slider = stepper.get_by_label("Rows solved")
    for solved in range(stepper.locator("tbody tr").count() + 1):
        slider.fill(str(solved))
        assert stepper.locator("td.error:visible").count() == solved
    assert stepper.locator("td.known").count() > 0


def test_the_point_of_the_first_page_is_dragged(page, book):
    page.goto(f"{book}book/index.html")
    figure = page.locator(".lookup")
    said = figure.locator("output")
    first = said.inner_text()
    figure.locator("svg").click()  # in its middle
    dragged = said.inner_text()
    assert dragged != first
    figure.get_by_role("slider", name="number of tokens").fill("0")
    assert "50 %" in said.inner_text() != dragged  # two tokens, by guessing
    assert not figure.locator(".fixed").is_visible()


# --------------------------------------------------------------------------------------------------------------- ledger


def rows(page):
    """(id, verdict, severity or "none") of the claims that are shown, in order."""
    cells = page.locator(".tag_ledger tbody tr:visible td:first-child")
    return [tuple([*text.strip().splitlines(), "none"][:3]) for text in cells.all_inner_texts()]


def counted(page):
    return page.locator(".ledger-controls output").inner_text()


@pytest.fixture(scope="module")
def whole(browser, book):
    """The rows of the ledger as a browser without scripts shows them."""
    with new_context(browser, java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"{book}book/ledger.html")
        assert page.locator(".ledger-controls").count() == 0
        return rows(page)


@pytest.fixture
def ledger(page, book):
    page.goto(f"{book}book/ledger.html")
    return page


def test_without_scripts_the_ledger_is_whole(whole):
    assert [claim for claim, *_ in whole] == list(catalogue().claims)


@pytest.mark.parametrize(
    ("name", "of"),
    [("document", lambda row: row[0].split(".")[0]), ("verdict", lambda row: row[1]), ("severity", lambda row: row[2])],
    ids=["document", "verdict", "severity"],
)
def test_it_is_filtered(ledger, whole, name, of):
    for value in {of(row) for row in whole}:
        ledger.select_option(f"select[name={name}]", value)
        assert rows(ledger) == [row for row in whole if of(row) == value]
    ledger.select_option(f"select[name={name}]", "")
    assert rows(ledger) == whole


def test_it_is_searched(ledger, whole):
    claim, verdict, _ = whole[2]
    ledger.fill("input[name=words]", claim.lower())
    assert rows(ledger) == [whole[2]]
    ledger.fill("input[name=words]", verdict)
    assert {row for row in whole if row[1] == verdict} <= set(rows(ledger))
    ledger.fill("input[name=words]", "xyzzy")
    assert rows(ledger) == []
    assert counted(ledger) == f"0 of {len(whole)} claims"
    ledger.fill("input[name=words]", "")
    assert rows(ledger) == whole


def test_evidence_is_folded_until_it_is_asked_for(ledger, whole):
    evidence = ledger.locator(".tag_ledger details.evidence")
    assert evidence.count() == len(whole)
    hidden = evidence.first.get_by_text("rule:")
    assert not hidden.is_visible()
    evidence.first.locator("summary").click()
    assert hidden.is_visible()


def test_a_choice_can_be_linked(ledger, whole, book):
    verdict = whole[0][1]
    ledger.select_option("select[name=verdict]", verdict)
    address = ledger.url
    assert address == f"{book}book/ledger.html?verdict={verdict}"
    ledger.goto("about:blank")
    ledger.goto(address)
    assert rows(ledger) == [row for row in whole if row[1] == verdict]


def test_the_slider_over_lengths_moves_the_costs(page, book):
    page.goto(f"{book}notebooks/02-what-freezing-removes.html")
    slider, rows = page.locator(".cost-slider input"), page.locator(".cost-slider .chosen tbody tr")
    assert rows.count() == 6
    faster, saved = (rows.nth(1).locator("td").nth(column) for column in (2, 3))
    assert saved.inner_text() == "11.1 %"  # frozen, N = d: 4 of 36 units
    assert faster.inner_text() == "12.5 %"  # 36 / 32
    slider.focus()
    for _ in range(4):
        page.keyboard.press("ArrowLeft")  # to N = d/16: 4 of 24.75
    assert page.locator(".cost-slider output").inner_text() == "1/16"
    assert saved.inner_text() == "16.2 %"
    page.locator(".cost-slider select").select_option("fast")  # 4 of 24.875
    assert saved.inner_text() == "16.1 %"
    assert not page.locator(".cost-slider .fixed").is_visible()


def test_a_pattern_and_a_number_of_layers_show_which_tokens_arrive(page, book):
    page.goto(f"{book}notebooks/systems/sparse-patterns.html")
    box = page.locator(".reach")
    said, reached = box.locator("output"), box.locator(".reach-tokens .reached")
    box.locator("select").select_option("window of 8")
    box.locator("input").fill("1")
    assert (said.inner_text(), reached.count()) == ("8 of 64 tokens after 1 layer", 8)
    box.locator("input").press("ArrowRight")
    assert (said.inner_text(), reached.count()) == ("15 of 64 tokens after 2 layers", 15)
    box.locator("select").select_option("strided by 8")
    assert (said.inner_text(), reached.count()) == ("64 of 64 tokens after 2 layers", 64)
    assert box.locator(".chosen").inner_text() == "100"
