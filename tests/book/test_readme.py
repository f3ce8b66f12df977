"""The READMEs say what their pages say, the code in them runs, and the pages name only what exists."""

import re
from pathlib import Path

import pytest

from ortho.__main__ import main as ortho
from paper.__main__ import main as paper
from paper.claims import ledger
from tools import readme

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "README.zh.md", "CONTRIBUTING.md")
GUIDES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "book" / "guides").glob("*.ipynb"))]
NAMING = [*PAGES, readme.PAGE, "book/reproduce.ipynb", *GUIDES]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_picture_and_answers_are_current():
    assert [name for name, text in readme.wanted().items() if read(name) != text] == [], "run: python tools/readme.py"


def printed(page, cell):
    return readme.cell(page, cell)[1]["text/markdown"]


def test_both_languages_have_the_same_answers():
    """They name the same chapters and print the same figures."""
    english, chinese = (printed(page, "answers").splitlines() for page in readme.READMES.values())
    assert [re.findall(r"notebooks/(\d\d)", line) for line in english] == [
        re.findall(r"notebooks/(\d\d)", line) for line in chinese
    ]
    assert list(map(figures, english)) == list(map(figures, chinese))


def test_the_chinese_page_lists_what_is_refuted_in_substance():
    entries = ledger()
    wanted = [name for name, one in entries.items() if (one.verdict, one.severity) == ("refuted", "substance")]
    assert re.findall(r"^- \[(S[\w.]+)\]", printed("book/zh.ipynb", "refuted"), re.MULTILINE) == wanted


def figures(line):
    """The numbers in a finding, without those in its links."""
    return set(re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"\[[^]]*\]\([^)]*\)", "", line).replace("{,}", ",")))


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page):
    links = re.findall(r"\]\(((?![a-z]+:|#)[^)#]+)", read(page))
    assert links and [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```", read("README.md"), re.MULTILINE | re.DOTALL))
def test_the_readmes_code_runs(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", NAMING)
def test_commands_exist(name, capsys):
    """Every target of make that a page names exists, and so do the commands and options of the two packages."""
    text = read(name)
    targets = set(re.findall(r"(?:^ *\"?|`)make (?:[A-Z]+=\S+ )*([a-z]+)", text, re.MULTILINE))
    assert targets <= set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    for package, command in set(re.findall(r"python -m (ortho|paper) ([a-z]+)", text)):
        with pytest.raises(SystemExit) as stopped:
            {"ortho": ortho, "paper": paper}[package]([command, "--help"])
        assert stopped.value.code == 0
        lines = [line for line in text.splitlines() if f"python -m {package} {command}" in line]
        named = {option for line in lines for option in re.findall(r"--[a-z]+", line)}
        assert named <= set(re.findall(r"--[a-z]+", capsys.readouterr().out))
