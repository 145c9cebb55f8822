"""Bundles: what is written is what is unpacked, and whoever made one to do harm does none."""

import hashlib
import io
import json
import os
import tarfile
import threading
import time
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from cell_inputs import complete, inputs_for, sha
from click.testing import CliRunner

from envbuild.cli.bundle import unbundle
from envbuild.engine.client import EngineClient
from envbuild.engine.kept import taken_from, unsigned_wheels_from, wheels_from
from envbuild.engine.wheels import kept_wheels
from envbuild.errors import LockError, UsageError
from envbuild.lock.files import Locked, write_lock
from envbuild.lock.model import FileSource, GitSource
from envbuild.lock.sources import SourceStore
from envbuild.lock.trees import tree_id
from envbuild.lock.wheels import fits, tags_of
from envbuild.pipeline.bundle import _compiled, pack_tree, source_name
from envbuild.pipeline.bundle_file import SIGNATURES, BundleError, write_bundle
from envbuild.pipeline.fetched import fetch_wheel
from envbuild.pipeline.unbundle import load_image, open_bundle
from envbuild.registry.keys import make_key_pair, read_private_key
from envbuild.settings import Settings


def described(folder: Path, body: bytes, kind: str) -> dict[str, object]:
    name = hashlib.sha256(body).hexdigest()
    (folder / name).write_bytes(body)
    return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{name}", "size": len(body)}


@cache
def sound() -> Locked:
    return complete(inputs_for(cuda="cpu"))


class Made:
    """The files of a sound bundle; a test changes them, or the tar, before it is read."""

    def __init__(self, place: Path, **changed: object) -> None:
        found = sound()
        uv = found.lock.uv.model_copy(update={"sha256": sha("uv")})
        lock = found.lock.model_copy(update={"uv": uv, **changed})
        self.locked = Locked(lock=lock, pylocks=found.pylocks)
        self.place, self.number = place, 0
        write_lock(self.locked, place / "lock")
        self.files = {f"lock/{path.name}": path for path in (place / "lock").iterdir()}
        for python_set in lock.python:
            for package in python_set.packages:
                content = f"{package.name}=={package.version}"
                self.add(f"packages/{package.name}-{package.version}-py3-none-any.whl", content)
        for package in (*lock.root.packages, *(p for s in lock.os for p in s.packages)):
            self.add(f"debs/{package.sha256}.deb", f"{package.name}={package.version}")
        self.add(f"cache/files/{sha('uv')}/{lock.uv.url.rsplit('/', 1)[-1]}", "uv")
        self.add("tool/envbuild-1.0-py3-none-any.whl", "a wheel")
        self.image(lock.digest)

    def add(self, path: str, content: str) -> None:
        self.number += 1
        self.files[path] = self.place / str(self.number)
        self.files[path].write_text(content)

    def compiled(self) -> None:
        place = f"cache/wheels/te-{'0' * 32}"
        self.add(f"{place}/te-1.0-py3-none-any.whl", "a wheel")
        record = {"component": "te", "wheel": "te-1.0-py3-none-any.whl", "sha256": sha("a wheel")}
        self.add(f"{place}/record.json", json.dumps(record))
        self.add(f"{place}.json", "{}")

    def image(self, lock: str) -> None:
        self.files = {path: file for path, file in self.files.items() if not path.startswith("image/")}
        blobs = self.place / f"image{len(list(self.place.iterdir()))}"
        blobs.mkdir()
        labels = {"config": {"Labels": {"io.envbuild.lock": lock}}}
        config = described(blobs, json.dumps(labels).encode(), "config.v1+json")
        layers = [described(blobs, b"a layer", "layer.v1.tar")]
        manifest = described(blobs, json.dumps({"config": config, "layers": layers}).encode(), "manifest.v1+json")
        self.files |= {f"image/blobs/sha256/{path.name}": path for path in blobs.iterdir()}
        self.add("image/index.json", json.dumps({"manifests": [manifest]}))
        self.add("image/oci-layout", '{"imageLayoutVersion": "1.0.0"}')
        self.digest = manifest["digest"]

    def write(self, output: Path, keys=(), **changed):
        stated = {
            "envbuild": "1.0",
            "python": "3.11",
            "lock": self.locked.lock.digest,
            "image": self.digest,
            "missing": (),
        }
        return write_bundle(output, self.files, keys, **(stated | changed))


