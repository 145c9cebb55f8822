"""scripts/ci: what a workflow runs, run on this machine."""

import base64
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from index_server import Index, wheel

from envbuild.evidence.records import Evidence, as_json, content_id, record_evidence
from envbuild.lock.files import read_lock

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "ci"
LOCK = min((ROOT / "matrices" / "locks").glob("*-apex*-sm90-fc9f6c2f-*"))
NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture
def github(tmp_path):
    """Files that a runner gives to a step, and the variables that name them."""

    class Github:
        outputs_file = tmp_path / "outputs"
        summary_file = tmp_path / "summary.md"
        env = {"GITHUB_OUTPUT": str(outputs_file), "GITHUB_STEP_SUMMARY": str(summary_file)}

        def outputs(self):
            return dict(line.split("=", 1) for line in self.outputs_file.read_text().splitlines())

        def summary(self):
            return self.summary_file.read_text()

    return Github()


def call(script, *words, **environment):
    command = [sys.executable, str(SCRIPTS / script)] if str(script).endswith(".py") else [str(SCRIPTS / script)]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([*command, *words], capture_output=True, text=True, env=env, check=False, timeout=300)


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgSign=false"]
    done = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A plain repository with a record and nothing else, and the bare one that it was cloned from."""
    bare, folder = tmp_path / "origin.git", tmp_path / "clone"
    subprocess.run(["git", "init", "-q", "--bare", "--initial-branch=main", bare], check=True)
    subprocess.run(["git", "clone", "-q", bare, folder], check=True, capture_output=True)
    (folder / "matrices" / "evidence").mkdir(parents=True)
    (folder / "matrices" / "evidence" / "README").write_text("records\n")
    git(folder, "switch", "-q", "--create", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    git(folder, "push", "-q", "origin", "main")
    return folder


# -- choose.py --------------------------------------------------------------------------------------------------------


def test_choosing_gives_the_outputs_of_a_step(github, tmp_path):
    done = call(
        "choose.py", "--out", str(tmp_path / "cells.json"), "--shard", "1/2", "--limit", "3", "--flags", "--cuda '>=13'",
        CHOOSE_RUNNERS='["self-hosted", "gpu", "h100"]', ENVBUILD_REGISTRY="", **github.env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outputs = github.outputs()
    matrix = json.loads(outputs["matrix"])
    assert matrix == json.loads((tmp_path / "cells.json").read_text())
    assert int(outputs["count"]) == len(matrix["include"]) == 3
    assert json.loads(outputs["runners"]) == ["self-hosted", "gpu", "h100"]
    assert all(cell["id"] in github.summary() for cell in matrix["include"])


@pytest.mark.parametrize("runners", ["[]", '["a b"]', '{"group": "x"}', "[1]", "a;b", '["${{ x }}"]', '["a"'])
def test_labels_that_are_none(github, tmp_path, runners):
    done = call("choose.py", "--out", str(tmp_path / "c"), "--runners", runners, **github.env)
    assert done.returncode == 1
    assert "is no list of labels" in done.stderr
    assert not github.outputs_file.exists()


def test_a_choice_that_fails_is_in_the_summary(github, tmp_path):
    done = call("choose.py", "--out", str(tmp_path / "c"), "--flags", "--cuda 99", ENVBUILD_REGISTRY="", **github.env)
    assert done.returncode == 2
    assert "no release of cuda matches '99'" in github.summary()


# -- cell.py ----------------------------------------------------------------------------------------------------------


def cell(out, flags, *more, **environment):
    return call("cell.py", "--id", "a-cell", "--args", flags, "--out", str(out), *more, **environment)


def test_a_cell_that_fails_leaves_a_result_its_log_and_a_summary(github, tmp_path):
    out = tmp_path / "result"
    done = cell(out, "--cuda 12.6 --torch 2.99", ENVBUILD_CACHE_DIR=str(tmp_path / "cache"), **github.env)
    assert done.returncode == 2
    result = json.loads((out / "result.json").read_text())
    assert (result["ended"], result["exit_code"], result["evidence"]) == ("failed", 2, [])
    assert "no release of torch matches '2.99'" in result["error"]["what"]
    assert "2.99" in (out / "log.txt").read_text()
    assert any("2.99" in line for line in result["last_lines"])
    assert "**failed**, exit code 2" in github.summary()
    assert "The last lines" in github.summary()


@pytest.fixture
def silent_engine():
    """An engine that takes every connection and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def accept():
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        for each in held:
            each.close()


