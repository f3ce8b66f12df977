"""Per cent signs stay with their numbers."""

import pytest
from docutils import nodes
from docutils.utils import new_document

from tools import per_cent


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("some 7 % of it, 12.5 %", "some 7\xa0% of it, 12.5\xa0%"),
        (" % of the answers", "\xa0% of the answers"),  # the number before it is another node
        ("in % of all, x % y, 7%", "in % of all, x % y, 7%"),
    ],
)
def test_spaces_before_per_cent_signs(text, kept):
    assert per_cent.together(text) == kept


def test_prose_is_kept_together_and_code_is_as_it_was():
    document = new_document("a page")
    code = [nodes.literal("", "7 % 2"), nodes.math("", "7 % 2"), nodes.raw("", "7 % 2", format="html")]
    document += nodes.paragraph("", "", nodes.Text("7 % and "), nodes.emphasis("", "8 %"), *code)
    document += nodes.literal_block("", "7 % 2")
    per_cent.KeepTogether(document).run()
    found = [text.astext() for text in document.findall(nodes.Text)]
    assert found == ["7\xa0% and ", "8\xa0%", "7 % 2", "7 % 2", "7 % 2", "7 % 2"]
