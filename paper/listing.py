"""Listings of the package's code for the pages."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from IPython.display import Markdown

__all__ = ["listing"]

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 84  # characters that fit a page


def listing(*functions: Callable[..., Any]) -> Markdown:
    """The code of functions, each under the name of its file (and of a method's class), without docstrings, decorators
    and annotations.

    So a page shows the code that runs: its stored output no longer fits once the code has changed.
    """
    return Markdown("```python\n" + "\n\n".join(map(_code, functions)) + "\n```")


def _code(function: Callable[..., Any]) -> str:
    # An attention function is a wrapper around its definition, a function of one call.
    function = inspect.unwrap(getattr(function, "definition", function))
    path = Path(inspect.getfile(function)).resolve().relative_to(ROOT)
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    (defined,) = ast.parse("\n".join(lines)).body
    assert isinstance(defined, ast.FunctionDef)
    body = defined.body[1:] if ast.get_docstring(defined) else defined.body
    start = body[0].lineno - 1
    while lines[start - 1].lstrip().startswith("#"):
        start -= 1
    owner = function.__qualname__.rpartition(".")[0]  # the class of a method
    place = f"{path.as_posix()} ({owner})" if owner.isidentifier() else path.as_posix()
    return "\n".join([f"# {place}", *_signature(defined), *lines[start:]])


def _signature(defined: ast.FunctionDef) -> list[str]:
    """The function's name and the names and defaults of its parameters, on as many lines as needed."""
    for node in ast.walk(defined.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    opening = f"def {defined.name}("
    text = f"{opening}{ast.unparse(defined.args)}):"
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * len(opening), break_long_words=False)
