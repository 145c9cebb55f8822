"""What `reproduce` compares with, where it is a file or a folder: the lock that it carries, and its files. None of it is trusted."""

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from cell_inputs import complete, inputs_for
from saved_images import GZIP, PLAIN, ZSTD, Image, layer, packed

from envbuild.engine import apptainer, originals
from envbuild.engine.image import Label, image_of
from envbuild.engine.layers import read_image
from envbuild.engine.originals import InArchive, InFolder, open_original
from envbuild.engine.reproduce import COMPRESSION, Difference, Reproduction, between
from envbuild.errors import EnvbuildError, HostError, LockError, UsageError
from envbuild.lock.files import Locked, write_lock
from envbuild.run.apptainer import ApptainerRuntime
from envbuild.settings import Settings
from envbuild.util.foreign_tar import read_tar

ODD = "etc/F\u0151tan\u00fas\u00edtv\u00e1ny = [1].crt"


@pytest.fixture(scope="module")
def locked() -> Locked:
    return complete(inputs_for(cuda="cpu"))


@pytest.fixture
def files(locked: Locked, tmp_path: Path) -> dict[str, bytes]:
    folder = write_lock(locked, tmp_path / "lock")
    folder = folder if folder.is_dir() else folder.parent
    return {f"opt/envbuild/{each.name}": each.read_bytes() for each in folder.iterdir()}


def image(locked: Locked, *layers: bytes, media_type: str = GZIP, label: str | None = "") -> Image:
    stated = {} if label is None else {"io.envbuild.lock": label or locked.lock.digest}
    config = {"os": "linux", "architecture": "amd64", "config": {"Labels": stated}}
    return Image(*((media_type, packed(body, media_type)) for body in layers), config=config)


def archive(made: Image, folder: Path) -> InArchive:
    return InArchive(name="x.oci.tar", path=made.write(folder), kind="archive")


@pytest.mark.parametrize("media_type", [ZSTD, GZIP, PLAIN])
def test_the_lock_of_an_archive_is_that_of_its_last_layer(locked, files, tmp_path, media_type) -> None:
    old = layer(("opt/", None), *((name, b"old") for name in files), ("opt/envbuild/other", b"x"))
    found = archive(image(locked, old, layer(*files.items()), media_type=media_type), tmp_path)
    assert found.locked().lock.digest == locked.lock.digest
    assert found.digest_from == "blobs"


def test_a_layout_is_read_as_its_archive(locked, files, tmp_path) -> None:
    made = image(locked, layer(*files.items()))
    folder = tmp_path / "layout"
    (folder / "blobs" / "sha256").mkdir(parents=True)
    for digest, body in made.blobs.items():
        (folder / "blobs" / "sha256" / digest).write_bytes(body)
    (folder / "index.json").write_text(json.dumps(made.index))
    (folder / "oci-layout").write_text("{}")
    with open_original(Settings(cache_dir=tmp_path), str(folder)) as found:
        assert found.digest == archive(made, tmp_path).digest
        assert found.locked().lock.digest == locked.lock.digest


@pytest.mark.parametrize(
    "above",
    [
        layer(("opt/envbuild/.wh.lock.json", b"")),
        layer(("opt/envbuild/.wh..wh..opq", b"")),
        layer(("opt/.wh.envbuild", b"")),
        layer(("opt/.wh..wh..opq", b"")),
        layer((".wh.opt", b"")),
        layer(("opt/envbuild", "/tmp")),
        layer(("opt", b"a file")),
    ],
)
def test_a_lock_that_an_upper_layer_takes_away_is_none(locked, files, tmp_path, above) -> None:
    found = archive(image(locked, layer(*files.items()), above), tmp_path)
    with pytest.raises(LockError, match="there is none in /opt/envbuild"):
        found.locked()