def test_a_cell_that_takes_too_long_is_ended_and_leaves_the_same(github, tmp_path, silent_engine):
    out = tmp_path / "result"
    environment = {"DOCKER_HOST": silent_engine, "ENVBUILD_CACHE_DIR": str(tmp_path / "cache"), **github.env}
    done = cell(out, "--cuda cpu", "--minutes", "0.08", **environment)
    result = json.loads((out / "result.json").read_text())
    assert (done.returncode, result["ended"], result["exit_code"]) == (5, "out of time", 5)
    assert "stopped after 0.08 minutes" in (out / "log.txt").read_text()
    assert "out of time" in github.summary()


def test_a_cell_that_the_runner_ends_leaves_the_same(github, tmp_path, silent_engine):
    out = tmp_path / "result"
    env = os.environ | {"PYTHONPATH": str(ROOT), "DOCKER_HOST": silent_engine} | github.env
    env |= {"ENVBUILD_CACHE_DIR": str(tmp_path / "cache")}
    words = ["--id", "a-cell", "--args", "--cuda cpu", "--out", str(out)]
    with subprocess.Popen([sys.executable, SCRIPTS / "cell.py", *words], env=env, stderr=subprocess.PIPE) as process:
        while not (out / "log.txt").exists() or "cell cpu-" not in (out / "log.txt").read_text():
            time.sleep(0.05)
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=100)
    assert process.returncode == 130
    assert json.loads((out / "result.json").read_text())["ended"] == "interrupted"


