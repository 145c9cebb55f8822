"""Compiled wheels: the store of them, a wheel that is hostile, and an index that pip and uv install from."""

import http.server
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from envbuild.engine.kept import keep_inputs
from envbuild.engine.wheel_file import check_wheel
from envbuild.engine.wheels import inputs_of_wheel, kept_wheels
from envbuild.errors import LockError, UsageError
from envbuild.pipeline.wheel_index import export
from envbuild.pipeline.wheels import Chosen, listed_wheels
from envbuild.plan.stages import Stage
from envbuild.settings import Settings
from envbuild.util.foreign_zip import Bounds, ZipError
from tests.fuzz.elf import fatbin, library
from tests.host.wheel_store import hashed, stage, store, write_wheel

UV = Path(sys.executable).with_name("uv")


def with_code(*sms: int) -> dict[str, bytes]:
    return {"apex_C.so": library(gpu=fatbin(*((2, sm, 0) for sm in sms)))}


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache")


@pytest.fixture
def cache(settings, tmp_path) -> Path:
    """A store with apex for two GPUs and Transformer Engine, which has no GPU code."""
    made = tmp_path / "made"
    for sm in (80, 90):
        wheel = write_wheel(made / str(sm), members=with_code(sm))
        store(settings.cache_dir, stage(environment={"TORCH_CUDA_ARCH_LIST": f"{sm / 10}"}), wheel)
    te = write_wheel(made, "transformer_engine_torch", "2.12.0+local.1", metadata="Requires-Python: >=3.9")
    store(settings.cache_dir, stage("te"), te)
    return settings.cache_dir


# -- the store


def test_a_wheel_is_listed_with_what_it_was_compiled_from(cache, settings):
    found, faults = listed_wheels(settings)
    assert faults == {}
    apex = [wheel for wheel in found if wheel.kept.record.component == "apex"]
    assert {wheel.gpus for wheel in apex} == {("sm_80",), ("sm_90",)}
    assert {(wheel.torch, wheel.kept.inputs.python) for wheel in found} == {("2.11.0+cu130", "3.11")}
    assert apex[0].kept.key in {stage(environment={"TORCH_CUDA_ARCH_LIST": v}).key for v in ("8.0", "9.0")}
    only, _ = listed_wheels(settings, Chosen(components=["t*"], torch=["2.11.*"], pythons=["3.11"]))
    assert [wheel.file.project for wheel in only] == ["transformer-engine-torch"]
    assert listed_wheels(settings, Chosen(torch=["2.10.*"])) == ([], {})
    assert [w.kept.key for w in listed_wheels(settings, Chosen(keys=[apex[1].kept.key[:8]]))[0]] == [apex[1].kept.key]


def test_inputs_that_are_not_those_of_the_key_are_not_believed(cache):
    folder = cache / "wheels" / f"te-{stage('te').key[:32]}"
    assert inputs_of_wheel(folder).torch == "2.11.0+cu130"
    note = folder.with_name(f"{folder.name}.json")
    good = note.read_text()
    for text in (good.replace("2.11.0", "2.12.0"), stage("apex").text, "[]", "{", "[" * 100_000, '{"stage": "../x"}'):
        note.write_text(text)
        assert inputs_of_wheel(folder) is None
    note.unlink()
    assert inputs_of_wheel(folder) is None
    keep_inputs(folder, stage("te"))
    assert note.read_text() == good
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_what_a_key_leaves_open_is_named(cache, settings):
    (te,) = [wheel for wheel in kept_wheels(settings)[0] if wheel.record.component == "te"]
    assert te.inputs.gaps == ()
    gaps = {"source": None, "torch": "2.11.0", "nvcc": "nvidia/cuda:13", "compiler": ["debian12"], "tools": ["ninja"]}
    for name, value in gaps.items():
        made = Stage(name="wheel-te", title="te", inputs={**stage("te").inputs, name: value})
        folder = te.folder.with_name(f"te-{made.key[:32]}")
        keep_inputs(folder, made)
        assert len(inputs_of_wheel(folder).gaps) == 1


def damage_record(folder: Path, **values: object) -> None:
    record = json.loads((folder / "record.json").read_text()) | values
    (folder / "record.json").write_text(json.dumps(record))


