r"""A Sphinx extension for the pages about the package: its docstrings, module by module.

The directive `modules` takes patterns, one a line, and describes each module that matches one; the name of a package
stands for its `__init__.py`. In a docstring `name` is code, $x$ a formula, $$x$$ a formula that is a paragraph,
arXiv:2009.14794 a paper, and no other character is markup. This is translated to the reStructuredText that autodoc
reads. Members that a class only inherits from Python or PyTorch are left out, and so are the fields of named tuples,
which their class describes. Default values that are functions or classes are shown by name.
"""

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "ortho"  # what users import; `paper` is read in its source
MODULE = """## {name}

```{{eval-rst}}
.. automodule:: {name}
   :members:
   :ignore-module-all:
```
"""

# In the order in which they are tried. A formula cannot hold a backtick, and code cannot hold a formula.
MARKUP = re.compile(r"`(?P<code>[^`]+)`|\$(?P<formula>[^$]+)\$|(?P<paper>arXiv:\d{4}\.\d{4,5})")
DISPLAYED = re.compile(r"\s*\$\$([^$]+)\$\$\s*")
SPECIAL = re.compile(r"[\\*|_`]")
LISTED = re.compile(r"^(\s*)\* ", re.MULTILINE)
GENERATED = re.compile(r"Alias for field number \d+$")
# Values whose repr is not Python code: <function softmax>, <class 'torch.nn.Linear'>; <factory> of a dataclass.
UNREADABLE = re.compile(r"<(?:(?:built-in )?function |class ')?(?:\w+\.)*(\w+)'?(?: at 0x[0-9a-f]+)?>")


def public_modules() -> list[str]:
    """All modules without a leading underscore, in the order of their names."""
    files = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / PACKAGE).rglob("*.py"))
    names = sorted(".".join(path.parts).removesuffix(".__init__") for path in files)
    return [name for name in names if "._" not in name]


def chosen(patterns: Iterable[str]) -> list[str]:
    """The public modules that match the patterns, pattern by pattern. ValueError for a pattern that matches none."""
    found: dict[str, None] = {}
    for pattern in patterns:
        names = [name for name in public_modules() if fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(f"modules: expected a pattern of modules that there are, got {pattern!r}")
        found |= dict.fromkeys(names)
    return list(found)


class Modules(SphinxDirective):
    """```{modules}``` with a pattern a line."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        try:
            names = chosen(line.strip() for line in self.content if line.strip())
        except ValueError as error:
            raise self.error(str(error)) from error
        text = "\n".join(MODULE.format(name=name) for name in names)
        parent = nodes.container()
        parent.document = self.state.document
        self.state.nested_parse(StringList(text.splitlines(), source=""), 0, parent, match_titles=True)
        return parent.children


def translated(text: str) -> str:
    """A paragraph's text as reStructuredText."""
    if displayed := DISPLAYED.fullmatch(text):
        return ".. math:: " + " ".join(displayed[1].split())
    text = LISTED.sub(r"\1- ", text)  # list items may begin with either mark
    parts, end = [], 0
    for found in MARKUP.finditer(text):
        parts += [_plain(text[end : found.start()]), _marked(found)]
        end = found.end()
    return "".join((*parts, _plain(text[end:])))


def _plain(text: str) -> str:
    return SPECIAL.sub(r"\\\g<0>", text)


def _marked(found: re.Match[str]) -> str:
    inner = " ".join((found["code"] or found["formula"] or found["paper"]).split())
    if found["paper"]:
        marked = f"`{inner} <https://arxiv.org/abs/{inner.removeprefix('arXiv:')}>`__"
    else:
        marked = f"``{inner}``" if found["code"] else f":math:`{inner}`"
    # Escaped spaces, which are not shown, delimit the markup even if a letter or a hyphen stands beside it.
    return rf"\ {marked}\ "


def process(_app: Any, _what: str, _name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    """Put the translated lines of a docstring in place of its own, paragraph by paragraph."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    lines[:] = "\n\n".join(map(translated, paragraphs)).split("\n")


def signature(_app: Any, _what: str, _name: str, _thing: Any, _options: Any, text: str | None, returned: Any) -> Any:
    """Replace defaults that Sphinx cannot parse by their names: else it would print the raw signature on one line."""
    if text is None:
        return None
    return UNREADABLE.sub(lambda shown: "..." if shown[1] == "factory" else shown[1], text), returned


def skip(_app: Any, _what: str, _name: str, thing: Any, _skipped: bool, _options: Any) -> bool | None:
    """Leave out members that no docstring of the package describes; None leaves the choice to autodoc."""
    text = getattr(thing, "__doc__", None) or ""
    foreign = str(getattr(thing, "__module__", "ortho") or "ortho").split(".")[0] not in (PACKAGE, "builtins")
    return True if foreign or GENERATED.match(text) else None


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("modules", Modules)
    connect: Callable[..., Any] = app.connect
    connect("autodoc-process-docstring", process)
    connect("autodoc-process-signature", signature)
    connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
