"""What makes the build quicker does so, and loads what the pages need."""

import os
from types import SimpleNamespace

import pytest
import yaml
from pybtex import plugin
from pybtex.backends.plaintext import Backend
from sphinx.domains import Domain
from sphinx_proof.domain import ProofDomain

from tools import quicker
from tools.notebooks import ROOT


@pytest.fixture
def app():
    connected = {}
    silent = SimpleNamespace(parallel_read_safe=None)
    extensions = {"sphinx_multitoc_numbering": silent}
    return SimpleNamespace(connect=connected.__setitem__, connected=connected, extensions=extensions, parallel=1)


def test_pages_are_read_and_written_by_all_cores(app, monkeypatch):
    monkeypatch.setattr(ProofDomain, "merge_domaindata", Domain.merge_domaindata)
    with pytest.raises(NotImplementedError, match="to be able to do parallel builds"):
        ProofDomain.merge_domaindata(None, [], {})
    assert ProofDomain.initial_data == {}, "nothing of it would be lost"
    quicker.setup(app)
    app.connected["builder-inited"](app)
    assert app.parallel == os.cpu_count() and app.extensions["sphinx_multitoc_numbering"].parallel_read_safe
    ProofDomain.merge_domaindata(None, [], {})


def test_citations_need_no_look_at_the_installed_packages(app, monkeypatch):
    monkeypatch.setattr(plugin, "_RUNTIME_PLUGINS", {})
    monkeypatch.setattr(plugin, "entry_points", lambda **_: [])
    with pytest.raises(plugin.PluginNotFound):
        plugin.find_plugin("pybtex.backends", "plaintext")
    quicker.setup(app)
    assert plugin.find_plugin("pybtex.backends", "plaintext") is Backend


def test_extensions_of_our_own_are_loaded():
    """The list takes the place of all that Jupyter Book loads by itself."""
    sphinx = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["sphinx"]
    assert set(sphinx["local_extensions"]) <= set(sphinx["config"]["extensions"])
