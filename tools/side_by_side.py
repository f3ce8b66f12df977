"""A Sphinx extension by which pages are written in as many processes as there are processors.

Jupyter Book has no option for it. Pages are read one by one: not all extensions could do that in parallel.
"""

import os
from typing import Any


def write_in_parallel(app: Any, _env: Any) -> None:
    """Called when all pages have been read."""
    app.parallel = 1 + (os.cpu_count() or 1)  # one process prepares what the others write


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("env-updated", write_in_parallel)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
