"""The book contains what the folders contain: the build would say nothing of a notebook that is in no contents."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from docutils import nodes
from docutils.utils import new_document

from tools import extension, notebooks

ROOT = Path(__file__).parents[2]
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
PAGES = [TOC["root"], *(chapter["file"] for part in TOC["parts"] for chapter in part["chapters"])]


def test_each_notebook_has_its_place_and_each_page_its_file():
    listed = {page for page in PAGES if (ROOT / f"{page}.ipynb").exists()}
    assert listed == {notebooks.title(path).removesuffix(".ipynb") for path in notebooks.every_notebook()}
    assert [page for page in PAGES if page not in listed and not (ROOT / f"{page}.md").exists()] == []


@pytest.mark.parametrize("address", ["", "https://github.com/some/book"])
def test_pages_and_buttons_have_the_address_of_the_repository_or_leave_it_out(monkeypatch, address):
    """No ordinary build has an address."""
    monkeypatch.setenv("REPOSITORY", address)
    config = SimpleNamespace(html_theme_options={})
    extension.add_buttons(None, config)
    assert config.html_theme_options.get("repository_url", "") == address
    document = new_document("a page")
    document += nodes.literal_block("", f"git clone {extension.EXAMPLE} ortho\nmake book")
    document += nodes.paragraph("", "", nodes.reference("", "code", refuri=extension.EXAMPLE))
    extension.say_address(None, document)
    clone = f"git clone {address} ortho\n" * bool(address)
    assert [child.astext() for child in document.children] == [f"{clone}make book", *["code"] * bool(address)]
