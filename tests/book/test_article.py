"""The article takes its numbers and figures from the executed pages, and it can be typeset."""

import re

import pytest

from tools import article
from tools.words import FIGURE, WORD

TEXT = article.TEXT.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("tex", "said"),
    [
        ("8 N^2 d + 12 N d^2", "8 N^2 d + 12 N d^2"),
        (r"\frac{r + 9}{14 \left(r + 1\right)}", "(r + 9) / (14 (r + 1))"),
        ("4{,}096", "4,096"),
        (r"2^{10} N", "2^(10) N"),
        (r"\frac{1}{1 + \frac{d}{N}}", "(1) / (1 + (d) / (N))"),
        (r"N d \log{\left(d \right)} \gg 2\times 10^{-3}", "N d log (d) >> 2 times 10^(-3)"),
        (r"\operatorname{softmax}(Q K^\top)", 'op("softmax")(Q K^top)'),
    ],
)
def test_formulas_are_written_as_typst_has_them(tex, said):
    assert article.typst_math(tex) == said


def test_no_number_is_typed_into_the_text():
    prose = re.sub(
        r"//.*|\$[^$]*\$|#[a-z]+\([^)]*\)|@\w+|Section \d|Figure \d|Table \d", "", TEXT.partition("= The question")[2]
    )
    assert [found for found in FIGURE.findall(prose) if not WORD.fullmatch(found)] == []


def test_every_value_and_figure_that_is_asked_for_exists():
    known = article.gathered()
    assert set(re.findall(r'#[vm]\("(\w+)"\)', TEXT)) <= known.keys()
    for name in article.PICTURE.findall(TEXT):
        suffix, data = article.picture(name)
        assert data.lstrip().startswith({"svg": b"<", "png": b"\x89PNG"}[suffix])
    with pytest.raises(article.ArticleError, match="expected figures of executed pages, got '02-figure-none'"):
        article.picture("02-figure-none")


def test_the_ledger_s_table_adds_up():
    titles, *rows, sums = article.ledger_table(article.judged())
    for column in range(1, len(titles)):
        assert int(sums[column]) == sum(int(row[column]) for row in rows)
    documents = slice(1, titles.index("all"))
    assert all(sum(map(int, row[documents])) == int(row[titles.index("all")]) for row in (*rows, sums))


def test_texts_are_taken_apart_at_their_formulas():
    assert article.pieces("a `b` of $N^{2}$, $d$") == [
        ["text", "a b of "],
        ["math", "N^(2)"],
        ["text", ", "],
        ["math", "d"],
    ]


def test_it_is_typeset(tmp_path, capsys):
    assert article.main([str(tmp_path / "article.pdf")]) == 0
    assert (tmp_path / "article.pdf").read_bytes().startswith(b"%PDF")
    assert "The article:" in capsys.readouterr().out
