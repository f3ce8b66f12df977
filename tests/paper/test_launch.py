"""Buttons lead to the repository that CITATION.cff names, and there are none before it names one."""

from types import SimpleNamespace

import yaml

from tools import launch


def theme(tmp_path, monkeypatch, cited):
    monkeypatch.setattr(launch, "CITED", tmp_path / "CITATION.cff")
    launch.CITED.write_text(yaml.safe_dump(cited))
    config = SimpleNamespace(html_theme_options={"repository_url": "https://github.com/the/default"})
    launch.add_buttons(None, config)
    return config.html_theme_options


def test_no_buttons_without_an_address(tmp_path, monkeypatch):
    assert "launch_buttons" not in theme(tmp_path, monkeypatch, {"title": "A book"})


def test_binder_for_every_address_and_colab_for_those_it_knows(tmp_path, monkeypatch):
    options = theme(tmp_path, monkeypatch, {"repository-code": "https://github.com/some/book"})
    assert options["repository_url"] == "https://github.com/some/book"
    assert {"binderhub_url", "colab_url"} <= options["launch_buttons"].keys()
    options = theme(tmp_path, monkeypatch, {"repository-code": "https://gitlab.com/some/book"})
    assert "binderhub_url" in options["launch_buttons"]
    assert "colab_url" not in options["launch_buttons"]
