"""All steps on the real engine: the CPU cell built, proven, reproduced, pushed, pulled, and every way in which it can fail."""

import concurrent.futures
import json
import shutil
import signal
import subprocess
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from command import image_names, interrupted, run

from envbuild.evidence.records import REPLACED

CPU = ("--cuda", "cpu")


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> dict[str, str]:
    """Its own cache, as on a machine that never ran envbuild."""
    return {"ENVBUILD_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="session", autouse=True)
def _no_images_of_other_runs(engine):
    """Remove what an earlier run tagged, before and after."""
    forget_images(engine)
    yield
    forget_images(engine)


@pytest.fixture(scope="session")
def cpu(engine, cache) -> dict[str, Any]:
    """The CPU cell, built from nothing; its report."""
    made = run("image", *CPU, "--tag", "envbuild-made:cpu", "--no-cache", "--json", env=cache)
    assert made.code == 0, made.err
    return made.answer


def forget_images(engine) -> None:
    for tag in image_names("envbuild-made:"):
        engine.image.remove(tag, force=True)


def test_the_cpu_cell_is_built_and_proven(cpu):
    assert cpu["origin"] == "built"
    assert cpu["executed"] > 0
    assert cpu["audit"]["defects"] == 0
    assert cpu["smoke"]["verdict"] == "passed"
    assert cpu["smoke"]["passed"] > 0
    assert cpu["lock"]["complete"]
    # the cell has no package besides torch and what it needs, so no step of the stage `env`
    assert {"base", "runtime", "torch", "image", "export"} <= {s["name"] for s in cpu["stages"]}
    assert cpu["run"].startswith("envbuild run ")


def test_pip_in_the_image_leaves_locked_packages_or_refuses_and_names_them(cpu, tmp_path):
    # an older numpy is at hand, which nothing but the constraints keeps out
    for name, version, asks in (("fits", "1", "numpy"), ("asks", "1", "numpy<2"), ("numpy", "1.26.4", "")):
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            wheel.writestr(f"{info}/METADATA", metadata + (f"Requires-Dist: {asks}\n" if asks else ""))
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")

    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = ["docker", "run", "--rm", "--network", "none", "-v", f"{tmp_path}:/wheels:ro", "envbuild-made:cpu"]
        return subprocess.run([*line, "pip", *arguments], capture_output=True, text=True, check=False)

    here = ("install", "--no-index", "--find-links", "/wheels")
    taken = pip(*here, "fits")
    assert taken.returncode == 0, taken.stderr
    assert [line for line in taken.stderr.splitlines() if line.startswith((" +", " -", " ~"))] == [" + fits==1"]
    refused = pip(*here, "asks")
    assert refused.returncode
    assert "numpy<2" in refused.stderr
    assert "/opt/envbuild/constraints.txt" in refused.stderr


def test_an_unchanged_cell_runs_no_stage(cpu, cache):
    begun = time.monotonic()
    again = run("image", *CPU, "--tag", "envbuild-made:cpu", "--json", env=cache)
    assert again.code == 0, again.err
    assert again.answer["origin"] == "found"
    assert again.answer["executed"] == 0
    assert again.answer["digest"] == cpu["digest"]
    assert time.monotonic() - begun < 10


def test_the_same_lock_gives_the_same_digest_again(cpu, cache):
    again = run("reproduce", "envbuild-made:cpu", "--json", env=cache)
    assert again.code == 0, again.err
    assert again.answer["equal"]
    assert again.answer["digest"] == cpu["digest"]


def test_every_file_belongs_to_a_locked_input(cpu, cache, tmp_path):
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    done = run("sbom", "envbuild-made:cpu", "--output", str(tmp_path / "sbom.json"), "--json", env=cache)
    assert done.code == 0, done.err
    assert done.answer["unowned"] == []
    assert done.answer["files"] > 20_000
    body = (tmp_path / "sbom.json").read_text(encoding="utf-8")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(body) is None
    assert run("catalog", "keygen", "me", "--out", str(tmp_path), env=cache | {"COSIGN_PASSWORD": ""}).code == 0
    own = cache | {"ENVBUILD_SIGNING_KEYS": str(tmp_path / "me.key")}
    done = run("provenance", "envbuild-made:cpu", "--json", env=own)
    assert done.code == 0, done.err
    assert done.answer["image"] == cpu["digest"]
    byproducts = done.answer["document"]["predicate"]["runDetails"]["byproducts"]
    command = ["docker", "image", "inspect", "--format", "{{json .RootFS.Layers}}", "envbuild-made:cpu"]
    layers = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [f"sha256:{each['digest']['sha256']}" for each in byproducts] == layers


def test_no_file_keeps_the_time_of_its_build(cpu):
    """A stage that comes from the cache of another day would give another digest."""
    find = "find / -xdev -newermt 1980-01-02 ! -path '/etc/*' ! -path '/dev*' ! -path /run/.containerenv"
    command = ["docker", "run", "--rm", "--network=none", "--entrypoint", "sh", "envbuild-made:cpu", "-c", find]
    newer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert set(newer) <= {"/", "/.dockerenv", "/etc", "/proc", "/sys"}  # the engine's own, for the container


def test_the_same_lock_gives_the_same_digest_on_another_engine(cpu, second_engine, tmp_path):
    """With its own cache: root, downloads and layers are all made again."""
    env = {"ENVBUILD_CACHE_DIR": str(tmp_path), "DOCKER_HOST": second_engine.client_config.host}
    other = run("image", *CPU, "--lock", cpu["lock"]["folder"], "--locked", "--no-smoke", "--json", env=env)
    assert other.code == 0, other.err
    assert other.answer["origin"] == "built"
    assert other.answer["digest"] == cpu["digest"]


def test_a_named_builder_builds_and_the_engine_gets_the_image(cpu, engine, tmp_path):
    env = {"ENVBUILD_CACHE_DIR": str(tmp_path)}
    lock = ("--lock", cpu["lock"]["folder"], "--locked", "--tag", "envbuild-made:builder", "--no-smoke")
    made = run("image", *CPU, *lock, "--builder", "default", "--json", env=env)
    assert made.code == 0, made.err
    assert made.answer["digest"] == cpu["digest"]
    assert image_names("envbuild-made:builder")


def test_a_builder_that_does_not_exist_is_a_clear_message(cpu, tmp_path):
    lock = ("--lock", cpu["lock"]["folder"], "--locked")
    refused = run("image", *CPU, *lock, "--builder", "no-such", env={"ENVBUILD_CACHE_DIR": str(tmp_path)})
    assert refused.code == 8, refused.err
    assert "no builder named no-such" in refused.err
    assert "docker buildx ls" in refused.err
    assert not (tmp_path / "roots").exists()  # it is asked before what takes minutes


def test_a_replaced_input_is_reported(cpu, cache, tmp_path):
    """An image of other inputs is not the lock's: the report says so, and no later run takes it for the lock's image."""
    same = next(Path(cache["ENVBUILD_CACHE_DIR"]).glob("builds/*/contexts/uv-wheel"))
    lock = ("--lock", cpu["lock"]["folder"], "--locked", "--tag", "envbuild-made:replaced", "--no-smoke", "--json")
    replaced = run("image", *CPU, *lock, "--build-context", f"uv-wheel={same}", env=cache)
    assert replaced.code == 0, replaced.err
    assert replaced.answer["replaced"] == {"uv-wheel": str(same)}
    assert f"the image of this lock: uv-wheel was replaced by {same}" in replaced.answer["not_proven"]
    words = ("--level", "import", "-k", "import_packages", "--record", str(tmp_path), "--json")
    ran = run("smoke", "envbuild-made:replaced", *words, env=cache)
    assert ran.code == 0, ran.err
    assert json.loads(Path(ran.answer["evidence"]).read_text())["built_with"] == {"uv-wheel": REPLACED}
    again = run("image", *CPU, *lock, env=cache | {"ENVBUILD_REGISTRY": ""})
    assert again.answer["replaced"] == {}
    assert again.answer["digest"] == cpu["digest"]


def test_an_input_that_the_cell_does_not_have_replaces_nothing(cpu, cache):
    lock = ("--lock", cpu["lock"]["folder"], "--locked")
    refused = run("image", *CPU, *lock, "--build-context", "src-te=/tmp", env=cache)
    assert refused.code == 2, refused.err
    assert "src-te is not an input of this cell" in refused.err
    assert "uv-wheel" in refused.err


def test_a_bump_runs_what_it_touches_alone(cpu, cache):
    """A package more changes the environment and the assembly; the OS packages and the root stay."""
    same = ("--torch", cpu["cell"]["torch"], "--python", cpu["cell"]["python"], "--os", cpu["cell"]["os"])
    made = run(
        "image", *CPU, *same, "--megatron", "auto", "--tag", "envbuild-made:bump", "--no-smoke", "--json", env=cache
    )
    assert made.code == 0, made.err
    ran = {s["name"] for s in made.answer["stages"] if s["executed"]}
    assert made.answer["digest"] != cpu["digest"]
    # torch's own layer may move: Megatron caps numpy, which is resolved with it.
    assert not ran & {"base", "runtime", "uv-unpack", "builder"}, ran


def test_a_rebuild_that_differs_is_listed_file_by_file(cpu, client, cache, tmp_path):
    from envbuild.engine.reproduce import compare

    (tmp_path / "Dockerfile").write_text(
        'FROM envbuild-made:cpu\nRUN echo changed > /etc/issue && rm /etc/debian_version\nENV MORE="1"\n'
    )
    subprocess.run(
        ["docker", "buildx", "build", "-q", "--provenance=false", "-t", "envbuild-made:changed", str(tmp_path)],
        check=True,
        capture_output=True,
    )
    found = {d.path: d.what for d in compare(client, "envbuild-made:cpu", "envbuild-made:changed")}
    assert "sha256" in found["etc/issue"]
    assert found["etc/debian_version"] == "only in envbuild-made:cpu"
    assert any(path.startswith("(configuration)") for path in found)


def test_a_prebuilt_image_is_pushed_and_pulled_by_digest(cpu, engine, cache, registry, tmp_path):
    env = cache | {"ENVBUILD_REGISTRY": f"{registry}/envbuild"}
    pushed = run("image", *CPU, "--tag", "envbuild-made:cpu", "--push", "--json", env=env)
    assert pushed.code == 0, pushed.err
    assert pushed.answer["pushed"].endswith(cpu["digest"])
    engine.image.remove("envbuild-made:cpu", force=True)
    pulled = run("pull", *CPU, "--lock", cpu["lock"]["folder"], "--tag", "envbuild-made:cpu", "--json", env=env)
    assert pulled.code == 0, pulled.err
    assert pulled.answer["digest"] == cpu["digest"]
    assert pulled.answer["verified"]["by"] == "build"
    again = run("image", *CPU, "--tag", "envbuild-made:cpu", "--json", env=env).answer
    assert (again["executed"], again["origin"], again["verified"]["by"]) == (0, "found", "build")
    # On a machine that built nothing only a person knows which digest it should be.
    lock = ("--lock", cpu["lock"]["folder"], "--tag", "envbuild-made:cpu", "--json")
    other = env | {"ENVBUILD_CACHE_DIR": str(tmp_path)}
    assert run("pull", *CPU, *lock, "--digest", cpu["digest"], env=other).answer["verified"]["by"] == "flag"
    assert run("pull", *CPU, *lock, env=other).answer["verified"]["by"] == "nobody"
    found = run("image", *CPU, *lock, "--no-smoke", env=other).answer
    assert (found["origin"], found["verified"]["by"], found["executed"]) == ("found", "nobody", 0)
    assert any("nobody but the registry confirmed" in text for text in found["not_proven"])
    for tag in image_names(f"{registry}/"):
        engine.image.remove(tag, force=True)  # the name alone: the image is the other tests'


def test_a_lock_that_the_registry_does_not_hold_is_a_clear_message(cpu, cache, start_registry):
    env = cache | {"ENVBUILD_REGISTRY": f"{start_registry()}/envbuild"}
    refused = run("pull", *CPU, "--lock", cpu["lock"]["folder"], env=env)
    assert refused.code == 4
    assert "has no image of this lock" in refused.err


def test_run_hands_the_command_and_its_exit_code_through(cpu, cache):
    done = run(
        "run",
        "envbuild-made:cpu",
        "--",
        "python",
        "-c",
        "import torch, sys; print(torch.__version__); sys.exit(7)",
        env=cache,
    )
    assert done.code == 7
    assert done.out.strip().startswith("2.")


def test_an_interrupted_build_tags_nothing_and_continues(cpu, engine, cache, tmp_path):
    command = ("image", *CPU, "--tag", "envbuild-made:interrupted", "--no-cache", "--no-smoke")
    (tmp_path / "tmp").mkdir()
    for by in (signal.SIGINT, signal.SIGTERM):
        interrupted(*command, env=cache | {"TMPDIR": str(tmp_path / "tmp")}, stage="torch", seconds=2, by=by)
        assert image_names("envbuild-made:interrupted") == []
        assert list((tmp_path / "tmp").iterdir()) == []  # the site's credentials lay there
        assert not subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, check=False).stdout
    again = run("image", *CPU, "--tag", "envbuild-made:interrupted", "--no-smoke", "--json", env=cache)
    assert again.code == 0, again.err
    assert again.answer["digest"] == cpu["digest"]


