"""Every page of the built book, opened once: nothing fails, no markup is left raw, and all can read it, on phones too.

All tests of a page share one visit, run in the order of this file and in one process (`xdist_group`).
"""

from pathlib import Path

import pytest
from visits import DESK, MADE, PHONE, ROOT, SOURCE, WRITTEN, Visit, new_context

pytestmark = pytest.mark.browser

MOST_BYTES = 1_500_000

# The rules of axe for WCAG 2.1, levels A and AA, except two: colours have a test of their own, and Sphinx renders a
# signature of several lines as a definition list without terms.
RULES = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"],
    "rules": {"color-contrast": {"enabled": False}, "definition-list": {"enabled": False}},
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in WRITTEN + MADE]
)
def visit(request, browser, book):
    with new_context(browser) as context:
        yield Visit(context, f"{book}{request.param}.html")


def test_its_mathematics_is_typeset(visit):
    assert not (found := visit.check("formulas") + visit.check("signs")), "\n".join(found)


def test_nothing_is_left_as_it_was_typed(visit):
    assert not (found := visit.check("text")), "\n".join(found)


def test_its_pictures_are_described(visit):
    assert not (found := visit.check("pictures")), "\n".join(found)


def test_a_phone_shows_it_without_sideways_scrolling(visit):
    visit.page.set_viewport_size(PHONE)
    found = visit.check("width")
    visit.page.set_viewport_size(DESK)
    assert not found, "\n".join(found)


def test_a_first_visit_is_not_heavy(visit):
    assert visit.weight <= MOST_BYTES, sorted(visit.loaded.items(), key=lambda item: -item[1])[:6]


def test_its_source_is_offered(visit, request):
    name = request.node.callspec.params["visit"]
    links = visit.page.locator(SOURCE).evaluate_all("links => links.map((link) => link.href)")
    assert len(links) == (name in WRITTEN)
    for link in links:
        source = (ROOT / name).with_suffix(Path(link).suffix)
        assert visit.page.request.get(link).body() == source.read_bytes()


def test_nothing_went_wrong_meanwhile(visit):
    assert not visit.trouble, "\n".join(visit.trouble)


# The last tests take the page apart, which may break its scripts.


def test_all_can_use_it(visit):
    visit.page.evaluate("document.querySelectorAll('mjx-container').forEach((formula) => formula.remove())")
    assert not (found := visit.violations(**RULES)), "\n".join(found)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_its_colours_can_be_told_apart(visit, scheme):
    visit.check("specimens")
    visit.put_on(scheme)
    assert not (found := visit.violations(runOnly=["color-contrast"])), "\n".join(found)