def test_the_lock_of_a_record_comes_along_though_an_earlier_run_made_it(tmp_path, monkeypatch):
    """Else a record of a machine that keeps its cache would be of a lock that nobody else has."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path / "cache"))
    locks = tmp_path / "cache" / "locks"
    for name in ("used", "older", "made", "made-incomplete"):
        shutil.copytree(LOCK, locks / name)
        age = 0 if name.startswith("made") else 3600
        os.utime(locks / name / "lock.json", (time.time() - age,) * 2)
    (tmp_path / "out").mkdir()
    kept = importlib.import_module("cell").keep_locks(
        time.time() - 60, {"lock": {"folder": str(locks / "used")}}, tmp_path / "out"
    )
    assert kept == ["made", "used"]
    assert sorted(path.name for path in (tmp_path / "out" / "locks").iterdir()) == ["made", "used"]


def test_cells_that_share_an_engine_have_separate_tags(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    tag_of = importlib.import_module("cell").tag_of
    tags = {tag_of(flags) for flags in ("--cuda 13.0", "--cuda 12.6", "--stack 'a b' --cuda 13.0")}
    assert len(tags) == 3
    assert all(re.fullmatch(r"envbuild-cell:[0-9a-f]{16}", tag) for tag in tags)


def test_what_a_cell_prints_is_no_command_to_the_runner(tmp_path):
    done = cell(tmp_path / "result", "--cuda ::add-path::/tmp", GITHUB_ACTIONS="true")
    lines = done.stdout.splitlines()
    (word,) = [line.removeprefix("::stop-commands::") for line in lines if line.startswith("::stop-commands::")]
    assert len(word) == 32
    assert lines[-1] == f"::{word}::"
    assert "::add-path::" in done.stderr


# -- collect.py -------------------------------------------------------------------------------------------------------


def make_record(folder, **changes):
    source = json.loads(max((ROOT / "matrices" / "evidence").glob("*.json")).read_text())
    fields = source | {"date": NOW, "cell_id": "a-cell", "keyword": "", "adopted": {}} | changes
    fields["target"] = {"kind": "image", "digest": "sha256:" + "ab" * 32}
    evidence = Evidence.model_validate(fields)
    return record_evidence(evidence.model_copy(update={"id": content_id(as_json(evidence))}), folder)


@pytest.fixture
def results(tmp_path):
    (tmp_path / "results" / "one" / "evidence").mkdir(parents=True)
    return tmp_path / "results"


@pytest.fixture
def collect(tmp_path, repository, results, github):
    def run(*ids, branch="evidence/1"):
        cells = json.dumps({"include": [{"id": each, "args": "", "stack": ""} for each in ids or ("a-cell",)]})
        words = ["--results", str(results), "--cells", cells, "--branch", branch, "--body", str(tmp_path / "body.md")]
        return call("collect.py", *words, "--repository", str(repository), **github.env)

    return run


def changed(repository):
    return git(repository, "diff", "--name-status", "main", "HEAD").splitlines()


def test_records_and_locks_become_a_commit_on_a_branch(collect, repository, results, github, tmp_path):
    passed = make_record(results / "one" / "evidence", verdict="passed")
    failed = make_record(results / "two" / "evidence", verdict="failed", reason="a kernel | `is` slow")
    lock = read_lock(LOCK).lock
    shutil.copytree(LOCK, results / "two" / "locks" / LOCK.name)
    result = {
        "id": "a-cell",
        "stack": "",
        "ended": "failed",
        "seconds": 90,
        "error": {"what": "a | `b` <img src=x> @all"},
    }
    (results / "two" / "result.json").write_text(json.dumps(result))
    done = collect("a-cell", lock.as_cell.id, "without-result")
    assert done.returncode == 0, done.stderr
    assert git(repository, "branch", "--show-current") == github.outputs()["branch"] == "evidence/1"
    assert github.outputs()["records"] == "2"
    expected = [f"A\tmatrices/evidence/{path.name}" for path in (passed, failed)]
    expected += [f"A\tmatrices/locks/{LOCK.name}/{path.name}" for path in LOCK.iterdir()]
    assert sorted(changed(repository)) == sorted(expected)
    assert (repository / "matrices" / "evidence" / passed.name).read_bytes() == passed.read_bytes()
    assert git(repository, "log", "-1", "--format=%s") == "Evidence of 2 runs (1 passed), 1 new locks"
    body = (tmp_path / "body.md").read_text()
    assert "1 jobs ended before they left one" in body
    for markup in ("<img", "`b`", "@all"):  # of what the cell's machine wrote
        assert markup not in body
    assert body in github.summary()


def test_the_result_of_the_only_cell_may_have_no_folder(collect, repository, results):
    """One artifact is unpacked without a folder of its name."""
    record = make_record(results / "evidence")
    (results / "one" / "evidence").rmdir()
    (results / "one").rmdir()
    result = {"id": "a-cell", "stack": "", "ended": "passed", "seconds": 90, "error": None}
    (results / "result.json").write_text(json.dumps(result))
    (results / "logs").mkdir()
    done = collect()
    assert done.returncode == 0, done.stderr
    assert changed(repository) == [f"A\tmatrices/evidence/{record.name}"]
    assert "no result" not in done.stderr


def test_a_committed_lock_is_not_replaced_and_the_difference_is_named(collect, repository, results):
    lock = read_lock(LOCK).lock
    shutil.copytree(LOCK, results / "one" / "locks" / LOCK.name)
    shutil.copytree(LOCK, repository / "matrices" / "locks" / LOCK.name)
    assert collect(lock.as_cell.id).returncode == 0  # the same one
    (repository / "matrices" / "locks" / LOCK.name / "lock.json").write_text("{}")
    done = collect(lock.as_cell.id)
    assert done.returncode == 4
    assert "another lock of these inputs is committed" in done.stderr
    assert changed(repository) == []


def test_nothing_new_makes_no_branch(collect, repository, github):
    done = collect()
    assert done.returncode == 0
    assert github.outputs()["branch"] == ""
    assert git(repository, "branch", "--show-current") == "main"


def edit(path):
    path.write_text(path.read_text().replace('"passed"', '"failed"', 1))


def link(path):
    secret = path.parents[3] / path.name
    path.rename(secret)
    path.symlink_to(secret)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def rename(path):
    path.rename(path.with_name("--upload-pack=x.json"))


def deep(path):
    path.write_text('{"a":' * 100_000)


@pytest.mark.parametrize("damage", [edit, link, pipe, rename, deep])
def test_a_record_that_is_not_as_it_was_written_is_refused(collect, repository, results, github, damage):
    damage(make_record(results / "one" / "evidence"))
    good = make_record(results / "two" / "evidence", seed=77)
    done = collect()
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
    assert changed(repository) == [f"A\tmatrices/evidence/{good.name}"]
    assert "refused" in github.summary()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cell_id": "another-cell"}, "of a cell that this run did not choose"),
        ({"date": NOW - timedelta(days=9)}, "its date is not in the time of this run"),
        ({"date": NOW + timedelta(days=1)}, "its date is not in the time of this run"),
        ({"keyword": "te"}, "not of a whole run"),
        ({"adopted": {"torch": "2.8.0"}}, "not of a whole run"),
    ],
)
def test_a_record_that_is_not_of_this_run_is_refused(collect, repository, results, changes, why):
    make_record(results / "one" / "evidence", **changes)
    done = collect()
    assert (done.returncode, changed(repository)) == (4, [])
    assert why in done.stderr


def test_a_record_is_never_replaced(collect, repository, results):
    path = make_record(results / "one" / "evidence")
    (repository / "matrices" / "evidence" / path.name).write_text("the one that is there\n")
    assert collect().returncode == 4
    assert (repository / "matrices" / "evidence" / path.name).read_text() == "the one that is there\n"


@pytest.mark.parametrize("name", ["extra.sh", "pylock.env.toml"])
def test_a_lock_with_another_file_or_other_bytes_is_refused(collect, repository, results, name):
    place = results / "one" / "locks" / LOCK.name
    shutil.copytree(LOCK, place)
    (place / name).write_text("#")
    assert collect(read_lock(LOCK).lock.as_cell.id).returncode == 4
    assert changed(repository) == []


@pytest.mark.parametrize("branch", ["main", "-x/y", "a/../b", "a/b c", "refs/heads/a/b", "a/b.lock"])
def test_a_branch_of_another_form_is_refused(collect, repository, results, branch):
    make_record(results / "one" / "evidence")
    assert collect(branch=branch).returncode != 0
    assert git(repository, "branch", "--show-current") == "main"


# -- open-pr, check-records -------------------------------------------------------------------------------------------


@pytest.fixture
def gh(tmp_path):
    """A `gh` that writes down how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "gh").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >"{tmp_path}/gh.txt"\n')
    (folder / "gh").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "GH_TOKEN": "s3cret-t0ken"}


