"""A Sphinx extension: buttons that open a page's notebook on Binder and in Colab.

Both fetch it from a public repository, whose address is `repository-code` in CITATION.cff: there are no buttons before
it stands there. Binder installs what `binder/` says; Colab, which knows repositories on GitHub only, installs nothing.
"""

from pathlib import Path
from typing import Any

import yaml
from sphinx.application import Sphinx
from sphinx.config import Config

CITED = Path(__file__).resolve().parent.parent / "CITATION.cff"


def options(address: str | None) -> dict[str, Any]:
    """The theme's options for a repository at this address; none without an address."""
    if not address:
        return {}
    buttons = {"notebook_interface": "jupyterlab", "binderhub_url": "https://mybinder.org"}
    if address.startswith("https://github.com/"):
        buttons["colab_url"] = "https://colab.research.google.com"
    return {"repository_url": address, "repository_branch": "main", "launch_buttons": buttons}


def add_buttons(_: Sphinx, config: Config) -> None:
    cited = yaml.safe_load(CITED.read_text(encoding="utf-8"))
    config.html_theme_options |= options(cited.get("repository-code"))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("config-inited", add_buttons)
    return {"parallel_read_safe": True}
