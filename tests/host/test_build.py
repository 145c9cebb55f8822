"""What a build keeps for later ones."""

import hashlib
import io
import json
from types import SimpleNamespace

import pytest

from envbuild.engine import build
from envbuild.engine.bootstrap import checksum_of
from envbuild.engine.build import Builder
from envbuild.engine.built import note_of
from envbuild.engine.client import EngineClient
from envbuild.engine.kept import keep_wheel, kept_wheel, remember_taken, unsigned_origin
from envbuild.engine.progress import Watch
from envbuild.settings import Settings


def wheel(folder, content: str, *, whole: bool = True):
    folder.mkdir(parents=True)
    (folder / "x.whl").write_text(content)
    if whole:
        digest = hashlib.sha256(content.encode()).hexdigest()
        (folder / "record.json").write_text(json.dumps({"wheel": "x.whl", "sha256": digest}))
    return folder


def keep(made, kept, *, cache: bool = True) -> str:
    keep_wheel(made, kept, replace=not cache)
    assert (kept / "record.json").is_file()
    return (kept / "x.whl").read_text()


def test_a_finished_wheel_is_kept_whole(tmp_path):
    made, kept = wheel(tmp_path / "own/made", "new"), tmp_path / "kept"
    assert keep(made, kept) == "new"
    assert not made.exists()


def test_a_wheel_that_another_run_keeps_already_stays(tmp_path):
    assert keep(wheel(tmp_path / "own/made", "new"), wheel(tmp_path / "kept", "theirs")) == "theirs"


@pytest.mark.parametrize(("whole", "cache"), [(False, True), (True, False)], ids=["half", "built again"])
def test_what_is_half_there_or_was_to_be_built_again_is_replaced(tmp_path, whole, cache):
    kept = wheel(tmp_path / "kept", "old", whole=whole)
    assert keep(wheel(tmp_path / "own/made", "new"), kept, cache=cache) == "new"
    assert sorted(p.name for p in kept.iterdir()) == ["record.json", "x.whl"]


def test_another_run_that_is_faster_in_the_same_moment_wins(tmp_path, monkeypatch):
    made, kept = wheel(tmp_path / "own/made", "new"), tmp_path / "kept"
    rename = type(made).rename

    def late(self, target):
        if self == made:
            wheel(kept, "theirs")
        return rename(self, target)

    monkeypatch.setattr(type(made), "rename", late)
    assert keep(made, kept) == "theirs"


def plan_with(key: str):
    return SimpleNamespace(platform=None, key=key, stages=(), stage=lambda name: SimpleNamespace(key=key))


def builder_of(cache, note):
    """A build whose cache lies at `cache`; nothing of it has begun."""
    client = EngineClient(Settings(cache_dir=cache))
    return Builder(client=client, plan=plan_with("0" * 64), on_change=lambda *_: None, note=note)


