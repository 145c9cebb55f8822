"""The workflows: pinned actions, least rights, no value pasted into a script, and nothing but calls of scripts."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))

BIN = Path(sys.executable).parent

# The commit of each release that runs on Node 24 (the last is a container). Read in November 2026 from the tags and the
# action.yml of the actions' repositories, but for upload-artifact and gh-action-pypi-publish, whose tags of these releases
# were out of reach: ten and more other projects pin the same commit under the same release.
PINNED = {
    "actions/checkout": ("3d3c42e5aac5ba805825da76410c181273ba90b1", "v7.0.1"),
    "actions/upload-artifact": ("043fb46d1a93c77aae656e7c1c64a875d1fc6a0a", "v7.0.1"),
    "actions/download-artifact": ("3e5f45b2cfb9172054b4087a40e8e0b5a5461e7c", "v8.0.1"),
    "actions/upload-pages-artifact": ("fc324d3547104276b827a68afc52ff2a11cc49c9", "v5.0.0"),
    "actions/deploy-pages": ("cd2ce8fcbc39b97be8ca5fce6e763baed58fa128", "v5.0.0"),
    "pypa/gh-action-pypi-publish": ("dc37677b2e1c63e2034f94d8a5b11f265b73ba33", "v1.14.2"),
}
# What may write what: file, job -> rights beyond reading the repository.
WRITES = {
    ("verify.yml", "cells"): {"packages": "read"},
    ("verify.yml", "cell"): {"packages": "write"},
    ("verify.yml", "publish"): {"packages": "write", "id-token": "write"},
    ("verify.yml", "evidence"): {"contents": "write", "pull-requests": "write"},
    ("update.yml", "matrix"): {"contents": "write", "pull-requests": "write"},
    ("pages.yml", "build"): {"packages": "read"},
    ("pages.yml", "publish"): {"pages": "write", "id-token": "write"},
    ("release.yml", "publish"): {"id-token": "write"},
}


def workflow(name):
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def jobs():
    return [
        pytest.param(file.name, name, id=f"{file.stem}-{name}")
        for file in FILES
        for name in workflow(file.name)["jobs"]
    ]


def steps(name, job):
    return workflow(name)["jobs"][job]["steps"]


def test_every_action_is_pinned_by_the_commit_of_its_release():
    found = set()
    for file in FILES:
        for line in file.read_text(encoding="utf-8").splitlines():
            if "uses:" in line:
                match = re.fullmatch(r" +(?:- )?uses: ([\w/-]+)@([0-9a-f]{40}) # (v[\d.]+)", line)
                assert match, line
                assert PINNED[match[1]] == match.groups()[1:]
                found.add(match[1])
    assert found == PINNED.keys()


@pytest.mark.parametrize(("name", "job"), jobs())
def test_a_job_has_the_rights_that_it_needs_and_no_more(name, job):
    assert workflow(name)["permissions"] == {}
    rights = workflow(name)["jobs"][job].get("permissions", {})
    extra = WRITES.get((name, job), {})
    assert {key: value for key, value in rights.items() if (key, value) != ("contents", "read")} == extra
    assert workflow(name)["jobs"][job]["timeout-minutes"] <= 360


@pytest.mark.parametrize(("name", "job"), jobs())
def test_a_step_calls_a_script_and_no_value_is_pasted_into_it(name, job):
    for step in steps(name, job):
        run = step.get("run")
        if run is None:
            continue
        assert "${{" not in run  # a value comes in a variable, which the shell does not read as code
        assert len(run.strip().splitlines()) == 1, run
        assert re.match(r"(make |scripts/ci/|\.venv/bin/(python scripts/|pytest ))", run), run
        for script in re.findall(r"scripts/[\w./-]+", run):
            assert (ROOT / script).is_file(), script
            assert (ROOT / script).stat().st_mode & 0o111 or "python" in run, script


@pytest.mark.parametrize(("name", "job"), jobs())
def test_the_token_is_in_the_steps_that_need_it_alone(name, job):
    for step in steps(name, job):
        if "checkout@" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False
        if any("secrets." in str(value) for value in step.get("env", {}).values()):
            assert re.match(r"scripts/ci/(with-login|open-pr) ", step["run"])
    assert "secrets." not in str({key: value for key, value in workflow(name)["jobs"][job].items() if key != "steps"})


def test_no_event_of_a_fork_starts_what_writes():
    for (name, job), extra in WRITES.items():
        events = workflow(name)[True]  # YAML reads `on` as true
        assert "pull_request_target" not in events
        assert "workflow_run" not in events
        if "write" in extra.values() and "pull_request" in events:
            assert "github.event_name != 'pull_request'" in workflow(name)["jobs"][job]["if"]


@pytest.mark.parametrize(("name", "job"), [("verify.yml", "evidence"), ("update.yml", "matrix")])
def test_only_the_default_branch_proposes(name, job):
    opening = [step for step in steps(name, job) if "open-pr" in step.get("run", "")]
    assert len(opening) == 1
    assert "github.ref_name == github.event.repository.default_branch" in opening[0]["if"]


def test_an_image_is_proven_once_and_pushed_only_after_that():
    runs = [step.get("run", "") for step in steps("verify.yml", "cell")]
    proving = [number for number, run in enumerate(runs) if "cell.py" in run]
    pushing = [number for number, run in enumerate(runs) if "push.py" in run]
    assert len(proving) == len(pushing) == 1
    assert proving < pushing
    assert not any("smoke" in run or "make image" in run for run in runs)
    upload = steps("verify.yml", "cell")[-1]
    assert upload["if"] == "always()"  # of a cell that failed, too


def test_no_job_that_builds_can_get_an_identity_token():
    """What a build or a test runs could sign anything with it."""
    for (name, job), rights in WRITES.items():
        if "id-token" in rights:
            runs = " ".join(step.get("run", "") for step in steps(name, job))
            assert not any(word in runs for word in ("cell.py", "push.py", "make test", "make image", "on-debian"))


def test_the_runners_are_a_list_of_labels():
    assert workflow("verify.yml")["jobs"]["cell"]["runs-on"] == "${{ fromJSON(needs.cells.outputs.runners) }}"


def test_the_debian_job_has_no_engine_of_the_host():
    """GitHub mounts the host's socket into the container of a job; a step that starts the container does not."""
    assert "container" not in workflow("test.yml")["jobs"]["debian"]
    assert steps("test.yml", "debian")[-1]["run"] == "scripts/ci/on-debian make test"


