"""A Sphinx extension: a number and the per cent sign behind it stay on one line, in prose and tables, not in code."""

import re
from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

APART = re.compile(r"(?:(?<=\d)|^) (?=%)")  # at the beginning, behind a number that a page has put there


def together(text: str) -> str:
    """The text with spaces before per cent signs that no line ends at."""
    return APART.sub("\N{NO-BREAK SPACE}", text)


class KeepTogether(SphinxPostTransform):
    """Last of all, when every number has its place."""

    default_priority = 900

    def run(self, **_: Any) -> None:
        for text in list(self.document.findall(nodes.Text)):
            parent = text.parent
            if not isinstance(parent, nodes.literal | nodes.FixedTextElement | nodes.math | nodes.raw):
                kept = together(text)
                if kept != text:
                    parent.replace(text, nodes.Text(kept))


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_post_transform(KeepTogether)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