DAMAGE = {
    "another content": lambda folder: (folder / "x.whl").write_text("changed"),
    "no wheel": lambda folder: (folder / "x.whl").unlink(),
    "no record": lambda folder: (folder / "record.json").unlink(),
    "half a record": lambda folder: (folder / "record.json").write_text('{"wheel": "x.wh'),
    "a record of another kind": lambda folder: (folder / "record.json").write_text("[1]"),
    "a name that leads out": lambda folder: (folder / "record.json").write_text(
        json.dumps({"wheel": "../x.whl", "sha256": hashlib.sha256(b"old").hexdigest()})
    ),
    "deep": lambda folder: (folder / "record.json").write_text("[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_kept_wheel_that_is_not_its_records_is_not_used(tmp_path, damage):
    key = "0" * 64
    folder = wheel(tmp_path / "wheels" / f"te-{key[:32]}", "old")
    (tmp_path / "wheels" / "x.whl").write_text("old")  # for the name that leads out
    settings = SimpleNamespace(cache_dir=tmp_path)
    assert kept_wheel(settings, plan_with(key), "te") == folder
    DAMAGE[damage](folder)
    assert kept_wheel(settings, plan_with(key), "te") is None
    # and is replaced by the one that is made then
    made = wheel(tmp_path / "own" / "made", "new")
    assert keep(made, folder) == "new"


def test_a_damaged_wheel_is_reported(tmp_path):
    key, notes = "0" * 64, []
    folder = wheel(tmp_path / "wheels" / f"te-{key[:32]}", "old")
    builder = builder_of(tmp_path, notes.append)
    builder._note_damage("te")
    assert notes == []
    (folder / "x.whl").write_text("changed")
    builder._note_damage("te")
    assert notes == ["the kept wheel of te is damaged (x.whl is not the file of its record); making it again"]


@pytest.mark.parametrize(
    ("replaced", "kept"),
    [
        ((), {"te", "fa3"}),
        (("src-fa3",), {"te"}),
        (("src-fa3-nvcc",), {"te"}),
        (("src-megatron-lm",), {"te", "fa3"}),
        (("src-te", "src-fa3"), set()),
        (("base",), set()),
        (("src-mpi",), set()),
        (("src-fa3", "devel"), set()),
    ],
)
def test_a_kept_wheel_is_used_where_only_another_components_source_is_replaced(tmp_path, replaced, kept):
    key = "0" * 64
    for axis in ("te", "fa3"):
        wheel(tmp_path / "wheels" / f"{axis}-{key[:32]}", "old")
    builder = builder_of(tmp_path, lambda _: None)
    builder.plan.components = tuple(
        SimpleNamespace(axis=axis, downloads=downloads) for axis, downloads in (("te", ()), ("fa3", ("fa3-nvcc",)))
    )
    builder.plan.stack = SimpleNamespace(repository=SimpleNamespace(name="megatron-lm"))
    builder.substitutes = dict.fromkeys(replaced, "/elsewhere")
    assert {axis for axis in ("te", "fa3") if builder._kept_wheel(axis)} == kept


def test_a_build_with_a_wheel_that_no_trusted_key_signed_is_not_alone(tmp_path):
    """It is then no build of this machine's own: an image of it is not called verified, and gets no provenance."""
    key = "0" * 64
    wheel(tmp_path / "wheels" / f"te-{key[:32]}", "old")
    settings, plan = Settings(cache_dir=tmp_path), plan_with(key)
    plan.components = (SimpleNamespace(axis="te"),)
    remember_taken(settings, hashlib.sha256(b"old").hexdigest(), unsigned_origin("bundle 123"))
    found = note_of(settings, plan, "sha256:" + "1" * 64, cache=True)
    assert (found.steps_from, found.wheels_from) == ("unsigned-bundle-123", None)
    remember_taken(settings, hashlib.sha256(b"old").hexdigest(), "r.example/wheels")
    found = note_of(settings, plan, "sha256:" + "1" * 64, cache=True)
    assert (found.steps_from, found.wheels_from) == (None, "r.example/wheels")


class Roots:
    """A build that needs a Debian root, whose bootstrap writes a known one."""

    def __init__(self, folder, monkeypatch):
        self.notes, self.made = [], 0
        self.kept = folder / "roots" / f"{'0' * 32}.tar"
        self.folder = folder / "build"
        self.folder.mkdir()
        (folder / "roots").mkdir()
        monkeypatch.setattr(build, "bootstrap_root", self.bootstrap)
        self.builder = builder_of(folder, self.notes.append)
        self.builder.folder = self.folder
        self.builder._watch = Watch(log=io.StringIO(), on_change=lambda *_: None)

    def bootstrap(self, *args, dest, **options):
        self.made += 1
        checksum_of(dest).write_text(hashlib.sha256(b"root").hexdigest() + "\n")
        dest.write_bytes(b"root")

    def use(self) -> bytes:
        self.builder._have_root(SimpleNamespace(suite="bookworm", epoch=0, packages=()))
        return (self.folder / "rootfs.tar").read_bytes()


def test_a_kept_root_is_used_when_it_is_what_was_made_and_made_again_when_not(tmp_path, monkeypatch):
    roots = Roots(tmp_path, monkeypatch)
    assert (roots.use(), roots.made, roots.notes) == (b"root", 1, [])
    assert (roots.use(), roots.made) == (b"root", 1)
    roots.kept.write_bytes(b"rooT")
    assert (roots.use(), roots.made) == (b"root", 2)
    assert roots.notes == [f"the kept root {roots.kept.name} is not the one that was made; making it again"]
    checksum_of(roots.kept).unlink()  # of a version that kept none
    assert (roots.use(), roots.made) == (b"root", 3)
    checksum_of(roots.kept).write_text("")
    assert (roots.use(), roots.made) == (b"root", 4)