def test_an_interrupted_bootstrap_leaves_nothing(cpu, tmp_path):
    """mmdebstrap has its own session, which Ctrl-C does not reach: envbuild ends it, and it removes its root."""
    (tmp_path / "tmp").mkdir()
    env = {"ENVBUILD_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
    interrupted("image", *CPU, "--lock", cpu["lock"]["folder"], "--locked", env=env, stage="base", seconds=3)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not list((tmp_path / "cache" / "roots").iterdir())
    assert not subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, check=False).stdout


def test_two_builds_of_one_cell_take_turns(cpu, engine, cache):
    for tag in image_names("envbuild-made:interrupted"):
        engine.image.remove(tag)
    command = ("image", *CPU, "--tag", "envbuild-made:interrupted", "--no-smoke", "--json")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        both = [f.result() for f in [pool.submit(run, *command, env=cache) for _ in range(2)]]
    assert [d.code for d in both] == [0, 0], [d.err for d in both]
    assert {d.answer["digest"] for d in both} == {cpu["digest"]}


def copied_lock(cpu, tmp_path: Path) -> Path:
    return Path(shutil.copytree(cpu["lock"]["folder"], tmp_path / "lock"))


def test_a_wheel_that_is_not_the_locks_is_refused(cpu, engine, cache, tmp_path):
    folder = copied_lock(cpu, tmp_path)
    lock = json.loads((folder / "lock.json").read_text())
    name, package = next((s["name"], p) for s in lock["python"] for p in s["packages"] if p["name"] == "sympy")
    pylock = folder / f"pylock.{name}.toml"
    for digest in package["hashes"]:
        pylock.write_text(pylock.read_text().replace(digest, "0" * 64))
    package["hashes"] = ["0" * 64]
    (folder / "lock.json").write_text(json.dumps(lock))
    refused = run("image", *CPU, "--lock", str(folder), "--locked", "--tag", "envbuild-made:foreign", env=cache)
    assert refused.code == 4, refused.err
    assert "sympy" in refused.err
    assert "the whole log is in" in refused.err
    assert image_names("envbuild-made:foreign") == []