@pytest.fixture
def made(tmp_path):
    place = tmp_path / "made"
    place.mkdir()
    return Made(place)


@pytest.fixture
def settings(tmp_path):
    return Settings(cache_dir=tmp_path / "cache")


@pytest.fixture
def opened(tmp_path, settings):
    """Open a bundle into `out`, which must not be there after an error."""

    def run(path: Path, sha256: str | None = None, used: Settings = settings):
        try:
            return open_bundle(used, path, tmp_path / "out", sha256=sha256, note=lambda _: None)
        except Exception:
            assert not (tmp_path / "out").exists()
            assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".envbuild")] == []
            raise

    return run


def rewritten(path: Path, change) -> Path:
    """Write the tar again, through `change`, which takes and returns a list of (member, content)."""
    with tarfile.open(path) as tar:
        members = [(m, tar.extractfile(m).read() if m.isreg() else b"") for m in tar]
    new = path.with_name("rewritten.tar")
    with tarfile.open(new, "w") as tar:
        for member, content in change(members):
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return new


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def listing_changed(members, change):
    """Change the list itself, as the author of a hostile bundle does."""
    value = json.loads(members[0][1])
    change(value)
    return [(members[0][0], json.dumps(value).encode()), *members[1:]]


def test_a_bundle_comes_out_as_it_went_in(made, opened, tmp_path):
    written = made.write(tmp_path / "b.tar")
    assert hashlib.sha256((tmp_path / "b.tar").read_bytes()).hexdigest() == written.sha256
    found = opened(tmp_path / "b.tar", written.sha256)
    for path, source in made.files.items():
        assert (tmp_path / "out" / path).read_bytes() == source.read_bytes()
    assert found.unpacked.signers == ()
    assert found.tag == f"envbuild:{made.locked.lock.as_cell.id}"
    config = (tmp_path / "out" / "config.toml").read_text()
    assert found.left_out == ()
    assert 'find_links = ["packages", "tool"]' in config
    assert "sources" not in config  # the setting must name a folder that is there
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def test_the_same_files_give_the_same_bytes(made, tmp_path):
    assert made.write(tmp_path / "a.tar").sha256 == made.write(tmp_path / "b.tar").sha256


def test_settings_of_the_folder_load_and_name_it(made, opened, tmp_path):
    from envbuild.settings import load_settings

    opened(tmp_path / "b.tar", made.write(tmp_path / "b.tar").sha256)
    config = str(tmp_path / "out" / "config.toml")
    found = load_settings(environ={"HOME": str(tmp_path), "ENVBUILD_CONFIG": config}, root=tmp_path)
    assert found.find_links == tuple(str(tmp_path / "out" / name) for name in ("packages", "tool"))
    assert (found.debs, found.cache_dir) == (tmp_path / "out" / "debs", tmp_path / "out" / "cache")


def test_a_folder_that_is_there_stays_as_it_is(made, settings, tmp_path):
    made.write(tmp_path / "b.tar")
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists"):
        open_bundle(settings, tmp_path / "b.tar", tmp_path / "out", sha256=None, note=lambda _: None)
    assert list((tmp_path / "out").iterdir()) == []


def test_another_sha256_than_the_named_one_is_refused(made, opened, tmp_path):
    made.write(tmp_path / "b.tar")
    with pytest.raises(BundleError, match="its sha256 is"):
        opened(tmp_path / "b.tar", "0" * 64)


