"""The public checks: what they call exists, the versions they run are pinned, and no test is left out."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tools import notebooks

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github" / "workflows").iterdir())
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in FILES}
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z]+):.*## ", MAKEFILE, re.MULTILINE))
VARIABLES = {"EXACT", *re.findall(r"^([A-Z]+) \?=", MAKEFILE, re.MULTILINE)}
TRIGGERS = True  # the key `on`, as YAML 1.1 reads it


def jobs():
    return [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]


def shards():
    return WORKFLOWS["checks.yml"]["jobs"]["test"]["strategy"]["matrix"]["tests"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_actions_are_pinned_to_a_commit_with_its_version_beside_it(path):
    uses = re.findall(r"uses:\s*(.*)", path.read_text())
    assert uses
    assert [line for line in uses if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_an_action_has_one_version():
    lines = {line for path in FILES for line in re.findall(r"uses:\s*(.*)", path.read_text())}
    assert len({line.split("@")[0] for line in lines}) == len(lines)


def test_commands_are_targets_of_the_makefile_with_variables_that_it_knows():
    commands = [c for job in jobs() for step in job["steps"] for c in step.get("run", "").split(" && ") if c]
    assert len(commands) >= 6
    for command in commands:
        words = shlex.split(command)
        if words[:2] == ["cp", "_build/book.pdf"]:
            continue
        settings = [word for word in words if "=" in word]
        assert {setting.split("=")[0] for setting in settings} <= VARIABLES | {"CHROMIUM"}, command
        program, *targets = [word for word in words if word not in settings]
        assert program == "make" and targets and set(targets) <= TARGETS, command


def test_each_test_and_notebook_is_in_one_part():
    found = [path for shard in shards() for pattern in shard.split() for path in ROOT.glob(pattern)]
    run = [file for path in found for file in (path.glob("test_*.py") if path.is_dir() else [path])]
    tests = [path for path in ROOT.glob("tests/**/test_*.py") if path.parent.name != "browser"]
    assert sorted(run) == sorted([*tests, *notebooks.every_notebook()])
    steps = WORKFLOWS["checks.yml"]["jobs"]["test"]["steps"]
    assert steps[-1]["run"] == "make test TESTS='${{ matrix.tests }}'"
    assert re.search(r"^test:.*\nifneq.*\n\t.*pytest.* \$\(TESTS\)$", MAKEFILE, re.MULTILINE)


def test_every_change_is_checked_and_every_night_everything():
    for name in ("book.yml", "checks.yml"):
        triggers = WORKFLOWS[name][TRIGGERS]
        assert {"push", "pull_request"} <= triggers.keys() and "main" in triggers["push"]["branches"]
    nightly = WORKFLOWS["nightly.yml"]
    assert nightly[TRIGGERS]["schedule"][0]["cron"]
    assert nightly["jobs"]["test"]["env"] == {"ORTHO_TESTS": "all"}
    assert [job["steps"][-1]["run"] for job in nightly["jobs"].values()] == ["make test", "make browser"]


def test_jobs_may_only_read_unless_they_publish_and_install_by_hashes():
    for workflow in WORKFLOWS.values():
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in workflow["jobs"].items():
            assert job.get("permissions", {}) == ({"pages": "write", "id-token": "write"} if name == "publish" else {})
            assert (workflow.get("env", {}) | job.get("env", {})).get("EXACT") == 1 or name == "publish"
            checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
            assert all(step["with"]["persist-credentials"] is False for step in checkouts)