def test_an_os_package_that_is_gone_fails_loudly(cpu, engine, cache, tmp_path):
    folder = copied_lock(cpu, tmp_path)
    lock = json.loads((folder / "lock.json").read_text())
    package = next(p for s in lock["os"] for p in s["packages"] if p["name"] == "gcc")
    package["version"] = "1:0.0-1"
    (folder / "lock.json").write_text(json.dumps(lock))
    refused = run("image", *CPU, "--lock", str(folder), "--locked", "--tag", "envbuild-made:gone", env=cache)
    assert refused.code == 4, refused.err
    assert "1:0.0-1" in refused.err
    assert "lock again" in refused.err
    assert image_names("envbuild-made:gone") == []


def test_a_network_that_fails_in_the_middle_loses_nothing(cpu, engine, cache):
    dead = cache | {"ENVBUILD_INDEX_URL": "http://127.0.0.1:9/simple"}
    failed = run(
        "image",
        *CPU,
        "--lock",
        cpu["lock"]["folder"],
        "--locked",
        "--no-cache",
        "--tag",
        "envbuild-made:dead",
        env=dead,
    )
    assert failed.code == 8, failed.err
    assert "127.0.0.1:9" in failed.err
    assert image_names("envbuild-made:dead") == []
    assert (
        run("image", *CPU, "--tag", "envbuild-made:dead", "--no-smoke", "--json", env=cache).answer["digest"]
        == cpu["digest"]
    )


