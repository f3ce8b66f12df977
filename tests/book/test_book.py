"""The book contains what the folders contain."""

import re
from pathlib import Path

import yaml

from tools import notebooks

ROOT = Path(__file__).parents[2]
TOC = yaml.safe_load((ROOT / "_toc.yml").read_text())
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text())
PAGES = [TOC["root"], *(chapter["file"] for part in TOC["parts"] for chapter in part["chapters"])]


def test_each_notebook_has_its_place_and_each_page_its_file():
    listed = {page for page in PAGES if (ROOT / f"{page}.ipynb").exists()}
    assert listed == {notebooks.title(path).removesuffix(".ipynb") for path in notebooks.every_notebook()}
    assert [page for page in PAGES if page not in listed and not (ROOT / f"{page}.md").exists()] == []
    assert len(set(PAGES)) == len(PAGES)


def test_chapters_are_read_in_the_order_of_their_names():
    chapters = [page for page in PAGES if page.startswith("notebooks/")]
    assert chapters == sorted(chapters)


def test_the_first_page_after_the_landing_page_says_how_to_read():
    assert PAGES[1] == "book/how-to-read"


def test_guides_stand_between_the_chapters_and_the_package():
    parts = {part["caption"]: [chapter["file"] for chapter in part["chapters"]] for part in TOC["parts"]}
    captions, numbered = list(parts), [part["caption"] for part in TOC["parts"] if part.get("numbered")]
    place = captions.index("Guides")
    assert captions[:place] == ["Before you begin", *numbered] and captions[place + 1] == "The package"
    found = {path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / "book" / "guides").glob("*.ipynb")}
    assert set(parts["Guides"]) == found
    assert {f"{page}.ipynb" for page in found} <= set(map(notebooks.title, notebooks.every_notebook()))


def test_the_build_shows_stored_outputs_and_serves_its_own_mathjax():
    assert CONFIG["execute"]["execute_notebooks"] == "off"
    folder = ROOT / CONFIG["sphinx"]["config"]["html_static_path"][0]
    assert (folder / CONFIG["sphinx"]["config"]["mathjax_path"]).exists()
    assert "Apache License" in (folder / "tex-svg-full.LICENSE.txt").read_text()


def test_the_entry_for_bibtex_says_what_the_citation_file_says():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    entry = (ROOT / "book" / "bibliography.md").read_text().partition("```bibtex\n")[2].partition("```")[0]
    (kind, *_), fields = re.findall(r"@(\w+)", entry), dict(re.findall(r"(\w+) += \{+([^}]*)\}", entry))
    (author,) = cited["authors"]
    wanted = {"author": author["name"], "title": cited["title"], "version": cited["version"]}
    assert (kind, fields) == (cited["type"], {**wanted, "year": str(CONFIG["copyright"])})