@pytest.mark.parametrize("cut", [1, 600, 5000, 20_000])
def test_a_bundle_that_is_cut_off_is_refused(made, opened, tmp_path, cut):
    made.write(tmp_path / "b.tar")
    body = (tmp_path / "b.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(body[: len(body.rstrip(b"\0")) - cut])
    with pytest.raises(BundleError, match=r"damaged|missing|not a bundle"):
        opened(tmp_path / "cut.tar")


@pytest.mark.parametrize("name", ["empty", "text", "tar"])
def test_what_is_no_bundle_is_refused(opened, tmp_path, name):
    path = tmp_path / name
    path.write_bytes({"empty": b"", "text": b"hello" * 1000, "tar": b""}[name])
    if name == "tar":
        with tarfile.open(path, "w") as tar:
            tar.addfile(member("bundle.txt"))
    with pytest.raises(BundleError, match="not a bundle"):
        opened(path)


def test_every_changed_byte_of_a_file_is_found(made, opened, tmp_path):
    made.write(tmp_path / "b.tar")

    def change(members):
        for at, (info, content) in enumerate(members):
            if info.name.startswith("debs/"):
                members[at] = (info, bytes([content[0] ^ 1]) + content[1:])
                return members
        raise AssertionError

    with pytest.raises(BundleError, match=r"debs/.* has the sha256"):
        opened(rewritten(tmp_path / "b.tar", change))


def test_a_longer_file_is_refused(made, opened, tmp_path):
    made.write(tmp_path / "b.tar")
    longer = rewritten(tmp_path / "b.tar", lambda m: [*m[:-1], (m[-1][0], m[-1][1] + b"x")])
    with pytest.raises(BundleError, match=r"bytes, .* are listed"):
        opened(longer)


def test_a_missing_file_is_named(made, opened, tmp_path):
    made.write(tmp_path / "b.tar")
    name = max(made.files)
    with pytest.raises(BundleError, match=f"1 file is missing, {name}"):
        opened(rewritten(tmp_path / "b.tar", lambda m: m[:-1]))


@pytest.mark.parametrize(
    "name", ["more", "debs/more.deb", "../outside", "/etc/outside", "lock/../../outside", "tool/./../../outside"]
)
def test_a_file_that_is_not_listed_is_refused(made, opened, tmp_path, name):
    made.write(tmp_path / "b.tar")
    with pytest.raises(BundleError, match=r"not listed|leads outside"):
        opened(rewritten(tmp_path / "b.tar", lambda m: [*m, (member(name), b"x")]))
    assert not (tmp_path / "outside").exists()


def test_a_file_that_comes_twice_is_refused(made, opened, tmp_path):
    made.write(tmp_path / "b.tar")
    with pytest.raises(BundleError, match="twice"):
        opened(rewritten(tmp_path / "b.tar", lambda m: [*m, m[-1]]))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (tarfile.SYMTYPE, "is a link"),
        (tarfile.LNKTYPE, "is a hard link"),
        (tarfile.DIRTYPE, "is a folder"),
        (tarfile.FIFOTYPE, "is a fifo"),
        (tarfile.CHRTYPE, "is a device"),
    ],
)
@pytest.mark.parametrize("listed", [True, False])
def test_nothing_but_plain_files_is_taken(made, opened, tmp_path, kind, says, listed):
    made.write(tmp_path / "b.tar")
    name = min(made.files) if listed else "lock/more"
    with pytest.raises(BundleError, match=says):
        opened(rewritten(tmp_path / "b.tar", lambda m: [m[0], (member(name, kind, "/etc/passwd"), b""), *m[1:]]))


