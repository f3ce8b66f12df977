"""`make env` says in one line what is wrong, and installs once."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A stand-in for the interpreter: it answers the Makefile's questions and makes an environment that contains itself.
STAND_IN = """#!/bin/sh
case "$*" in
    -V) echo 'Python 3.9.1' ;;
    *version_info*) {version} ;;
    *ensurepip*) {venv} ;;
    *'venv --clear .venv') {make} && mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *'pip --version') ;;
    *'pip install'*) echo "$*" >> log; {pip} ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(folder, *words):
    """Run make as if from a shell: these tests may themselves run under a make, which passes its own options on."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def set_up(folder, *words, **answers):
    python = folder / "python"
    python.write_text(STAND_IN.format(**{"version": "true", "venv": "true", "make": "true", "pip": "true"} | answers))
    python.chmod(0o755)
    return make(folder, "env", f"PYTHON={python}", *words)


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        ("version", "Python 3.9.1 is too old: Python 3.11 or newer is needed; name one: make PYTHON="),
        ("venv", "cannot make environments: install its venv module"),
        ("make", "could not make .venv: check that this folder can be written to"),
        ("pip", "The installation failed, for the reason above: check the network"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(checkout, answer, advice):
    result = set_up(checkout, **{answer: "false"})
    assert result.returncode != 0
    assert advice in result.stdout.splitlines()[-1]
    assert not (checkout / ".venv" / ".ready").exists()


def test_no_python_at_all(checkout):
    result = make(checkout, "env", "PYTHON=no-such-python")
    assert result.returncode != 0
    assert result.stdout.startswith("There is no no-such-python: install Python 3.11 or newer")


def test_set_up_once_and_again_when_the_requirements_change(checkout):
    def installations():
        return len((checkout / "log").read_text().splitlines())

    assert set_up(checkout).returncode == 0
    assert set_up(checkout).returncode == 0
    assert installations() == 1
    later = (checkout / ".venv" / ".ready").stat().st_mtime + 10
    os.utime(checkout / "constraints.txt", (later, later))
    assert set_up(checkout).returncode == 0
    assert installations() == 2


def test_an_environment_of_ones_own_is_left_alone(checkout):
    result = make(checkout, "-n", "test", "PY=python")
    commands = [line.partition("python ")[2] for line in result.stdout.splitlines()]
    assert [command.split()[:2] for command in commands] == [["-m", "pytest"]] * 2


def test_an_exact_installation_is_by_hashes_and_resolves_nothing(checkout):
    assert set_up(checkout, "EXACT=1").returncode == 0
    torch, others, package = (checkout / "log").read_text().splitlines()
    assert torch.endswith("--no-deps --require-hashes -r requirements/torch.txt")
    assert others.endswith("--no-deps --require-hashes -r requirements/exact.txt")
    assert package.endswith("--no-deps --no-build-isolation -e .")
    assert set_up(checkout, "EXACT=1", pip="false").returncode == 0, "once is enough"