def open_pr(repository, *words, **environment):
    env = os.environ | environment
    command = [SCRIPTS / "open-pr", *words]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, env=env, check=False, timeout=60)


def test_a_branch_is_pushed_and_its_pull_request_opened(repository, tmp_path, gh):
    git(repository, "switch", "-q", "--create", "evidence/7")
    git(repository, "commit", "-q", "--allow-empty", "-m", "more")
    done = open_pr(repository, "evidence/7", "A `title` $(x)", "body.md", DRAFT="true", **gh)
    assert done.returncode == 0, done.stderr
    assert git(tmp_path / "origin.git", "log", "-1", "--format=%s", "evidence/7") == "more"
    given = (tmp_path / "gh.txt").read_text().splitlines()
    assert given[:2] == ["pr", "create"]
    assert given[given.index("--base") + 1] == "main"
    assert given[given.index("--title") + 1] == "A `title` $(x)"
    assert given[-1] == "--draft"
    assert "s3cret" not in done.stdout + done.stderr + "".join(given)
    assert "s3cret" not in (repository / ".git" / "config").read_text()


def test_a_branch_that_is_there_is_not_overwritten(repository, tmp_path, gh):
    git(repository, "switch", "-q", "--create", "evidence/7")
    git(repository, "commit", "-q", "--allow-empty", "-m", "theirs")
    git(repository, "push", "-q", "origin", "evidence/7")
    git(repository, "reset", "-q", "--hard", "main")
    git(repository, "commit", "-q", "--allow-empty", "-m", "ours")
    assert open_pr(repository, "evidence/7", "t", "b", **gh).returncode != 0
    assert git(tmp_path / "origin.git", "log", "-1", "--format=%s", "evidence/7") == "theirs"
    assert not (tmp_path / "gh.txt").exists()


def test_no_branch_is_nothing_to_do(repository, tmp_path, gh):
    assert open_pr(repository, "", "t", "b", **gh).returncode == 0
    assert not (tmp_path / "gh.txt").exists()


