"""pyproject.toml, constraints.txt, requirements/, environment.yml and the Makefile describe one environment."""

import importlib.metadata
import importlib.resources
import json
import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import ortho
from tools.lock import pinned

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [Requirement(text) for texts in [PROJECT["dependencies"], *EXTRAS.values()] for text in texts]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]


def pins() -> dict[str, Version]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    assert all(len(pair) == 2 for pair in pairs), "constraints.txt holds exact versions only"
    assert len({canonicalize_name(name) for name, _ in pairs}) == len(pairs), "a package is pinned once"
    return {canonicalize_name(name): Version(version) for name, version in pairs}


@pytest.mark.parametrize("requirement", [r for r in REQUIREMENTS if r.name != PROJECT["name"]], ids=str)
def test_each_requirement_is_pinned_within_its_range(requirement):
    assert pins()[canonicalize_name(requirement.name)] in requirement.specifier


def test_constraints_cover_all_that_is_installed_with_the_extras():
    """Follow the installed packages' own requirements to the end, so that no version floats."""
    pinned, waiting, seen = pins(), [(canonicalize_name(r.name), frozenset(r.extras)) for r in REQUIREMENTS], set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen or name == PROJECT["name"]:
            continue
        seen.add((name, extras))
        assert name in pinned, f"{name} is installed with the extras and stands in no line of constraints.txt"
        for text in importlib.metadata.requires(name) or []:
            needed = Requirement(text)
            wanted = needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras | {""})
            if wanted:
                waiting.append((canonicalize_name(needed.name), frozenset(needed.extras)))
    assert {name for name, _ in seen} >= set(pinned) - {"appnope"}, "a pinned package is needed by nothing"


def test_no_pin_is_of_one_build_only():
    assert [name for name, version in pins().items() if version.local] == []


def test_conda_and_make_install_the_same():
    pip = next(entry["pip"] for entry in CONDA if isinstance(entry, dict))
    assert "-c constraints.txt" in pip
    editable = next(re.fullmatch(r"-e \.\[(.*)\]", line) for line in pip if line.startswith("-e"))
    made = re.search(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert editable[1] == made[1]
    assert set(made[1].split(",")) == set(EXTRAS)
    assert {re.split("[=<>]", entry)[0] for entry in CONDA if isinstance(entry, str)} == {"python", "pip"}


@pytest.mark.parametrize("name", ["exact.txt", "torch.txt"])
def test_an_exact_installation_takes_files_by_their_hashes_alone(name):
    requirements = pinned((ROOT / "requirements" / name).read_text())
    assert requirements and all(re.search(r"--hash=sha256:[0-9a-f]{64}$", lines) for lines in requirements.values())
    assert "extra-index-url" not in (ROOT / "requirements" / name).read_text()


def test_an_exact_installation_has_the_versions_of_the_constraints():
    exact, torch = (pinned((ROOT / "requirements" / name).read_text()) for name in ("exact.txt", "torch.txt"))
    assert torch.keys() == {"torch"} and not exact.keys() & torch.keys()
    versions = {name: re.search(r"==([^\s;]+)", lines)[1] for name, lines in (exact | torch).items()}
    assert {name: Version(version) for name, version in versions.items()} == pins()


def test_binder_makes_the_exact_installation():
    script = ROOT / "binder" / "postBuild"
    assert script.read_text().splitlines()[-1] == "exec make exact PY=python" and os.access(script, os.X_OK)
    python = (ROOT / "binder" / "runtime.txt").read_text().strip().removeprefix("python-")
    assert f"python={python}" in CONDA


def test_python_versions_agree():
    oldest = PROJECT["requires-python"].removeprefix(">=")
    conda = next(re.fullmatch(r"python=(.*)", entry)[1] for entry in CONDA if str(entry).startswith("python"))
    assert conda in SpecifierSet(PROJECT["requires-python"])
    assert f"({oldest.replace('.', ', ')})" in (ROOT / "Makefile").read_text()
    tools = PYPROJECT["tool"]
    assert tools["mypy"]["python_version"] == oldest
    assert tools["ruff"]["target-version"] == "py" + oldest.replace(".", "")


def test_one_version():
    assert PROJECT["dynamic"] == ["version"]
    assert importlib.metadata.version(PROJECT["name"]) == ortho.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == ortho.__version__
    assert f"\n## {ortho.__version__}, " in (ROOT / "CHANGELOG.md").read_text()


def test_one_description():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    archived = json.loads((ROOT / ".zenodo.json").read_text())
    assert archived["title"] == cited["title"] == yaml.safe_load((ROOT / "_config.yml").read_text())["title"]
    assert archived["creators"] == cited["authors"]
    assert (archived["description"], archived["keywords"]) == (cited["abstract"].strip(), cited["keywords"])
    assert PROJECT["license"].split(" AND ") == cited["license"]
    assert archived["license"] == cited["license"][0], "there is place for one"


def test_the_package_says_that_it_is_typed():
    """Type checkers find `py.typed` (PEP 561) both in the source tree and in an installed package."""
    assert importlib.resources.files("ortho").joinpath("py.typed").is_file()
    assert PYPROJECT["tool"]["setuptools"]["package-data"]["ortho"] == ["py.typed"]
