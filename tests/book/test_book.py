"""The book contains what the folders contain: the build would say nothing of a notebook that is in no contents. The
article can be typeset from the executed pages."""

from pathlib import Path

import yaml

from tools import article, notebooks

ROOT = Path(__file__).parents[2]
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
PAGES = [TOC["root"], *(chapter["file"] for part in TOC["parts"] for chapter in part["chapters"])]


def test_each_notebook_has_its_place_and_each_page_its_file():
    listed = {page for page in PAGES if (ROOT / f"{page}.ipynb").exists()}
    assert listed == {notebooks.title(path).removesuffix(".ipynb") for path in notebooks.every_notebook()}
    assert [page for page in PAGES if page not in listed and not (ROOT / f"{page}.md").exists()] == []


def test_the_article_is_typeset(tmp_path):
    """A value or a figure that is missing fails."""
    article.typeset(tmp_path / "article.pdf")
    assert (tmp_path / "article.pdf").read_bytes().startswith(b"%PDF")