@pytest.mark.parametrize(
    ("path", "text", "foreign", "code"),
    [
        ("matrices/evidence/new.json", "{}", "false", 0),
        ("matrices/evidence/new.json", "{}", "true", 4),
        ("matrices/evidence/README", "edited", "false", 4),
        ("matrices/evidence/README", None, "false", 4),
        ("matrices/locks/new/lock.json", "{}", "false", 0),
        ("matrices/locks/new/lock.json", "{}", "true", 4),
        ("matrices/torch.toml", "x", "true", 0),
    ],
)
def test_what_a_pull_request_may_do_to_the_records(repository, path, text, foreign, code):
    place = repository / path
    if text is None:
        place.unlink()
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "changed")
    command = [SCRIPTS / "check-records", "main~0", foreign]
    git(repository, "branch", "-f", "base", "HEAD~1")
    command[1] = "base"
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr


# -- update.py --------------------------------------------------------------------------------------------------------


def test_new_releases_become_a_commit_with_what_is_left_to_fill_in(tmp_path, github):
    """On a copy of the working tree, against an index on this machine."""
    project = tmp_path / "project"
    for part in ("envbuild", "matrices", "smoke_tests", "dockerfiles", "patches"):
        shutil.copytree(ROOT / part, project / part, ignore=shutil.ignore_patterns("__pycache__"))
    git(tmp_path, "init", "-q", "--initial-branch=main", "project")
    git(project, "add", ".")
    git(project, "commit", "-qm", "first")
    index = Index()
    index.add("deepspeed", "99.1.0", wheel("deepspeed", "99.1.0", "py3-none-any"))
    with index.served() as url:
        words = ["deepspeed", "--branch", "update/1", "--body", str(tmp_path / "body.md"), "--repository", str(project)]
        environment = {"ENVBUILD_INDEX_URL": url, "ENVBUILD_CACHE_DIR": str(tmp_path / "cache"), **github.env}
        done = call("update.py", *words, **environment)
        assert done.returncode == 0, done.stderr
        assert changed(project) == ["M\tmatrices/deepspeed.toml"]
        assert github.outputs()["branch"] == "update/1"
        assert github.outputs()["title"] == "New releases: deepspeed 99.1.0"
        assert 'version = "99.1.0"' in (project / "matrices" / "deepspeed.toml").read_text()
        body = (tmp_path / "body.md").read_text()
        assert "deepspeed 99.1.0" in body
        assert github.outputs()["draft"] == ("true" if "fill in" in body or "fails" in body else "false")

        git(project, "switch", "-q", "--create", "merged")
        again = call("update.py", *words[:2], "update/2", *words[3:], **environment)
    assert again.returncode == 0, again.stderr
    assert github.outputs()["branch"] == ""  # nothing is new
    assert git(project, "branch", "--show-current") == "merged"


# -- with-login -------------------------------------------------------------------------------------------------------

LOOK = 'cat "$DOCKER_CONFIG/config.json"; stat -c %a "$DOCKER_CONFIG"; echo "$DOCKER_CONFIG"; env; cat /proc/$PPID/cmdline; exit 7'


def test_a_login_lasts_for_one_command(tmp_path):
    (tmp_path / "docker" / "cli-plugins").mkdir(parents=True)
    (tmp_path / "docker" / "config.json").write_text('{"auths": {}}')
    done = call(
        "with-login", "bash", "-c", LOOK, DOCKER_CONFIG=str(tmp_path / "docker"), REGISTRY_TOKEN="s3cret-t0ken",
        GITHUB_ACTOR="someone", ENVBUILD_REGISTRY="ghcr.io/acme/envbuild",
    )  # fmt: skip
    assert done.returncode == 7
    config, mode, folder, *rest = done.stdout.splitlines()
    login = base64.b64encode(b"someone:s3cret-t0ken").decode()
    assert json.loads(config) == {"auths": {"ghcr.io": {"auth": login}}}
    assert mode == "700"
    assert not Path(folder).exists()
    assert "s3cret" not in "".join(rest)
    assert login not in "".join(rest)
    assert (tmp_path / "docker" / "config.json").read_text() == '{"auths": {}}'
    assert (tmp_path / "docker" / "cli-plugins").is_dir()


@pytest.mark.parametrize("variables", [{"REGISTRY_TOKEN": "s3cret"}, {"ENVBUILD_REGISTRY": "ghcr.io/a/b"}, {}])
def test_without_a_token_and_a_registry_the_command_runs_as_it_is(variables):
    environment = {"REGISTRY_TOKEN": "", "ENVBUILD_REGISTRY": "", "DOCKER_CONFIG": "/before"} | variables
    done = call("with-login", "bash", "-c", 'echo "$DOCKER_CONFIG:${REGISTRY_TOKEN-unset}"', **environment)
    assert done.stdout == "/before:unset\n"


