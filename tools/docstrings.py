r"""A Sphinx extension for the pages about the package: what its docstrings say, module by module.

The directive `modules` takes patterns, one a line, and describes each module that one of them names; the name of a
package stands for its own file. In a docstring `name` is code, $x$ a formula, $$x$$ one that is a paragraph,
arXiv:2009.14794 a paper, and no other character is markup; that becomes the reStructuredText that autodoc reads. What
a class has from Python or PyTorch alone, and the fields of named tuples, which their class describes, are left out.
Functions and classes that are defaults are named.
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

# In the order in which they are looked for: a formula may hold a backtick no more than code holds a formula.
MARKUP = re.compile(r"`(?P<code>[^`]+)`|\$(?P<formula>[^$]+)\$|(?P<paper>arXiv:\d{4}\.\d{4,5})")
DISPLAYED = re.compile(r"\s*\$\$([^$]+)\$\$\s*")
SPECIAL = re.compile(r"[\\*|_`]")
LISTED = re.compile(r"^(\s*)\* ", re.MULTILINE)
GENERATED = re.compile(r"Alias for field number \d+$")
# Values that Python shows in no readable form: <function softmax>, <class 'torch.nn.Linear'>; <factory> of a dataclass.
UNREADABLE = re.compile(r"<(?:(?:built-in )?function |class ')?(?:\w+\.)*(\w+)'?(?: at 0x[0-9a-f]+)?>")


def public_modules() -> list[str]:
    """All modules without a leading underscore, in the order of their names."""
    files = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / PACKAGE).rglob("*.py"))
    names = sorted(".".join(path.parts).removesuffix(".__init__") for path in files)
    return [name for name in names if "._" not in name]


def chosen(patterns: Iterable[str]) -> list[str]:
    """The public modules that patterns name, pattern by pattern. Raises ValueError for one that names none."""
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
    text = LISTED.sub(r"\1- ", text)  # a list's marker, the other one of the two that mean the same
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
    # An escaped space ends the markup where a letter or a hyphen stands beside it, and is not shown.
    return rf"\ {marked}\ "


def process(_app: Any, _what: str, _name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    """Put the translated lines of a docstring in place of its own, paragraph by paragraph."""
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    lines[:] = "\n\n".join(map(translated, paragraphs)).split("\n")


def signature(_app: Any, _what: str, _name: str, _thing: Any, _options: Any, text: str | None, returned: Any) -> Any:
    """Name what a default shows and Sphinx cannot read: it would print the signature as it stands, on one line."""
    if text is None:
        return None
    return UNREADABLE.sub(lambda shown: "..." if shown[1] == "factory" else shown[1], text), returned


def skip(_app: Any, _what: str, _name: str, thing: Any, _skipped: bool, _options: Any) -> bool | None:
    """Leave out what no docstring of the package describes; None leaves the choice to autodoc."""
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