def test_inputs_out_of_reach_are_named_with_what_to_supply(engine, tmp_path):
    env = {"ENVBUILD_CACHE_DIR": str(tmp_path), "ENVBUILD_INDEX_URL": "http://127.0.0.1:9/simple"}
    refused = run("image", *CPU, env=env)
    assert refused.code == 8, refused.err
    assert "held by" in refused.err
    assert "index_url" in refused.err


def test_a_machine_without_registry_reports_what_the_headline_needs(engine, cache):
    refused = run("image", "--cuda", "12.6", "--te", "2.6", env=cache)
    if refused.code == 0:
        pytest.skip("this machine reaches every registry")
    assert refused.code == 8, refused.err
    assert "nvidia/cuda:12.6.3-cudnn-devel-ubuntu24.04" in refused.err


def test_no_engine_is_a_clear_message(cache):
    refused = run("image", *CPU, env=cache | {"DOCKER_HOST": "unix:///nonexistent.sock"})
    assert refused.code == 8
    assert "scripts/install-engine" in refused.err


def test_a_full_disk_is_a_clear_message(cpu, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)], capture_output=True, check=False
    ).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        refused = run(
            "image",
            *CPU,
            "--lock",
            cpu["lock"]["folder"],
            "--locked",
            "--tag",
            "envbuild-made:full",
            env={"ENVBUILD_CACHE_DIR": str(small)},
        )
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert refused.code == 8, refused.err
    assert "the disk is full" in refused.err