@pytest.mark.parametrize(
    "path",
    ["../x", "/x", "debs/../../x", "debs//x", "debs/./x", "x", "debs", "other/x", "debs/.git/x", "debs/a\nb", "", 5],
)
def test_a_list_that_names_no_place_of_a_bundle_is_refused(made, opened, tmp_path, path):
    made.write(tmp_path / "b.tar")

    def change(members):
        return listing_changed(members, lambda value: value["files"][0].update(path=path))

    with pytest.raises(BundleError, match=r"bundle\.json is not right"):
        opened(rewritten(tmp_path / "b.tar", change))


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.update(version=2),
        lambda value: value.update(more=1),
        lambda value: value.pop("lock"),
        lambda value: value["files"].append(value["files"][0]),
        lambda value: value["files"][0].update(size=-1),
        lambda value: value["files"][0].update(sha256="x"),
        lambda value: value["files"].append({"path": value["files"][0]["path"] + "/x", "size": 0, "sha256": "0" * 64}),
        lambda value: value.update(missing=["two\nlines"]),
    ],
)
def test_a_list_of_another_shape_is_refused(made, opened, tmp_path, change):
    made.write(tmp_path / "b.tar")
    with pytest.raises(BundleError, match=r"bundle\.json is not right"):
        opened(rewritten(tmp_path / "b.tar", lambda m: listing_changed(m, change)))


def test_a_list_without_an_end_is_refused(made, opened, tmp_path):
    made.write(tmp_path / "b.tar")
    with pytest.raises(BundleError, match=r"bundle\.json cannot be read"):
        opened(rewritten(tmp_path / "b.tar", lambda m: [(m[0][0], b"[" * 200_000), *m[1:]]))


def test_a_list_of_deep_paths_is_refused_in_time(made, opened, tmp_path):
    made.write(tmp_path / "b.tar")

    def change(value):
        value["files"] = [
            {"path": f"debs/{'a/' * 503}{number}", "size": 0, "sha256": "0" * 64} for number in range(2000)
        ]

    hostile = rewritten(tmp_path / "b.tar", lambda m: listing_changed(m, change))
    started = time.process_time()
    with pytest.raises(BundleError, match=r"bundle\.json is not right: .* more than 12 parts"):
        opened(hostile)
    assert time.process_time() - started < 3


def test_a_list_out_of_bounds_is_refused(made, opened, tmp_path):
    made.write(tmp_path / "b.tar")
    with pytest.raises(BundleError, match=r"bundle\.json is no file of at most 12582912 bytes"):
        opened(rewritten(tmp_path / "b.tar", lambda m: [(m[0][0], b" " * (13 << 20)), *m[1:]]))


def test_the_signatures_are_looked_at_before_the_list(made, opened, settings, tmp_path, pair):
    made.write(tmp_path / "b.tar")
    trusting = settings.model_copy(update={"trusted_keys": pair[1:]})
    with pytest.raises(BundleError, match="1 signature is needed, and 0"):
        opened(rewritten(tmp_path / "b.tar", lambda m: [(m[0][0], b"[" * 200_000), *m[1:]]), used=trusting)


# -- a bundle that is sound in itself, and not what its lock names


@pytest.mark.parametrize("path", ["debs/", "packages/", "cache/files/", "image/blobs/", "image/index.json", "lock/"])
def test_what_the_lock_or_the_image_names_must_be_there(made, opened, tmp_path, path):
    del made.files[next(name for name in sorted(made.files) if name.startswith(path))]
    made.write(tmp_path / "b.tar")
    with pytest.raises(LockError):
        opened(tmp_path / "b.tar")


@pytest.mark.parametrize(
    "path",
    [
        "debs/" + "0" * 64 + ".deb",
        "packages/evil-1.0-py3-none-any.whl",
        "cache/files/" + "0" * 64 + "/evil.whl",
        "cache/locks/evil/lock.json",
        "cache/built/" + "0" * 64,
        "cache/taken/" + "0" * 64,
        "cache/git/trees/x/file",
        "image/manifest.json",
        "image/blobs/sha256/" + "0" * 64,
        "lock/pylock.more.toml",
        "sources/evil.tar",
        "tool/evil.sh",
        "tool/more/evil-1.0-py3-none-any.whl",
    ],
)
def test_what_neither_the_lock_nor_the_image_names_is_refused(made, opened, tmp_path, path):
    made.add(path, "x")
    made.write(tmp_path / "b.tar")
    with pytest.raises(BundleError, match="neither its lock nor its image names"):
        opened(tmp_path / "b.tar")