# -- catalog, site ----------------------------------------------------------------------------------------------------

ENVBUILD = f"""#!/bin/bash
if [ "$1" = catalog ]; then cat "$CATALOG"; exit "$CODE"; fi
if [ "$CODE" != 0 ]; then mkdir -p "$3"; echo "$*" > "$3/index.html"; exit; fi
PYTHONPATH={ROOT} exec {sys.executable} -m envbuild "$@"
"""
ENTRY = {
    "id": "cu126-py312-torch2.8.0-te2.6.0-sm90-0c1a2b3c", "cell": {"cuda": "12.6", "torch": "2.8.0", "te": "2.6.0"},
    "image": "sha256:" + "ab" * 32, "platform": "linux/amd64", "size": 1,
}  # fmt: skip


@pytest.fixture
def tree(tmp_path):
    """A tree with the scripts of the site, a `make` that builds no docs, and an envbuild whose registry is a file.

    Where that fails with $CODE, the page is the command line.
    """
    (tmp_path / "scripts" / "ci").mkdir(parents=True)
    for name in ("catalog", "site"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts" / "ci" / name)
    for path, text in {".venv/bin/envbuild": ENVBUILD, "bin/make": "#!/bin/sh\nmkdir -p build/site\n"}.items():
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)
    (tmp_path / "answer.json").write_text(json.dumps({"registry": "ghcr.io/acme/envbuild", "entries": [ENTRY]}))
    return tmp_path


def site(tree, **environment):
    """Run both scripts from elsewhere; return the text of the page and what they wrote."""
    env = {
        "CATALOG": str(tree / "answer.json"),
        "CODE": "0",
        "ENVBUILD_REGISTRY": "ghcr.io/acme/envbuild",
    } | environment
    env["PATH"] = f"{tree / 'bin'}:{os.environ['PATH']}"
    ran = ""
    for name in ("catalog", "site"):
        done = call(tree / "scripts" / "ci" / name, str(tree / "build" / "catalog.json"), **env)
        assert done.returncode == 0, done.stderr
        ran += done.stdout
    return (tree / "build" / "site" / "matrix" / "index.html").read_text(), ran


def test_the_site_shows_what_the_catalogue_lists(tree):
    assert ENTRY["image"] in site(tree)[0]
    # what an earlier run left is of another day
    page, says = site(tree, CODE="4")
    assert page == "matrix page build/site/matrix\n"
    assert "::warning::the catalogue could not be read (exit code 4)" in says
    assert sorted(path.name for path in (tree / "build").iterdir()) == ["site"]


def test_the_site_is_built_without_a_registry(tree):
    page, says = site(tree, ENVBUILD_REGISTRY="", CODE="8")
    assert page == "matrix page build/site/matrix\n"
    assert "::warning::" not in says


# -- prepare-runner, on-debian, release -------------------------------------------------------------------------------

FACTS = 'case "$*" in *Server.Version*) echo 28.1 ;; *Driver*) echo "overlayfs io.containerd.snapshotter.v1" ;; *) echo ok ;; esac'
TOOLS = ("bash", "env", "df", "tail", "tr", "cut", "dirname", "rm", "grep", "id", "sleep", "cat")


