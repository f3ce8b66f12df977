"""A Sphinx extension for all pages: numbers of figures, per cent signs, buttons, and a quicker build.

* Figures are numbered by chapter ("Fig. 7.1"). On pages without a number they are not numbered.
* A number and the per cent sign after it stay on one line, in prose and tables, not in code.
* A page that reads timings ends with their commits and dates, and says whether they are older than the code.
* A hyphen before a number is shown as a minus sign, likewise, and an inserted name between backticks as code.
* Proofs are folded, as the evidence of claims is.
* The repository's address is the environment variable REPOSITORY, or else `repository-code` in CITATION.cff. With it,
  buttons open a page's notebook on Binder and in Colab, lead to the repository and suggest an edit, and pages that have
  the address `https://repository.example` say the true one. Without it there are no buttons, and lines and paragraphs
  with the example are left out. Binder installs what `binder/` says. Colab only supports GitHub and installs nothing.
* The book is built on all cores; its pages are the same as on one.
"""

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch.utils.flop_counter  # noqa: F401 - before autodoc, which pretends TYPE_CHECKING: that breaks its import
import yaml
from docutils import nodes
from pybtex.backends.plaintext import Backend
from pybtex.plugin import register_plugin
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx_proof.domain import ProofDomain
from sphinx_proof.nodes import proof_node

from paper.claims.gathered import verdicts
from paper.experiments import EXPERIMENTS, load
from tools.notebooks import ROOT, SHOW_VERDICTS

CITED = ROOT / "CITATION.cff"
APART = re.compile(r"(?:(?<=\d)|^) (?=%)")  # `^`: after a number that the page has inserted
NAME = re.compile(r"`([^`]+)`")
MINUS = re.compile(r"(?<![\w.,:/–-])-(?=\d)")
UNTIMED = ("index", "14-what-is-new", "zh")  # pages that show verdicts and findings, but no time
EXAMPLE = "https://repository.example"


def drop_numbers(_: Any, env: Any) -> None:
    """Remove figure numbers from pages that have no number themselves: Sphinx would count on from page to page."""
    for page, kinds in env.toc_fignumbers.items():
        if not env.toc_secnumbers.get(page):
            kinds.pop("figure", None)


class KeepTogether(SphinxPostTransform):
    """Make spaces before per cent signs non-breaking, hyphens before numbers minus signs, and inserted names between
    backticks code; runs last, when every number and name has been inserted."""

    default_priority = 900

    def run(self, **_: Any) -> None:
        for text in list(self.document.findall(nodes.Text)):
            if not isinstance(text.parent, nodes.literal | nodes.FixedTextElement | nodes.math | nodes.raw):
                kept = MINUS.sub("\N{MINUS SIGN}", APART.sub("\N{NO-BREAK SPACE}", text))
                if name := NAME.fullmatch(text):
                    text.parent.replace(text, nodes.literal(name[1], name[1]))
                elif kept != text:
                    text.parent.replace(text, nodes.Text(kept))


def open_fold(page: Any, node: proof_node) -> None:
    """Fold a proof: whoever follows the story reads on past it. Its first word becomes the name of the fold."""
    first = next(iter(node.findall(nodes.Text)))
    first.parent.replace(first, nodes.Text(first.removeprefix("Proof. ")))
    page.body.append('<details class="evidence"><summary>Proof</summary>')


def close_fold(page: Any, _: proof_node) -> None:
    """End the fold of a proof."""
    page.body.append("</details>")


@cache
def timings() -> dict[str, set[tuple[str, str]]]:
    """The experiments that are timings, each with the dates and commits of its records."""
    found: dict[str, set[tuple[str, str]]] = {name: set() for name, one in EXPERIMENTS.items() if one.is_timing}
    for name, origins in found.items():
        for record in load(name):
            origin = record["provenance"]
            origins.add((origin["date_utc"][:10], origin["commit"] or "unknown"))
    return found