def test_a_lock_that_is_not_what_the_image_states(locked, files, tmp_path) -> None:
    good = layer(*files.items())
    with pytest.raises(UsageError, match="contains no lock"):
        archive(image(locked, good, label=None), tmp_path).locked()
    with pytest.raises(LockError, match="its label says sha256:00"):
        archive(image(locked, good, label="sha256:00"), tmp_path).locked()
    with pytest.raises(LockError, match="no regular file"):
        archive(image(locked, layer(("opt/envbuild/lock.json", "/etc/passwd"))), tmp_path).locked()
    with pytest.raises(LockError, match="cannot be read"):
        archive(image(locked, layer(("opt/envbuild/lock.json", b"{"))), tmp_path).locked()


def test_a_damaged_layer_is_named_with_the_file(locked, files, tmp_path) -> None:
    made = image(locked, layer(*files.items()))
    digest = made.manifest["layers"][0]["digest"].removeprefix("sha256:")
    made.blobs[digest] = made.blobs[digest][:-9] + b"ENVBUILD!"
    with pytest.raises(LockError) as caught:
        archive(made, tmp_path).locked()
    assert caught.value.where == "x.oci.tar"


def sandbox(folder: Path, files: dict[str, bytes]) -> Path:
    root = folder / "box"
    for name, body in (files | {".singularity.d/labels.json": b"{}", "etc/issue": b"one", ODD: b"1"}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(body)
        (root / name).chmod(0o644)
    for each in [root, *root.rglob("*")]:
        if each.is_dir():
            each.chmod(0o755)
    return root


def original(root: Path, locked: Locked, digest: str = f"sha256:{'a' * 64}") -> InFolder:
    return InFolder(name="box/", digest=digest, label=locked.lock.digest, root=root)


def test_the_lock_of_a_sandbox_is_read_without_following_a_link(locked, files, tmp_path) -> None:
    root = sandbox(tmp_path, files)
    assert original(root, locked).locked().lock.digest == locked.lock.digest
    (root / "opt/envbuild/lock.json").rename(tmp_path / "lock.json")
    (root / "opt/envbuild/lock.json").symlink_to(tmp_path / "lock.json")
    with pytest.raises(LockError, match="there is none"):
        original(root, locked).locked()


def test_a_sandbox_is_compared_file_by_file(locked, files, tmp_path) -> None:
    root = sandbox(tmp_path, files)
    folders = [(f"{each}/", None) for each in ("etc", "opt", "opt/envbuild")]
    body = layer_with_modes(folders, files | {"etc/issue": b"one", ODD: b"1"})
    again = read_image(image(locked, body).write(tmp_path), "again")

    def found() -> list[Difference]:
        return list(between(original(root, locked), again, ("box/", "again")))

    assert found() == []
    (root / "etc" / "hosts").write_bytes(b"")  # Apptainer's, where the image has none
    (root / ".singularity.d" / "env").mkdir()
    assert found() == []
    (root / "etc" / "hosts").write_bytes(b"10.0.0.1 pypi.org")
    (root / "etc" / "resolv.conf").symlink_to("/etc/issue")
    assert {each.path for each in found()} == {"etc/hosts", "etc/resolv.conf"}  # Apptainer's are empty files
    (root / "etc" / "hosts").unlink()
    (root / "etc" / "resolv.conf").unlink()
    (root / "etc" / "issue").write_bytes(b"two")
    (root / "etc" / "more").symlink_to("issue")
    (root / "opt" / "envbuild" / "lock.json").chmod(0o755)
    assert {(each.path, each.what.split()[0]) for each in found()} == {
        ("etc/issue", "sha256"), ("etc/more", "only"), ("opt/envbuild/lock.json", "mode"),
    }  # fmt: skip


def test_files_are_compared_by_their_whole_hash(locked, tmp_path) -> None:
    body, root = b"one", sandbox(tmp_path, {})
    again = read_image(image(locked, layer_with_modes([], {"etc/issue": body})).write(tmp_path), "again")
    # two files that share half of a hash's first half can be made; of these, equality is all that decides
    whole = hashlib.sha256(body).hexdigest()
    assert again.files["etc/issue"].sha256 == original(root, locked).contents()["etc/issue"].sha256 == whole


def test_what_has_the_name_of_apptainers_links_and_is_none_is_compared(locked, tmp_path) -> None:
    root = sandbox(tmp_path, {})
    body = layer_with_modes([("etc/", None)], {"etc/issue": b"one", ODD: b"1"})
    again = read_image(image(locked, body).write(tmp_path), "again")

    def found() -> set[str]:
        return {each.path for each in between(original(root, locked), again, ("box/", "again"))}

    (root / ".exec").symlink_to(".singularity.d/actions/exec")
    (root / "singularity").symlink_to(".singularity.d/runscript")
    assert found() == set()
    (root / "environment").mkdir()
    (root / "environment" / "more.py").write_bytes(b"")
    (root / ".run").write_bytes(b"")
    (root / ".test").symlink_to("/etc/issue")
    (root / ".shell").symlink_to(".singularity.d/../etc/issue")
    assert found() == {"environment", "environment/more.py", ".run", ".test", ".shell"}


def test_what_is_compared_and_not_of_a_sandbox_is_stated() -> None:
    by_label, by_blobs = (
        Reproduction(digest="a", again="a", seconds=1, differences=(), digest_from=each) for each in ("label", "blobs")
    )
    assert "/.singularity.d" in by_label.not_compared[0]
    assert by_blobs.not_compared == ()


def test_an_audit_reads_what_has_the_name_of_apptainers_links(tmp_path) -> None:
    """The same as `reproduce`: a folder `environment` of the image's is none of Apptainer's."""
    root = sandbox(tmp_path, {})
    (root / ".exec").symlink_to(".singularity.d/actions/exec")
    (root / "environment").mkdir()
    (root / "environment" / "more.py").write_bytes(b"x")
    (root / ".run").write_bytes(b"")
    image = image_of(Label(digest=f"sha256:{'a' * 64}"), reference="box/", place=root, confirmed_by="label")
    with ApptainerRuntime(Settings(cache_dir=tmp_path)).export(image, seconds=60) as stream:
        found = {member.path for member in read_tar(stream)}
    assert {"environment/more.py", ".run", "etc/issue"} <= found
    assert not {each for each in found if each.startswith((".singularity.d", ".exec"))}


def test_an_audit_reads_a_root_with_more_names_than_a_command_line_holds(tmp_path) -> None:
    root = tmp_path / "box"
    root.mkdir()
    names = {"-x", "--checkpoint=1", "a\nb", *(f"{number:06}{'x' * 200}" for number in range(15_000))}
    for name in names:
        (root / name).touch()
    image = image_of(Label(digest=f"sha256:{'a' * 64}"), reference="box/", place=root, confirmed_by="label")
    with ApptainerRuntime(Settings(cache_dir=tmp_path)).export(image, seconds=60) as stream:
        assert {member.path for member in read_tar(stream)} == names


def test_files_of_a_lock_that_are_too_many_are_refused(locked, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(originals, "_LOCK_BYTES", 1 << 10)
    many = layer(*((f"opt/envbuild/pylock.s{number}.toml", bytes(1000)) for number in range(100)))
    with pytest.raises(LockError, match="more than"):
        archive(image(locked, many), tmp_path).locked()


def layer_with_modes(folders: list[tuple[str, None]], files: dict[str, bytes]) -> bytes:
    """As `layer`, folders with the mode of folders, and a hard link that a sandbox has as a file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, _ in folders:
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime, info.uid = len(body), 0o644, 7, 5
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


def test_a_hard_link_of_a_layer_is_a_file_of_a_sandbox(locked, tmp_path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("one")
        info.size, info.mode = 1, 0o644
        tar.addfile(info, io.BytesIO(b"1"))
        link = tarfile.TarInfo("two")
        link.type, link.linkname = tarfile.LNKTYPE, "one"
        tar.addfile(link)
    again = read_image(image(locked, out.getvalue()).write(tmp_path), "again")
    root = tmp_path / "root"
    root.mkdir()
    (root / "one").write_bytes(b"1")
    (root / "one").chmod(0o644)
    os.link(root / "one", root / "two")
    assert list(between(original(root, locked), again, ("box/", "again"))) == []


def listed(made: Image, *others: str) -> Image:
    """Put the image and others, by their platforms, into a list whose digest is then the archive's; the others are elsewhere."""
    own = made.index["manifests"][0] | {"platform": {"os": "linux", "architecture": "amd64"}}
    more = [
        made.blob(f"other {number}".encode()) | {"platform": {"os": "linux", "architecture": each}}
        for number, each in enumerate(others)
    ]
    for each in more:
        del made.blobs[each["digest"].removeprefix("sha256:")]
    made.index = {"manifests": [made.blob(json.dumps({"manifests": [own, *more]}).encode())]}
    return made


def test_the_digest_of_a_list_of_several_images_is_not_that_of_a_rebuilt_one(
    locked, files, tmp_path, monkeypatch
) -> None:
    """Who signs for it would sign for the others."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    body = layer(*files.items())
    again = read_image(image(locked, body, media_type=ZSTD).write(tmp_path, "again.tar"), "again")

    def differences(*others: str) -> list[Difference]:
        return list(between(archive(listed(image(locked, body), *others), tmp_path), again, ("x.oci.tar", "again")))

    assert differences() == [COMPRESSION]
    assert differences("unknown") == [COMPRESSION]  # what BuildKit states of an image
    for others in (["arm64"], ["arm64", "unknown"], ["arm", "arm"]):
        (found,) = differences(*others)
        assert found.path == "(list)"
        assert not Reproduction(digest="a", again="b", seconds=1, differences=(found,)).same_layers
    for platform in ("amd64", "x86_64", ""):  # the registry's readers may take the other one
        with pytest.raises(LockError, match="two images for one platform"):
            differences(platform)


def test_a_label_that_states_the_digest_proves_nothing_by_itself() -> None:
    one, other = f"sha256:{'a' * 64}", Difference(path="etc/issue", what="sha256 1 / 2")
    lying = Reproduction(digest=one, again=one, seconds=1, differences=(other,), digest_from="label")
    assert not lying.equal
    assert not lying.same_layers
    assert Reproduction(digest=one, again=one, seconds=1, differences=(), digest_from="label").equal


def test_a_path_without_an_image_and_a_sandbox_without_a_label(locked, files, tmp_path, monkeypatch) -> None:
    settings = Settings(cache_dir=tmp_path)
    with pytest.raises(UsageError, match="does not exist"), open_original(settings, str(tmp_path / "none.sif")):
        pass
    root = sandbox(tmp_path, files)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match="apptainer is missing"), open_original(settings, str(root)):
        pass
    monkeypatch.setattr(apptainer, "program", lambda: "apptainer")
    with pytest.raises(UsageError, match="does not say which OCI image"), open_original(settings, str(root)):
        pass
    config = {"config": {"Labels": {"io.envbuild.lock": locked.lock.digest}}}
    text = json.dumps({"digest": f"sha256:{'b' * 64}", "config": config})
    (root / ".singularity.d" / "labels.json").write_text(json.dumps({apptainer.LABEL: text}))
    with open_original(settings, str(root)) as found:
        assert (found.digest, found.digest_from) == (f"sha256:{'b' * 64}", "label")
        assert found.locked().lock.digest == locked.lock.digest
    for odd in ("[]", "{}", json.dumps({"digest": "sha256:b"}), "[" * 100_000, "\ud800"):
        (root / ".singularity.d" / "labels.json").write_text(json.dumps({apptainer.LABEL: odd}))
        with pytest.raises(EnvbuildError), open_original(settings, str(root)):
            pass