@pytest.mark.parametrize("folder", ["debs/", "packages/", "cache/files/"])
def test_an_input_with_another_hash_than_the_locked_one_is_refused(made, opened, tmp_path, folder):
    path = next(name for name in sorted(made.files) if name.startswith(folder))
    made.add(path, "another content")
    made.write(tmp_path / "b.tar")
    with pytest.raises(BundleError, match="is locked"):
        opened(tmp_path / "b.tar")


def add_compiled(made, content):
    """Add a compiled wheel of this content, with the record of one that holds `a wheel`."""
    place = f"cache/wheels/te-{'0' * 32}"
    made.add(f"{place}/te-1.0-py3-none-any.whl", content)
    record = {"component": "te", "wheel": "te-1.0-py3-none-any.whl", "sha256": sha("a wheel")}
    made.add(f"{place}/record.json", json.dumps(record))


def test_a_compiled_wheel_of_what_the_lock_does_not_compile_is_refused(made, opened, tmp_path):
    add_compiled(made, "a wheel")
    made.write(tmp_path / "b.tar")
    with pytest.raises(BundleError, match="compiles no te"):
        opened(tmp_path / "b.tar")


def test_a_compiled_wheel_that_is_not_its_record_is_refused(made, opened, tmp_path):
    add_compiled(made, "another wheel")
    made.write(tmp_path / "b.tar")
    with pytest.raises(BundleError, match="is not the file of its record"):
        opened(tmp_path / "b.tar")


def test_an_image_of_another_lock_is_refused(made, opened, tmp_path):
    made.image("sha256:" + "0" * 64)
    made.write(tmp_path / "b.tar")
    with pytest.raises(LockError, match="the image is of another lock"):
        opened(tmp_path / "b.tar")


def test_an_image_whose_blob_is_another_is_refused(made, opened, tmp_path):
    path = next(
        name for name, file in made.files.items() if name.startswith("image/blobs/") and file.read_bytes() == b"a layer"
    )
    made.add(path, "a lager")
    made.write(tmp_path / "b.tar")
    with pytest.raises(LockError, match=r"is locked|damaged"):
        opened(tmp_path / "b.tar")


def test_another_image_or_lock_than_the_stated_one_is_refused(made, opened, tmp_path):
    made.write(tmp_path / "image.tar", image="sha256:" + "0" * 64)
    with pytest.raises(LockError, match="is stated"):
        opened(tmp_path / "image.tar")
    made.write(tmp_path / "lock.tar", lock="sha256:" + "0" * 64)
    with pytest.raises(BundleError, match="its lock is not"):
        opened(tmp_path / "lock.tar")


def test_an_unreadable_lock_is_refused(made, opened, tmp_path):
    made.add("lock/lock.json", "{}")
    made.write(tmp_path / "b.tar")
    with pytest.raises(BundleError, match="its lock cannot be read"):
        opened(tmp_path / "b.tar")


def test_compiled_wheels_come_along_and_are_noted_as_not_compiled_here(opened, tmp_path):
    (tmp_path / "made").mkdir()
    made = Made(tmp_path / "made", components=("te",))
    made.compiled()
    written = made.write(tmp_path / "b.tar")
    opened(tmp_path / "b.tar")
    own = Settings(cache_dir=tmp_path / "out" / "cache")
    (wheel,), faults = kept_wheels(own)
    assert (wheel.record.component, faults) == ("te", {})
    assert taken_from(own, sha("a wheel")) == f"unsigned bundle {written.sha256[:16]}"
    plan = SimpleNamespace(components=[SimpleNamespace(axis="te")], stage=lambda _: SimpleNamespace(key="0" * 64))
    assert unsigned_wheels_from(own, plan) == f"unsigned-bundle-{written.sha256[:16]}"
    assert wheels_from(own, plan) is None  # which is for what a trusted key signed


