"""The READMEs say what their pages say, the code in them runs, and the pages name only what exists."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from ortho.__main__ import main as ortho
from paper.__main__ import main as paper
from paper.claims import stored
from paper.findings import values
from tools import readme

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "README.zh.md", "CONTRIBUTING.md")
ENGLISH, CHINESE = readme.READMES
STATUS = ("book/status.ipynb", "book/artifact.ipynb")
GUIDES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "book" / "guides").glob("*.ipynb"))]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture
def copy(tmp_path):
    """A folder with copies of the READMEs, and of the pages and the picture from which they are made."""
    for name in (*readme.READMES, *readme.READMES.values(), readme.RESULTS, readme.PICTURE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_picture_and_answers_are_current():
    assert [*readme.stale()] == [], "not what their pages say: python tools/readme.py"


@pytest.mark.parametrize("name", [*readme.READMES, readme.PICTURE])
def test_a_change_is_noticed_and_mended(copy, name):
    page = copy / name
    before = page.read_text(encoding="utf-8")
    altered = before.replace("Faster?", "Slower?").replace("<svg", "<svg ").replace("更快吗？几乎", "更慢吗？几乎")
    page.write_text(altered, encoding="utf-8")
    assert [*readme.stale(copy)] == [name]
    assert readme.main(copy) == 0
    assert page.read_text(encoding="utf-8") == before


@pytest.mark.parametrize(
    ("name", "word", "said"),
    [
        (ENGLISH, readme.START, "README.md: expected the lines"),
        (readme.PAGE, '"answers"', "expected a cell 'answers'"),
        (readme.RESULTS, '"mystnb"', f"{readme.RESULTS}: expected mystnb.image.alt"),
        (ENGLISH, None, "README.md: expected a file that can be read (No such file"),
        (readme.PAGE, None, f"{readme.PAGE}: expected a file that can be read (No such file"),
    ],
)
def test_what_is_missing_is_named(copy, name, word, said, capsys):
    """What is missing is a word of a file, or the whole file."""
    page = copy / name
    if word:
        page.write_text(page.read_text(encoding="utf-8").replace(word, '"other"'), encoding="utf-8")
    else:
        page.unlink()
    assert readme.main(copy) == 1
    assert said in capsys.readouterr().err


def test_both_languages_have_the_same_answers():
    """They name the same chapters and print the same figures."""
    english, chinese = (printed(page, "answers").splitlines() for page in readme.READMES.values())
    assert [re.findall(r"notebooks/(\d\d)", line) for line in english] == [
        re.findall(r"notebooks/(\d\d)", line) for line in chinese
    ]
    assert list(map(figures, english)) == list(map(figures, chinese))


def test_the_chinese_findings_are_values_that_every_page_prints():
    known = {number for value in values().values() for number in figures(value)}
    lines = printed("book/zh.ipynb", "findings").splitlines()
    assert lines and all(figures(line) - {"1", "2"} <= known for line in lines)


def figures(line):
    """The numbers in a finding, without those in its links."""
    return set(re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"\[[^]]*\]\([^)]*\)", "", line).replace("{,}", ",")))


def test_links_are_made_relative_to_the_readme():
    text = "[a](../notebooks/01-a.ipynb), [b](ledger.ipynb), [c](https://example.org/d), [e](#f)"
    assert (
        readme.moved(text) == "[a](notebooks/01-a.ipynb), [b](book/ledger.ipynb), [c](https://example.org/d), [e](#f)"
    )


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page):
    links = re.findall(r"\]\(((?![a-z]+:|#)[^)#]+)", read(page))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```", read("README.md"), re.MULTILINE | re.DOTALL))
def test_the_readmes_code_runs(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out


def modules(package):
    paths = (ROOT / package).iterdir()
    return {path.stem for path in paths if path.suffix in ("", ".py") and path.stem[0] != "_"}


def test_the_readme_and_the_order_of_imports_name_every_module():
    order = read("CONTRIBUTING.md").partition("A module may import")[2].partition("`import ortho`")[0]
    for package in ("ortho", "paper"):
        row = next(line for line in read("README.md").splitlines() if line.startswith(f"| `{package}/` |"))
        assert set(re.findall(r"`(\w+)`", row)) == modules(package)
        assert modules(package) <= set(re.findall(r"`(\w+)`", order))


def targets(text):
    """Targets of make that a text names at the start of a line or of inline code."""
    return set(re.findall(r"(?:^ *\"?|`)make (?:[A-Z]+=\S+ )*([a-z]+)", text, re.MULTILINE))


@pytest.mark.parametrize("name", [*PAGES, readme.PAGE])
def test_pages_name_the_commands_that_make_and_test_the_book(name):
    assert {"test", "html"} & targets(read(name))


def options(text, command):
    """All options in the lines that name a command, such as `paper claims`."""
    lines = [line for line in text.splitlines() if f"python -m {command}" in line]
    return {option for line in lines for option in re.findall(r"--[a-z]+", line)}


def test_all_options_of_a_commands_lines_are_looked_at():
    text = "with `--jobs` run `python -m ortho a --list` or --show\npython -m ortho b --json\n--budget"
    assert options(text, "ortho a") == {"--jobs", "--list", "--show"}
    assert options(text, "ortho b") == {"--json"}


@pytest.mark.parametrize("name", [*PAGES, readme.PAGE, *STATUS, *GUIDES])
def test_commands_exist(name, capsys):
    """Every target of make that a page names exists, and so do the commands and options of the two packages."""
    text = read(name)
    assert targets(text) <= set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    for package, command in set(re.findall(r"python -m (ortho|paper) ([a-z]+)", text)):
        with pytest.raises(SystemExit) as stopped:
            {"ortho": ortho, "paper": paper}[package]([command, "--help"])
        assert stopped.value.code == 0
        offered = re.findall(r"--[a-z]+", capsys.readouterr().out)
        assert options(text, f"{package} {command}") <= set(offered)


def test_the_page_on_how_to_read_leads_to_every_chapter():
    toc = yaml.safe_load(read("_toc.yml"))
    chapters = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"] if part.get("numbered")]
    assert chapters
    assert [chapter for chapter in chapters if f"(../{chapter}.ipynb)" not in read("book/how-to-read.ipynb")] == []


def printed(page, cell):
    return readme.cell(ROOT, page, cell, "text/markdown")[1]


def numbers_by_row(table):
    """First cell of each row of a table -> its whole numbers."""
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: [int(cell) for cell in row[1:] if cell.isdecimal()] for row in rows}


def test_the_chinese_page_counts_verdicts_and_severities_as_the_english_one_does():
    wanted = list(numbers_by_row(printed(readme.RESULTS, "verdicts")).values())
    found = [numbers_by_row(printed("book/zh.ipynb", cell)).values() for cell in ("counts", "severities")]
    assert [*found[0], *found[1]] == wanted


def test_the_chinese_page_lists_what_is_refuted_in_substance():
    entries = {name: entry for name, (entry, _) in stored(ROOT / "book" / "verdicts.json").items()}
    wanted = [name for name, one in entries.items() if (one.verdict, one.severity) == ("refuted", "substance")]
    listed = printed("book/zh.ipynb", "refuted")
    assert re.findall(r"^- \[(S[\w.]+)\]", listed, re.MULTILINE) == wanted
    for line, claim in zip(listed.splitlines(), wanted, strict=True):
        counted = re.search(r"(\d+) 项不成立", line)
        refuted = sum(verdict == "refuted" for _, verdict, *_ in entries[claim].parts)
        assert (int(counted[1]) if counted else 0) == refuted
