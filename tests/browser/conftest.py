"""What the tests in a browser share. `make browser` runs them; pytest alone leaves them out (`addopts`)."""

import pytest
from visits import BOOK, missing, new_context, served

from tools import pdf


@pytest.fixture(scope="session")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("Playwright is not installed: pip install -c constraints.txt -e '.[browser]'")
    with sync_playwright() as playwright:
        try:
            browser = pdf.chromium(playwright)
        except SystemExit as error:
            missing(str(error))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def book():
    """The address of the built book."""
    if not (BOOK / "index.html").exists():
        missing(f"There is no book at {BOOK}: run make html")
    with served(BOOK) as address:
        yield address


@pytest.fixture
def page(browser):
    with new_context(browser) as context:
        yield context.new_page()