DAMAGE = {
    "another component": lambda folder: damage_record(folder, component="apex"),
    "a name that leads out": lambda folder: damage_record(folder, wheel="../x.whl"),
    "a name of controls": lambda folder: damage_record(folder, nvcc="\x1b[2J"),
    "a key that nobody knows": lambda folder: damage_record(folder, run="rm -rf"),
    "another wheel": lambda folder: next(folder.glob("*.whl")).write_bytes(b"PK"),
    "a link": lambda folder: (
        (folder / "record.json").rename(folder / "r") and (folder / "record.json").symlink_to(folder / "r")
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_folder_is_passed_over_with_a_reason(cache, settings, kind):
    folder = cache / "wheels" / f"te-{stage('te').key[:32]}"
    DAMAGE[kind](folder)
    found, faults = listed_wheels(settings)
    assert {wheel.kept.record.component for wheel in found} == {"apex"}
    assert list(faults) == [folder.name]
    assert faults[folder.name].isprintable()


# -- a hostile wheel


def rewritten(tmp_path: Path, change) -> Path:
    """Return a wheel whose zip `change` wrote: it takes the archive and the members of a sound one."""
    sound = write_wheel(tmp_path / "sound")
    with zipfile.ZipFile(sound) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    path = tmp_path / sound.name
    with zipfile.ZipFile(path, "w") as archive:
        change(archive, members)
    return path


def plain(archive: zipfile.ZipFile, members: dict[str, bytes]) -> None:
    for name, body in members.items():
        archive.writestr(name, body)


def added(name: str, body: bytes = b"x", mode: int = 0):
    """Return a change that adds a member, which the RECORD lists."""

    def change(archive, members):
        record = members.pop("apex-1.0.dist-info/RECORD") + f"{name},{hashed(body)},{len(body)}\n".encode()
        plain(archive, members | {"apex-1.0.dist-info/RECORD": record})
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        archive.writestr(info, body)

    return change


def twice(archive, members):
    plain(archive, members)
    with pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("apex.py", b"evil")


def commented(archive, members):
    plain(archive, members)
    archive.comment = b"PK\x05\x06"


def packed(archive, members):
    plain(archive, members)
    archive.writestr("apex.bz2", b"x", compress_type=zipfile.ZIP_BZIP2)


HOSTILE = {
    "a name that leads out": (added("../evil.py"), "no path below"),
    "an absolute name": (added("/etc/evil.py"), "no path below"),
    "a backslash": (added("a\\..\\evil.py"), "no path below"),
    "a drive": (added("c:/evil.py"), "no path below"),
    "a control": (added("a\x1b[2J.py"), "no path below"),
    "a folder of nothing": (added("a//b.py"), "no path below"),
    "a link": (added("evil", b"/etc/passwd", 0o120777), "a link or no plain file"),
    "a device": (added("evil", b"", 0o020666), "a link or no plain file"),
    "a file and a folder": (added("apex.py/evil.py"), "a file and a folder"),
    "a name twice": (twice, "twice"),
    "a comment": (commented, "no zip, or something follows"),
    "another packing": (packed, "packed in a way"),
    "a file that no RECORD lists": (lambda a, m: plain(a, m | {"evil.py": b"x"}), "evil.py"),
    "a file that is not there": (lambda a, m: plain(a, {k: v for k, v in m.items() if k != "apex.py"}), "apex.py"),
    "another file than its RECORD's": (lambda a, m: plain(a, m | {"apex.py": b"evil"}), "not the file of its RECORD"),
    "another project": (
        lambda a, m: plain(a, m | {"apex-1.0.dist-info/METADATA": b"Name: evil\nVersion: 1.0\n"}),
        "not what its file name says",
    ),
    "another version": (
        lambda a, m: plain(a, m | {"apex-1.0.dist-info/METADATA": b"Name: apex\nVersion: 1.x\x1b\n"}),
        "not what its file name says",
    ),
    "two distributions": (lambda a, m: plain(a, m | {"b-1.dist-info/METADATA": b""}), "more than one"),
    "no METADATA": (lambda a, m: plain(a, {k: v for k, v in m.items() if "METADATA" not in k}), "no METADATA"),
    "half a RECORD": (lambda a, m: plain(a, m | {"apex-1.0.dist-info/RECORD": b"apex.py\n"}), "a line that is none"),
    "an endless METADATA": (
        lambda a, m: plain(a, m | {"apex-1.0.dist-info/METADATA": b"a" * 2_000_000}),
        "more than 1,048,576 bytes",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_wheel_is_refused(tmp_path, kind):
    change, says = HOSTILE[kind]
    path = rewritten(tmp_path, change)
    with pytest.raises(ValueError, match=says) as caught:
        check_wheel(path, path.name)
    assert str(caught.value).isprintable()


def test_a_sound_wheel_passes_and_its_name_is_what_it_says(tmp_path):
    path = rewritten(tmp_path, plain)
    assert check_wheel(path, path.name).project == "apex"
    for name in (
        "apex-1.0.whl",
        "evil-1.0-py3-none-any.whl",
        "../apex-1.0-py3-none-any.whl",
        "apex-2-py3-none-any.whl",
    ):
        with pytest.raises(ValueError, match=r".+"):
            check_wheel(path, name)


def test_a_wheel_is_read_within_bounds(tmp_path):
    path = rewritten(tmp_path, plain)
    for bounds in (Bounds(members=3), Bounds(bytes=100), Bounds(directory=100)):
        with pytest.raises(ZipError, match="more than"):
            check_wheel(path, path.name, bounds=bounds)
    body = path.read_bytes()
    for broken in (b"", b"PK\x05\x06" * 10, body[:-30], b"#!/bin/sh\n" + body, body[: len(body) // 2] + body[-22:]):
        path.write_bytes(broken)
        with pytest.raises(ZipError):
            check_wheel(path, path.name)


def test_a_size_that_the_directory_does_not_state_is_not_read(tmp_path):
    """A directory that states a smaller size than the member unpacks to."""
    path = rewritten(tmp_path, lambda archive, members: plain(archive, members | {"apex.py": b"a" * 5000}))
    body = path.read_bytes().replace((5000).to_bytes(4, "little"), (50).to_bytes(4, "little"))
    path.write_bytes(body)
    with pytest.raises(ZipError):
        check_wheel(path, path.name)


# -- the index


def test_each_torch_build_and_gpu_gets_an_index(cache, settings, tmp_path):
    indexes, left_out = export(listed_wheels(settings)[0], tmp_path / "out")
    assert left_out == []
    assert {index.name: sorted(index.projects) for index in indexes} == {
        "torch2.11.0-cu130-sm80": ["apex", "transformer-engine-torch"],
        "torch2.11.0-cu130-sm90": ["apex", "transformer-engine-torch"],
    }
    (apex,) = indexes[1].projects["apex"]
    page = (tmp_path / "out" / indexes[1].name / "apex" / "index.html").read_text()
    for fact in (
        "torch 2.11.0+cu130",
        "GPU code for sm_90",
        apex.kept.key,
        f"#sha256={apex.kept.record.sha256}",
        "any",
    ):
        assert fact in page
    for index in indexes:
        for name in ("", "apex/", "transformer-engine-torch/"):
            assert json.loads((tmp_path / "out" / index.name / f"{name}index.json").read_text())["meta"]


def test_a_gpu_gets_the_wheel_of_its_own_or_one_that_runs_there(settings, tmp_path):
    for sm in (80, 86):
        wheel = write_wheel(tmp_path / str(sm), members=with_code(sm))
        store(settings.cache_dir, stage(environment={"SM": sm}), wheel)
    flash = write_wheel(tmp_path, "flash_attn", members=with_code(80))
    store(settings.cache_dir, stage("flash-attn"), flash)
    indexes, _ = export(listed_wheels(settings)[0], tmp_path / "out")
    found = {index.sm: {wheel.file.project: wheel.gpus for wheel in index.wheels} for index in indexes}
    assert found == {
        80: {"apex": ("sm_80",), "flash-attn": ("sm_80",)},
        86: {"apex": ("sm_86",), "flash-attn": ("sm_80",)},
    }


def test_two_wheels_of_one_name_are_a_choice_for_the_user(cache, settings, tmp_path):
    other = stage(compiler={"gcc-14": "14.2"}, environment={"TORCH_CUDA_ARCH_LIST": "9.0"})
    store(settings.cache_dir, other, write_wheel(tmp_path / "other", members={"x.py": b"", **with_code(90)}))
    with pytest.raises(UsageError, match="they differ in compiler") as caught:
        export(listed_wheels(settings)[0], tmp_path / "out")
    assert other.key[:16] in caught.value.where
    assert not (tmp_path / "out").exists()
    indexes, _ = export(listed_wheels(settings, Chosen(keys=[other.key[:16]]))[0], tmp_path / "out")
    assert [index.name for index in indexes] == ["torch2.11.0-cu130-sm90"]


def test_an_index_goes_into_a_new_folder_alone(cache, settings, tmp_path):
    found, _ = listed_wheels(settings)
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("x")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for place in (full, full / "mine", link):
        with pytest.raises(UsageError, match="no new or empty folder"):
            export(found, place)
    assert sorted(path.name for path in full.iterdir()) == ["mine"]
    (tmp_path / "empty").mkdir()
    export(found, tmp_path / "empty")
    with pytest.raises(LockError, match="no compiled wheel"):
        export([], tmp_path / "none")


def test_a_wheel_that_changes_meanwhile_is_not_exported(cache, settings, tmp_path):
    found, _ = listed_wheels(settings)
    found[0].kept.path.write_bytes(b"evil")
    with pytest.raises(LockError, match="changed while it was copied"):
        export(found, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_wheel_whose_torch_build_is_not_known_is_left_out(cache, settings, tmp_path):
    folder = store(settings.cache_dir, stage("flash-attn"), write_wheel(tmp_path, "flash_attn"), inputs=False)
    indexes, left_out = export(listed_wheels(settings)[0], tmp_path / "out")
    assert [wheel.kept.folder for wheel in left_out] == [folder]
    assert all("flash-attn" not in index.projects for index in indexes)


def install(tool: str, url: str, target: Path, *requirements: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "pip", "--disable-pip-version-check"] if tool == "pip" else [str(UV), "pip"]
    words = ["install", "--index-url", url, "--target", str(target), *requirements]
    cache = ["--no-cache-dir"] if tool == "pip" else ["--no-cache", "--no-config", "--python", sys.executable]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(target.parent), "PIP_CONFIG_FILE": "/dev/null"}
    return subprocess.run([*start, *words, *cache], check=False, capture_output=True, text=True, env=env, timeout=120)


def require_installed(ran: subprocess.CompletedProcess[str], target: Path) -> None:
    assert ran.returncode == 0, ran.stderr
    assert (target / "apex.py").read_text() == "VERSION = '1.0'\n"
    assert (target / "transformer_engine_torch.py").read_text() == "VERSION = '2.12.0+local.1'\n"


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_pip_and_uv_install_from_the_folder(cache, settings, tmp_path, tool):
    indexes, _ = export(listed_wheels(settings)[0], tmp_path / "a folder" / "out")
    url = (tmp_path / "a folder" / "out" / indexes[1].name).as_uri()
    target = tmp_path / "site"
    require_installed(install(tool, url, target, "apex==1.0", "transformer-engine-torch"), target)
    sm90 = next(wheel for wheel in indexes[1].wheels if wheel.sms)
    with zipfile.ZipFile(sm90.kept.path) as archive:
        assert (target / "apex_C.so").read_bytes() == archive.read("apex_C.so")


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_pip_and_uv_refuse_a_file_that_is_not_the_pages(cache, settings, tmp_path, tool):
    indexes, _ = export(listed_wheels(settings)[0], tmp_path / "out")
    (apex,) = indexes[1].projects["apex"]
    place = tmp_path / "out" / "files" / apex.kept.record.sha256 / apex.file.name
    write_wheel(tmp_path / "evil", members={"evil.py": b"x"}).rename(place)
    ran = install(tool, (tmp_path / "out" / indexes[1].name).as_uri(), tmp_path / "site", "apex")
    assert ran.returncode != 0
    assert "hash" in ran.stderr.lower()
    assert not (tmp_path / "site" / "evil.py").exists()


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_pip_and_uv_install_from_its_json_pages(cache, settings, tmp_path, tool):
    indexes, _ = export(listed_wheels(settings)[0], tmp_path / "out")
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(tmp_path / "out"))

        def translate_path(self, path):
            asked.append(path)
            found = super().translate_path(path)
            return f"{found}/index.json" if Path(found).is_dir() else found

        def guess_type(self, path):
            return "application/vnd.pypi.simple.v1+json" if str(path).endswith(".json") else super().guess_type(path)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/{indexes[1].name}"
            target = tmp_path / "site"
            require_installed(install(tool, url, target, "apex", "transformer-engine-torch"), target)
        finally:
            server.shutdown()
            thread.join()
    assert any(path.endswith(".metadata") for path in asked)