def test_a_missing_home_is_no_obstacle(cpu):
    env = {"HOME": "/dev/null/none", "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": "", "ENVBUILD_CACHE_DIR": ""}
    done = run("render", *CPU, "--lock", cpu["lock"]["folder"], env={k: v for k, v in env.items() if v})
    assert done.code == 0, done.err
    assert done.out.startswith("# envbuild: cpu-")


@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here, which installs the devcontainer CLI")
def test_the_devcontainer_cli_opens_the_image(cpu, cache, tmp_path):
    cli, place = tmp_path / "cli", tmp_path / "work"
    (place / ".devcontainer").mkdir(parents=True)
    (place / "mine.py").write_text("import torch\nprint(int(torch.ones(42).sum()))\n")
    install = ["npm", "install", "--silent", "--ignore-scripts", "--prefix", str(cli), "@devcontainers/cli@0.89.0"]
    subprocess.run(install, check=True, timeout=300)
    rendered = run("render", *CPU, "--format", "devcontainer", env=cache)
    assert rendered.code == 0, rendered.err
    config = json.loads(rendered.out)
    assert config["image"].startswith("envbuild:cpu-")
    config["image"] = "envbuild-made:cpu"
    (place / ".devcontainer" / "devcontainer.json").write_text(json.dumps(config))

    def devcontainer(verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        line = [cli / "node_modules/.bin/devcontainer", verb, "--workspace-folder", place, *words]
        return subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)

    opened = devcontainer("up")
    assert opened.returncode == 0, opened.stdout + opened.stderr
    answer = json.loads(opened.stdout.splitlines()[-1])
    try:
        assert (answer["outcome"], answer["remoteUser"]) == ("success", "root")
        # the folder is the editor's workspace, and Python the image's
        ran = devcontainer("exec", "python", "mine.py")
        assert (ran.returncode, ran.stdout.split()) == (0, ["42"]), ran.stderr
        which = devcontainer("exec", "sh", "-c", "command -v python")
        assert which.stdout.strip() == "/opt/venv/bin/python"
    finally:
        subprocess.run(["docker", "rm", "--force", answer["containerId"]], capture_output=True, check=True)