@pytest.fixture
def machine(tmp_path):
    """A machine of stand-ins for what would change it; they write down how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    calls = tmp_path / "calls"
    calls.touch()

    def stand_in(name, body=""):
        (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"{calls}"\n{body}\n')
        (folder / name).chmod(0o755)

    stand_in("docker", FACTS)
    (folder / "python3").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')  # the one on the PATH may be a shim
    (folder / "python3").chmod(0o755)
    for tool in ("systemctl", "make", "mmdebstrap", "zstd", "git"):
        stand_in(tool)
    stand_in("sudo", 'shift; exec "$@"')
    root = tmp_path / "root"
    for part in ("usr/share/dotnet/sdk", "usr/local/lib/android", "etc/docker", "home/user", "opt/hostedtoolcache"):
        (root / part).mkdir(parents=True)
    (root / "usr/local/lib/android/link").symlink_to(root / "home")

    def run(**environment):
        command = [SCRIPTS / "prepare-runner", "--root", root]
        env = {"PATH": str(folder), "HOME": str(tmp_path)} | environment
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=60)

    run.root, run.stand_in, run.calls, run.folder = root, stand_in, calls.read_text, folder
    return run


def test_a_hosted_runner_gets_room_and_the_containerd_store(machine):
    done = machine(RUNNER_ENVIRONMENT="github-hosted")
    assert done.returncode == 0, done.stderr
    assert not (machine.root / "usr/share/dotnet").exists()
    assert not (machine.root / "usr/local/lib/android").exists()
    assert (machine.root / "home/user").is_dir()
    settings = json.loads((machine.root / "etc/docker/daemon.json").read_text())
    assert settings["features"]["containerd-snapshotter"] is True
    assert machine.calls().count("systemctl restart docker") == 1
    made = machine.calls().index("make --silent --directory")  # installs what a cell needs, with the engine up
    assert machine.calls().index("systemctl restart docker") < made


@pytest.mark.parametrize("environment", [{}, {"RUNNER_ENVIRONMENT": "self-hosted"}, {"RUNNER_ENVIRONMENT": ""}])
def test_any_other_machine_is_only_looked_at(machine, environment):
    done = machine(**environment)
    assert done.returncode == 0, done.stderr
    assert (machine.root / "usr/share/dotnet/sdk").is_dir()
    assert not (machine.root / "etc/docker/daemon.json").exists()
    assert {line.split()[0] for line in machine.calls().splitlines()} == {"docker"}


@pytest.mark.parametrize("tool", ["mmdebstrap", "zstd", "git", "docker buildx"])
def test_what_a_machine_of_others_does_not_have_is_named_and_not_installed(machine, tool):
    """Installing the plugin from packages would replace the engine, and end what runs in it."""
    if tool == "docker buildx":
        machine.stand_in("docker", FACTS.replace('case "$*" in', 'case "$*" in buildx*) exit 1 ;;'))
    else:
        (machine.folder / tool).unlink()
    done = machine(RUNNER_ENVIRONMENT="self-hosted")
    assert done.returncode == 8
    assert f"missing: {tool};" in done.stderr
    assert {line.split()[0] for line in machine.calls().splitlines()} == {"docker"}


def test_the_engine_of_a_machine_with_a_gpu_is_never_restarted(machine):
    machine.stand_in("nvidia-smi")
    assert machine(RUNNER_ENVIRONMENT="github-hosted").returncode == 0
    assert (machine.root / "usr/share/dotnet/sdk").is_dir()
    assert "systemctl" not in machine.calls()


def test_an_engine_without_the_containerd_store_is_named_and_left_alone(machine):
    machine.stand_in("docker", 'case "$*" in *Server.Version*) echo 28.1 ;; *) echo overlay2 ;; esac')
    done = machine(RUNNER_ENVIRONMENT="self-hosted")
    assert done.returncode == 8
    assert "without the containerd image store" in done.stderr
    assert "systemctl" not in machine.calls()


def test_debian_gets_an_engine_of_the_container_and_not_the_hosts(tmp_path):
    (tmp_path / "docker").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "docker").chmod(0o755)
    done = call(
        "on-debian", "make", "test-unit", PATH=f"{tmp_path}:{os.environ['PATH']}", DOCKER_HOST="tcp://elsewhere"
    )
    words = done.stdout.splitlines()
    assert words[:2] == ["run", "--rm"]
    assert "--privileged" in words
    mounts = [words[at + 1] for at, word in enumerate(words) if word == "--volume"]
    assert mounts == ["/var/lib/docker", "/var/lib/containerd", f"{ROOT}:/checkout:ro"]
    assert not {"--env", "-e", "--env-file", "--network", "--pid", "--mount", "-v"} & set(words)
    assert words[-3:] == ["on-debian", "make", "test-unit"]
    assert "debian:12" in words


@pytest.mark.parametrize(("tag", "why"), [("v9.9.9", "the tag is v9.9.9"), ("0.1.0", "the tag is 0.1.0")])
def test_a_tag_that_is_not_the_version_is_not_released(tag, why):
    done = call("release", tag)
    assert done.returncode == 2
    assert why in done.stderr