def test_compiled_wheels_of_a_signed_bundle_are_noted_as_signed(opened, settings, tmp_path, pair):
    (tmp_path / "made").mkdir()
    made = Made(tmp_path / "made", components=("te",))
    made.compiled()
    written = made.write(tmp_path / "b.tar", keys=pair[:1])
    opened(tmp_path / "b.tar", used=settings.model_copy(update={"trusted_keys": pair[1:]}))
    own = Settings(cache_dir=tmp_path / "out" / "cache")
    plan = SimpleNamespace(components=[SimpleNamespace(axis="te")], stage=lambda _: SimpleNamespace(key="0" * 64))
    assert wheels_from(own, plan) == f"bundle-{written.sha256[:16]}"
    assert unsigned_wheels_from(own, plan) is None


@pytest.mark.parametrize(
    "path",
    [
        f"cache/wheels/te-{'0' * 32}/evil-9.9-py3-none-any.whl",
        f"cache/wheels/-te-{'0' * 32}/evil-9.9-py3-none-any.whl",
        f"cache/wheels/-te-{'0' * 32}/record.json",
        f"cache/wheels/te-{'1' * 32}.json",
    ],
)
def test_only_the_wheel_of_its_record_is_next_to_it(opened, tmp_path, path):
    """A build installs every wheel of the folder."""
    (tmp_path / "made").mkdir()
    made = Made(tmp_path / "made", components=("te",))
    made.compiled()
    made.add(path, "{}")
    made.write(tmp_path / "b.tar")
    with pytest.raises(BundleError, match="neither its lock nor its image names"):
        opened(tmp_path / "b.tar")


def test_a_bundle_takes_the_wheel_of_a_record_and_nothing_next_to_it(tmp_path):
    plan = SimpleNamespace(components=[SimpleNamespace(axis="te")], stage=lambda _: SimpleNamespace(key="0" * 64))
    folder = tmp_path / "cache" / "wheels" / f"te-{'0' * 32}"
    folder.mkdir(parents=True)
    (folder / "te-1.0-py3-none-any.whl").write_text("a wheel")
    (folder / "more-1.0-py3-none-any.whl").write_text("another")
    record = {"component": "te", "wheel": "te-1.0-py3-none-any.whl", "sha256": sha("a wheel")}
    (folder / "record.json").write_text(json.dumps(record))
    found = _compiled(Settings(cache_dir=tmp_path / "cache"), plan)
    assert [path.rpartition("/")[2] for path in found] == ["record.json", "te-1.0-py3-none-any.whl"]


@pytest.fixture
def tree(tmp_path):
    folder = tmp_path / "tree"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "a.c").write_text("int a;")
    (folder / "run").write_text("#!/bin/sh")
    (folder / "run").chmod(0o755)
    (folder / "link").symlink_to("src/a.c")
    return folder


@pytest.mark.parametrize("changed", [False, True])
def test_a_source_tree_comes_along_and_is_compared_with_its_id(opened, tmp_path, tree, changed):
    (tmp_path / "made").mkdir()
    source = GitSource(name="own", url="https://x.example/own", commit="a" * 40, tree=tree_id(tree))
    made = Made(tmp_path / "made", sources=(source,))
    if changed:
        (tree / "src" / "a.c").write_text("int b;")
    place = tmp_path / "made" / source_name(source)
    pack_tree(tree, place)
    made.files[f"sources/{place.name}"] = place
    made.write(tmp_path / "b.tar")
    if changed:
        with pytest.raises(LockError, match="is not what the lock names"):
            opened(tmp_path / "b.tar")
        return
    opened(tmp_path / "b.tar")
    out = tmp_path / "out"
    store = SourceStore(settings=Settings(cache_dir=out / "cache", sources=out / "sources"))
    found = store.checkout(source)
    assert (found / "run").stat().st_mode & 0o100
    assert (found / "link").readlink() == Path("src/a.c")
    assert 'sources = "sources"' in (out / "config.toml").read_text()


# -- who made it


