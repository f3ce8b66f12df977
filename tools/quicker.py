"""A Sphinx extension: the book is built in less time, and its pages are as they would be without it."""

import os
from typing import Any

from pybtex.backends.plaintext import Backend
from pybtex.plugin import register_plugin
from sphinx_proof.domain import ProofDomain


def merge_nothing(*_: Any) -> None:
    """What to do with a domain's data that another process has read, where there are none."""


def declare(app: Any) -> None:
    """Declare what this extension of Jupyter Book's does not: that it does nothing while pages are read."""
    app.extensions["sphinx_multitoc_numbering"].parallel_read_safe = True


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", declare)
    app.parallel = os.cpu_count() or 1  # as `sphinx-build -j` sets it; Jupyter Book has no such option
    # This domain keeps what it knows of proofs in the environment, which sphinx_proof merges. Sphinx asks for its data.
    ProofDomain.merge_domaindata = merge_nothing
    # Each citation asks for this plugin by name, and pybtex would look through all installed packages each time.
    register_plugin("pybtex.backends", "plaintext", Backend, force=True)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
