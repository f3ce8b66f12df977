"""A Sphinx extension: the book is built in less time, and its pages are as they would be without it.

Pages are read by one process, as sphinx_proof cannot put together what several have read, but written by all cores.
"""

import os
from typing import Any

from pybtex.backends.plaintext import Backend
from pybtex.plugin import register_plugin


def write_by_all_cores(app: Any, _: Any) -> None:
    """Set what `sphinx-build -j` sets, once the pages are read."""
    app.parallel = os.cpu_count() or 1


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("env-check-consistency", write_by_all_cores)
    # Each citation asks for this plugin by name, and pybtex would look through all installed packages each time.
    register_plugin("pybtex.backends", "plaintext", Backend, force=True)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