@pytest.fixture
def pair(tmp_path):
    folder = tmp_path / "keys"
    folder.mkdir()
    private, public = make_key_pair(folder, "release", None)
    return read_private_key(private, lambda: None), public


def test_a_trusted_key_must_have_signed_where_one_is_named(made, opened, settings, tmp_path, pair):
    private, public = pair
    trusting = settings.model_copy(update={"trusted_keys": (public,)})
    made.write(tmp_path / "plain.tar")
    with pytest.raises(BundleError, match="1 signature is needed, and 0"):
        opened(tmp_path / "plain.tar", used=trusting)
    made.write(tmp_path / "signed.tar", keys=(private,))
    found = opened(tmp_path / "signed.tar", used=trusting)
    assert found.unpacked.signers == ("release",)
    assert 'debs = "debs"' in (tmp_path / "out" / "config.toml").read_text()
    assert found.left_out == ()


def test_os_packages_of_a_bundle_that_nobody_confirms_are_not_for_a_root_on_this_host(made, opened, tmp_path, pair):
    """Their scripts would run here; a key that the settings do not trust confirms nothing."""
    made.write(tmp_path / "b.tar", keys=pair[:1])
    found = opened(tmp_path / "b.tar")
    assert "debs" not in (tmp_path / "out" / "config.toml").read_text()
    assert list((tmp_path / "out" / "debs").iterdir())  # they are there, for whoever decides otherwise
    (why,) = found.left_out
    assert why.startswith("the setting `debs`: nobody confirms who made the bundle")


def test_the_answer_says_what_is_left_out_and_why(made, tmp_path, monkeypatch):
    sha256 = made.write(tmp_path / "b.tar").sha256
    monkeypatch.setenv("HOME", str(tmp_path))
    ran = CliRunner().invoke(unbundle, [str(tmp_path / "b.tar"), str(tmp_path / "out")])
    assert "  left out  the setting `debs`: nobody confirms" in ran.output
    named = ["--sha256", sha256, "--json"]
    ran = CliRunner().invoke(unbundle, [str(tmp_path / "b.tar"), str(tmp_path / "named"), *named])
    assert json.loads(ran.stdout)["left_out"] == []


def test_the_signature_of_another_bundle_counts_for_nothing(made, opened, settings, tmp_path, pair):
    private, public = pair
    trusting = settings.model_copy(update={"trusted_keys": (public,)})
    made.write(tmp_path / "signed.tar", keys=(private,))
    made.add("tool/evil-1.0-py3-none-any.whl", "x")
    made.write(tmp_path / "other.tar")
    with tarfile.open(tmp_path / "signed.tar") as tar:
        signatures = tar.extractfile(SIGNATURES).read()
    with pytest.raises(BundleError, match="0 of the trusted keys"):
        opened(
            rewritten(tmp_path / "other.tar", lambda m: [m[0], (member(SIGNATURES), signatures), *m[1:]]),
            used=trusting,
        )


@pytest.mark.parametrize("body", [b"", b"{}", b'{"signatures": 5}', b'{"signatures": [{"payload": "x"}]}', b"[" * 9999])
def test_signatures_that_are_none_are_refused(made, opened, tmp_path, body):
    made.write(tmp_path / "b.tar")
    with pytest.raises(BundleError, match=r"signatures\.json cannot be read"):
        opened(rewritten(tmp_path / "b.tar", lambda m: [m[0], (member(SIGNATURES), body), *m[1:]]))


@pytest.mark.parametrize(
    ("name", "version"),
    [("glibc", "2"), ("glibc", "2.999999999"), ("glibc", "x.y"), ("python", "3"), ("python", "3.x")],
)
def test_a_cell_of_no_version_is_refused(opened, tmp_path, name, version):
    """Such a lock can be read; the long one would give a list of tags without an end."""
    (tmp_path / "made").mkdir()
    cell = complete(inputs_for(cuda="cpu")).lock.cell
    made = Made(tmp_path / "made", cell=cell | {name: version})
    made.write(tmp_path / "b.tar")
    with pytest.raises(LockError, match="is no version"):
        opened(tmp_path / "b.tar")