@cache
def differs(commit: str) -> bool:
    """Whether the library is another than that of a commit, or nobody can say."""
    command = ["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", ":/ortho"]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode != 0


@cache
def judged_by() -> str:
    """The experiments whose records the verdicts of all chapters rest on."""
    return json.dumps([row["records"] for row in verdicts().values()])


def date_timings(app: Any, document: nodes.document) -> None:
    """End a page that reads timings with their commits and dates, and with whether they are older than the code."""
    path = Path(app.env.doc2path(app.env.docname))
    if path.suffix != ".ipynb" or path.stem in UNTIMED:
        return
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    if "paper.findings" in text:
        text += (ROOT / "paper" / "findings.py").read_text(encoding="utf-8")
    if path in SHOW_VERDICTS:
        text += judged_by()
    found = sorted({one for name, origins in timings().items() if f'"{name}"' in text for one in origins})
    if found:
        of = ", ".join(f"commit {commit[:8]} ({date})" for date, commit in found)
        age = "; the library has changed since" if any(differs(commit) for _, commit in found) else ""
        again = "python -m paper experiments NAME --case LABEL --compare"
        words = nodes.paragraph("", f"Measured with {of}{age}. To measure one again: ")
        words += nodes.literal(again, again)
        summary = '<details class="evidence"><summary>When the times on this page were measured</summary>'
        opening, closing = (nodes.raw("", html, format="html") for html in (summary, "</details>"))
        next(iter(document.findall(nodes.section)), document).extend([opening, words, closing])


def repository() -> str:
    """The repository's address, empty if nobody has said it."""
    cited = yaml.safe_load(CITED.read_text(encoding="utf-8"))
    return str(os.environ.get("REPOSITORY") or cited.get("repository-code") or "").rstrip("/")


def add_buttons(_: Any, config: Any) -> None:
    """Give the theme its options for the repository, if there is one."""
    if address := repository():
        buttons = {"notebook_interface": "jupyterlab", "binderhub_url": "https://mybinder.org"}
        if address.startswith("https://github.com/"):
            buttons["colab_url"] = "https://colab.research.google.com"
        place = {"repository_url": address, "repository_branch": "main", "path_to_docs": ""}
        links = {"use_repository_button": True, "use_edit_page_button": True}
        config.html_theme_options |= place | links | {"launch_buttons": buttons}


def say_address(_: Any, document: nodes.document) -> None:
    """Put the repository's address where a page has that of the example, or leave out what would need it."""
    address = repository()
    for block in [one for one in document.findall(nodes.literal_block) if EXAMPLE in one.astext()]:
        lines = [line for line in block.astext().splitlines() if address or EXAMPLE not in line]
        block.rawsource = "\n".join(lines).replace(EXAMPLE, address)
        block.children = [nodes.Text(block.rawsource)]
    for link in [one for one in document.findall(nodes.reference) if one.get("refuri") == EXAMPLE]:
        link["refuri"] = address
        if not address:
            link.parent.parent.remove(link.parent)


def declare(app: Any) -> None:
    """Declare for a Jupyter Book extension, which does not say so itself, that it does nothing while pages are read."""
    app.extensions["sphinx_multitoc_numbering"].parallel_read_safe = True


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("env-check-consistency", drop_numbers)  # the first event after numbers are assigned
    app.add_post_transform(KeepTogether)
    app.add_node(proof_node, override=True, html=(open_fold, close_fold))
    app.connect("config-inited", add_buttons)
    app.connect("doctree-read", date_timings)
    app.connect("doctree-read", say_address)
    app.connect("builder-inited", declare)
    app.parallel = os.cpu_count() or 1  # as `sphinx-build -j` sets it; Jupyter Book has no such option
    # This domain keeps its proofs in the environment, which sphinx_proof merges. Sphinx also asks for its data: none.
    ProofDomain.merge_domaindata = lambda *_: None
    # Each citation asks for this plugin by name; pybtex would search all installed packages each time.
    register_plugin("pybtex.backends", "plaintext", Backend, force=True)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
