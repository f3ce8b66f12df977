"""The pages' own Sphinx extension: numbers, per cent signs, buttons, and a build that loads what the pages need."""

import os
import re
from types import SimpleNamespace

import pytest
import yaml
from docutils import nodes
from docutils.utils import new_document
from pybtex import plugin
from pybtex.backends.plaintext import Backend
from sphinx.domains import Domain
from sphinx_proof.domain import ProofDomain

from tools import extension
from tools.notebooks import ROOT


def test_pages_without_a_number_have_no_numbers_of_figures():
    env = SimpleNamespace(
        toc_secnumbers={"chapter": {"": (7,)}, "page": {}},
        toc_fignumbers={"chapter": {"figure": {"a": (7, 1)}}, "page": {"figure": {"b": (1,)}, "theorem": {"c": (1,)}}},
    )
    extension.drop_numbers(None, env)
    assert env.toc_fignumbers == {"chapter": {"figure": {"a": (7, 1)}}, "page": {"theorem": {"c": (1,)}}}


def test_per_cent_signs_stay_with_their_numbers_and_code_is_as_it_was():
    document = new_document("a page")
    code = [nodes.literal("", "7 % 2"), nodes.math("", "7 % 2"), nodes.raw("", "7 % 2", format="html")]
    document += nodes.paragraph("", "", nodes.Text("7 % and "), nodes.emphasis("", "8"), nodes.Text(" % of it"), *code)
    document += nodes.literal_block("", "7 % 2")
    document += nodes.paragraph("", "in % of all 12.5 %, x % y, 7%")
    document += nodes.paragraph("", "-0.5 (-1 to 2), GPT-2, 2026-11-27, 3-4")
    extension.KeepTogether(document).run()
    found = [text.astext() for text in document.findall(nodes.Text)]
    assert found == [
        "7\xa0% and ",
        "8",
        "\xa0% of it",
        *["7 % 2"] * 4,
        "in % of all 12.5\xa0%, x % y, 7%",
        "−0.5 (−1 to 2), GPT-2, 2026-11-27, 3-4",
    ]


def test_a_page_that_reads_timings_says_of_which_commit_and_date_they_are():
    """Others say nothing."""
    ends = {}
    for name in ("notebooks/16-dynamic-sparsity", "book/results", "book/index", "notebooks/01-the-standard-layer"):
        document = new_document("a page")
        env = SimpleNamespace(docname=name, doc2path=lambda name: ROOT / f"{name}.ipynb")
        extension.date_timings(SimpleNamespace(env=env), document)
        ends[name] = document.astext()
    dated = re.compile(
        r"Times on this page were measured with (commit [0-9a-f]{8} \(\d{4}-\d\d-\d\d\)(, )?)+\. (They|The)"
    )
    assert [bool(dated.match(end)) for end in ends.values()] == [True, True, False, False]
    assert not any([*ends.values()][2:])
    assert extension.differs("0" * 40), "a commit that nobody has"


@pytest.mark.parametrize(
    ("cited", "buttons"),
    [
        ({"title": "A book"}, set()),
        ({"repository-code": "https://github.com/some/book"}, {"binderhub_url", "colab_url"}),
        ({"repository-code": "https://gitlab.com/some/book"}, {"binderhub_url"}),
    ],
)
def test_buttons_lead_to_the_repository_that_is_cited(tmp_path, monkeypatch, cited, buttons):
    """No buttons without a repository; one for Colab only if it is on GitHub."""
    monkeypatch.setattr(extension, "CITED", tmp_path / "CITATION.cff")
    extension.CITED.write_text(yaml.safe_dump(cited))
    default = {"repository_url": "https://github.com/the/default"}
    config = SimpleNamespace(html_theme_options=dict(default))
    extension.add_buttons(None, config)
    options = config.html_theme_options
    assert options.get("launch_buttons", {}).keys() - {"notebook_interface"} == buttons
    assert options["repository_url"] == cited.get("repository-code", default["repository_url"])
    assert options.get("use_edit_page_button", False) == bool(buttons)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("", ["make book", "before"]),
        ("https://a.org/b", ["git clone https://a.org/b ortho\nmake book", "before", "it"]),
    ],
)
def test_pages_say_the_address_of_the_repository_or_nothing(monkeypatch, address, said):
    monkeypatch.setenv("REPOSITORY", address)
    monkeypatch.setattr(extension, "CITED", extension.ROOT / "CITATION.cff")
    document = new_document("a page")
    document += nodes.literal_block("", f"git clone {extension.EXAMPLE} ortho\nmake book")
    document += nodes.paragraph("", "before")
    document += nodes.paragraph("", "", nodes.reference("", "it", refuri=extension.EXAMPLE))
    extension.say_address(None, document)
    assert [child.astext() for child in document.children] == said
    assert [link["refuri"] for link in document.findall(nodes.reference)] == [address] * bool(address)


@pytest.fixture
def app():
    connected = {}
    extensions = {"sphinx_multitoc_numbering": SimpleNamespace(parallel_read_safe=None)}
    return SimpleNamespace(
        connect=connected.__setitem__,
        connected=connected,
        extensions=extensions,
        parallel=1,
        add_post_transform=lambda _: None,
    )


def test_pages_are_read_and_written_by_all_cores(app, monkeypatch):
    monkeypatch.setattr(ProofDomain, "merge_domaindata", Domain.merge_domaindata)
    with pytest.raises(NotImplementedError, match="to be able to do parallel builds"):
        ProofDomain.merge_domaindata(None, [], {})
    assert ProofDomain.initial_data == {}, "nothing of it would be lost"
    extension.setup(app)
    app.connected["builder-inited"](app)
    assert app.parallel == os.cpu_count() and app.extensions["sphinx_multitoc_numbering"].parallel_read_safe
    ProofDomain.merge_domaindata(None, [], {})


def test_citations_need_no_look_at_the_installed_packages(app, monkeypatch):
    monkeypatch.setattr(plugin, "_RUNTIME_PLUGINS", {})
    monkeypatch.setattr(plugin, "entry_points", lambda **_: [])
    with pytest.raises(plugin.PluginNotFound):
        plugin.find_plugin("pybtex.backends", "plaintext")
    extension.setup(app)
    assert plugin.find_plugin("pybtex.backends", "plaintext") is Backend


def test_extensions_of_our_own_are_loaded():
    """The list replaces everything that Jupyter Book loads by itself."""
    sphinx = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["sphinx"]
    assert set(sphinx["local_extensions"]) <= set(sphinx["config"]["extensions"])