@pytest.mark.parametrize("url", ["https://x.example/", "https://x.example/%2e%2e", "https://[::::]/a"])
def test_a_lock_whose_file_has_no_name_is_refused(opened, tmp_path, url):
    (tmp_path / "made").mkdir()
    made = Made(tmp_path / "made", files=(FileSource(name="own", url=url, sha256=sha("own")),))
    made.write(tmp_path / "b.tar")
    with pytest.raises(BundleError, match="its lock names no file"):
        opened(tmp_path / "b.tar")


def test_a_name_that_no_bundle_can_hold_ends_the_writing(made, tmp_path):
    made.add("packages/with space.whl", "x")
    with pytest.raises(BundleError, match="is not right"):
        made.write(tmp_path / "b.tar")


# -- the engine


def test_an_image_of_another_lock_keeps_its_name_in_the_engine(made, opened, tmp_path, monkeypatch):
    """A bundle's maker chooses the lock, so also a cell that the user has an image of."""
    made.write(tmp_path / "b.tar")
    found = opened(tmp_path / "b.tar")
    (tmp_path / "bin").mkdir()
    docker = tmp_path / "bin" / "docker"
    stated = json.dumps([{"Id": "sha256:" + "5" * 64, "Size": 1, "RootFS": {"Layers": []}, "Config": {}}])
    docker.write_text(
        f"#!/bin/sh\necho \"$@\" >>{tmp_path}/asked\ncase $* in 'image inspect '*) echo '{stated}';; esac\n"
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with pytest.raises(LockError, match=f"another image under {found.tag}: sha256:5555"):
        load_image(EngineClient(Settings(cache_dir=tmp_path / "cache")), found)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked
    assert not [line for line in asked if line.startswith(("load", "image load"))]


# -- what goes into one


@pytest.mark.parametrize("place", ["http://127.0.0.1:{port}", "https://download.pytorch.org/whl@127.0.0.1:{port}"])
def test_an_index_that_a_lock_names_is_not_asked(tmp_path, place):
    """But PyTorch's, or this site's copy of it: a lock may come from anybody."""
    asked = []

    class Index(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        own = f"http://127.0.0.1:{server.server_port}"
        settings = Settings(cache_dir=tmp_path, index_url=f"{own}/pypi", torch_index=f"{own}/torch")

        def ask(index):
            asked.clear()
            with pytest.raises(LockError, match="no index has the wheel"):
                fetch_wheel(settings, "torch", None, "0" * 64, index, tmp_path, note=lambda _: None)
            return list(asked)

        assert ask(place.format(port=server.server_port) + "/evil") == ["/pypi/torch/"]
        assert ask("https://download.pytorch.org/whl/cpu") == ["/torch/cpu/torch/", "/pypi/torch/"]
        server.shutdown()


# -- parts


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a-1.0-py3-none-any.whl", True),
        ("a-1.0-cp311-cp311-manylinux_2_28_x86_64.whl", True),
        ("a-1.0-cp311-cp311-manylinux2014_x86_64.whl", True),
        ("a-1.0-cp39-abi3-manylinux_2_17_x86_64.whl", True),
        ("a-1.0-cp311-cp311-linux_x86_64.whl", True),
        ("a-1.0-cp311-cp311-manylinux_2_37_x86_64.whl", False),
        ("a-1.0-cp312-cp312-manylinux_2_28_x86_64.whl", False),
        ("a-1.0-cp312-abi3-manylinux_2_28_x86_64.whl", False),
        ("a-1.0-cp311-cp311-manylinux_2_28_aarch64.whl", False),
        ("a-1.0-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("no-wheel", False),
    ],
)
def test_which_wheels_a_python_can_install(name, expected):
    assert fits(name, frozenset(tags_of("3.11.2", "2.36", "x86_64"))) is expected
