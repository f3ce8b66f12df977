"""A Sphinx extension: figures are numbered by chapter ("Fig. 7.1"). On pages without a number they have none either, as
Sphinx would count them on from page to page."""

from typing import Any


def drop(_: Any, env: Any) -> None:
    """Take the numbers of figures from pages that have none themselves."""
    for page, kinds in env.toc_fignumbers.items():
        if not env.toc_secnumbers.get(page):
            kinds.pop("figure", None)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("env-check-consistency", drop)  # the first event after numbers were given
    return {"parallel_read_safe": True, "parallel_write_safe": True}