def zizmor(*files):
    command = [BIN / "zizmor", "--offline", "--quiet", "--persona=auditor", *files]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_zizmor_finds_nothing():
    done = zizmor(ROOT / ".github")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("right", "wrong", "rule"),
    [
        ("persist-credentials: false", "persist-credentials: true", "artipacked"),
        ("permissions: {}", "permissions: write-all", "excessive-permissions"),
        ("run: scripts/ci/site", "run: echo ${{ github.head_ref }}", "template-injection"),
        (r"@[0-9a-f]{40} # v[\d.]+", "@v5", "unpinned-uses"),
    ],
)
def test_zizmor_finds_what_is_wrong(tmp_path, right, wrong, rule):
    text, count = re.subn(right, wrong, (FOLDER / "pages.yml").read_text(encoding="utf-8"), count=1)
    assert count == 1
    (tmp_path / "pages.yml").write_text(text)
    done = zizmor(tmp_path / "pages.yml")
    assert done.returncode != 0
    assert f"[{rule}]" in done.stdout


def actionlint(*files):
    program = shutil.which("actionlint", path=f"{BIN}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("no actionlint here: its package downloads it from GitHub (make actionlint)")
    command = [program, "-shellcheck", BIN / "shellcheck", *files]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_actionlint_finds_nothing():
    done = actionlint(*FILES)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("right", "wrong", "rule"),
    [
        (r"runs-on: ubuntu-24\.04", "runs-on: ubuntu-99", "runner-label"),
        ("needs: build", "needs: built", "job-needs"),
        (r"steps\.publish\.outputs", "steps.published.outputs", "expression"),
    ],
)
def test_actionlint_finds_what_is_wrong(tmp_path, right, wrong, rule):
    text, count = re.subn(right, wrong, (FOLDER / "pages.yml").read_text(encoding="utf-8"), count=1)
    assert count == 1
    (tmp_path / "pages.yml").write_text(text)
    done = actionlint(tmp_path / "pages.yml")
    assert done.returncode == 1
    assert f"[{rule}]" in done.stdout


def test_shellcheck_finds_nothing_in_the_scripts():
    scripts = [
        path
        for path in (ROOT / "scripts").rglob("*")
        if path.is_file() and path.read_bytes()[:19] == b"#!/usr/bin/env bash"
    ]
    assert ROOT / "scripts" / "ci" / "prepare-runner" in scripts
    done = subprocess.run(
        [BIN / "shellcheck", "--external-sources", *scripts], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout


def test_a_machine_is_looked_at_before_anything_is_installed_on_it():
    """On a machine of others, `make engine` could replace the engine; prepare-runner ends the job before it would."""
    runs = [step["run"] for step in steps("verify.yml", "cell") if "run" in step]
    assert runs[0] == "scripts/ci/prepare-runner"
    assert [run for run in runs if "make" in run] == ["make .venv/ready"]
    assert not any("install-engine" in run for run in runs)
