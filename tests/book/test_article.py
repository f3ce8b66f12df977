"""The article can be typeset from the executed pages: a value or a figure that is missing fails."""

from tools import article


def test_it_is_typeset(tmp_path):
    assert article.main([str(tmp_path / "article.pdf")]) == 0
    assert (tmp_path / "article.pdf").read_bytes().startswith(b"%PDF")
