"""The pages about the package: every public module is described once, and docstrings become what autodoc reads."""

from collections import Counter, namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from ortho.layers.multihead import MultiheadAttention
from tools import docstrings

PAGES = Path(__file__).parents[2] / "book" / "reference"


def patterns(page):
    return page.read_text(encoding="utf-8").split("```{modules}\n")[1].split("\n```")[0].splitlines()


def test_every_public_module_is_described_once():
    described = Counter(name for page in PAGES.glob("*.md") for name in docstrings.chosen(patterns(page)))
    assert described == Counter(docstrings.public_modules())
    assert {"ortho", "ortho.layers.multihead", "ortho.attention.linear.favor"} <= set(described)
    assert not [name for name in described if "._" in name]


def test_every_page_is_in_the_book():
    contents = (PAGES.parent.parent / "_toc.yml").read_text(encoding="utf-8")
    assert [page.stem for page in PAGES.glob("*.md") if f"book/reference/{page.stem}\n" not in contents] == []


@pytest.mark.bad_input
def test_a_pattern_of_no_module_is_an_error():
    with pytest.raises(ValueError, match=r"modules: expected a pattern of modules that there are, got 'ortho\.layer'"):
        docstrings.chosen(["ortho.layers.multihead", "ortho.layer"])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a `name` of it", r"a \ ``name``\  of it"),
        (r"$a_i \cdot b$-wide", r"\ :math:`a_i \cdot b`\ -wide"),
        ("the norm |x|, W_V and d_ times 4 * d", r"the norm \|x\|, W\_V and d\_ times 4 \* d"),
        ("`a|b_` beside |c|", r"\ ``a|b_``\  beside \|c\|"),
        ("two\nlines `of\ncode`", "two\nlines \\ ``of code``\\ "),
        (
            "(arXiv:2009.14794)",
            r"(\ `arXiv:2009.14794 <https://arxiv.org/abs/2009.14794>`__\ )",
        ),
        ("* one of\n  a list\n* another", "- one of\n  a list\n- another"),
        ("$$a = b,\n  c_i$$", ".. math:: a = b, c_i"),
    ],
)
def test_what_a_docstring_marks(text, wanted):
    assert docstrings.translated(text) == wanted


def test_paragraphs_stay_apart():
    lines = ["One `a", "b`.", "", "Two $c$.", ""]
    docstrings.process(None, "function", "f", None, None, lines)
    assert [line for line in lines if line] == ["One \\ ``a b``\\ .", "Two \\ :math:`c`\\ ."]
    assert "" in lines[:2]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("(f=<function softmax>, g=<function relu at 0x7f01>)", "(f=softmax, g=relu)"),
        ("(clock: ~typing.Any = <built-in function monotonic>)", "(clock: ~typing.Any = monotonic)"),
        ("(kind=<class 'torch.nn.modules.linear.Linear'>)", "(kind=Linear)"),
        (
            "(kinds: dict = {'loss': <class 'list'>}, facts: dict = <factory>)",
            "(kinds: dict = {'loss': list}, facts: dict = ...)",
        ),
        ("(a: int = 1) -> bool", "(a: int = 1) -> bool"),
    ],
)
def test_defaults_are_named(text, wanted):
    assert docstrings.signature(None, "function", "f", None, None, text, "int") == (wanted, "int")


def test_what_takes_no_arguments_has_no_signature():
    assert docstrings.signature(None, "attribute", "a", None, None, None, None) is None


def test_what_is_left_out():
    pair = namedtuple("pair", "first second")
    for thing in (pair.first, nn.Module.forward, nn.Module.extra_repr):
        assert docstrings.skip(None, "class", "x", thing, False, None) is True
    for thing in (MultiheadAttention.forward, MultiheadAttention, SimpleNamespace(__doc__=None, __module__=None)):
        assert docstrings.skip(None, "class", "x", thing, False, None) is None
