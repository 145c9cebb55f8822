"""Whose each file of an image is, as an SBOM that its format's own schema accepts, and who built it."""

import io
import json
import tarfile
import time
import tracemalloc
from functools import cache

import pytest
from cell_inputs import complete, inputs_for, sha
from fake_image import SITE, fake_image

from envbuild.cli import main
from envbuild.lock.files import Locked, write_lock
from envbuild.lock.model import Lock, OsPackage
from envbuild.matrix.load import load_matrix
from envbuild.plan.plan import plan_of
from envbuild.registry.keys import make_key_pair, read_private_key
from envbuild.supply.inventory import inventory
from envbuild.supply.owners import Owned, Seen, owners_of
from envbuild.supply.sbom import sbom
from envbuild.supply.slsa import provenance
from envbuild.util.foreign_tar import TarError
from envbuild.verify.installed import hold_to_records, read_tree

IMAGE = "sha256:" + "1" * 64
LISTS = "var/lib/dpkg/info"


def packages(*names: str) -> tuple[OsPackage, ...]:
    return tuple(
        OsPackage(name=name, version="1.0", sha256=sha(f"{name}=1.0"), filename=f"pool/{name}.deb") for name in names
    )


ROOT = packages("libc6", "libc-bin", "dpkg", "mawk", "base-files", "ca-certificates", "util-linux")


class Image:
    """Files and links in a tar, on top of a tiny image of wheels."""

    def __init__(self) -> None:
        self.fake = fake_image()
        self.files = self.fake.files
        lock = self.fake.lock.model_dump() | {"root": {"suite": "bookworm", "packages": [p.model_dump() for p in ROOT]}}
        self.lock = Lock.model_validate(lock)
        locked = complete(inputs_for(cuda="cpu"))
        self.plan = plan_of(load_matrix(), Locked(lock=self.lock, pylocks=locked.pylocks))
        self.links: dict[str, str] = {}
        self.hard: dict[str, str] = {}

    def tar(self) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", errors="surrogateescape") as tar:
            for path, body in self.files.items():
                info = tarfile.TarInfo(path)
                info.size = len(body)
                tar.addfile(info, io.BytesIO(body))
            for kind, links in ((tarfile.SYMTYPE, self.links), (tarfile.LNKTYPE, self.hard)):
                for path, target in links.items():
                    info = tarfile.TarInfo(path)
                    info.type, info.linkname = kind, target
                    tar.addfile(info)
        return out.getvalue()

    def owned(self) -> Owned:
        seen = Seen()
        tree = read_tree(io.BytesIO(self.tar()), seen.take)
        return owners_of(self.plan, inventory(self.lock), seen, tree, hold_to_records(tree))

    def owner(self, path: str) -> list[str]:
        """The names of the inputs that a file belongs to."""
        return [ref.partition("@")[0] for ref, paths in self.owned().files.items() if path in paths]


def test_what_an_installer_and_python_put_there_belongs_to_the_wheel():
    image = Image()
    found = image.owned()
    assert found.unowned == ()
    torch = next(paths for ref, paths in found.files.items() if ref.startswith("wheel:torch@"))
    for name in ("torch/__init__.py", "torch/lib/core.so", "torch/__pycache__/__init__.cpython-311.pyc"):
        assert f"/{SITE}/{name}" in torch
    shared = [ref for ref, paths in found.files.items() if f"/{SITE}/shared/__init__.py" in paths]
    assert len(shared) > 1  # a file that several wheels contain belongs to each
    uv = next(paths for ref, paths in found.files.items() if ref.startswith("file:uv@"))
    assert {"/opt/venv/pyvenv.cfg", "/opt/venv/bin/activate"} <= set(uv)
    assert found.count == len(image.files)


def test_what_a_package_lists_and_its_scripts_make_belongs_to_the_package():
    image = Image()
    image.files[f"{LISTS}/libc6:amd64.list"] = b"/.\n/lib\n/lib/libc.so.6\n/etc/ld.so.conf\n"
    image.files[f"{LISTS}/libc6:amd64.postinst"] = b"#!/bin/sh\n"
    image.files[f"{LISTS}/mawk.list"] = b"/usr/bin/mawk\n"
    image.files |= {"usr/lib/libc.so.6": b"x", "etc/ld.so.conf": b"", "usr/bin/mawk": b"x", "etc/ld.so.cache": b"x"}
    image.files |= {"var/lib/dpkg/status": b"x", "etc/motd": b"", "etc/apt/sources.list": b"deb\n"}
    image.links |= {"lib": "usr/lib", "usr/bin/awk": "/etc/alternatives/awk", "etc/alternatives/awk": "/usr/bin/mawk"}
    image.hard["usr/lib/again"] = "usr/lib/libc.so.6"
    image.files[f"{LISTS}/util-linux.list"] = b"/usr/lib/again\n"
    for path, owner in {
        "/usr/lib/libc.so.6": "os-package:libc6",
        "/etc/ld.so.conf": "os-package:libc6",
        f"/{LISTS}/libc6:amd64.postinst": "os-package:libc6",
        "/usr/bin/mawk": "os-package:mawk",
        "/usr/bin/awk": "os-package:mawk",
        "/etc/alternatives/awk": "os-package:mawk",
        "/etc/ld.so.cache": "os-package:libc-bin",
        "/var/lib/dpkg/status": "os-package:dpkg",
        "/etc/motd": "os-package:base-files",
        "/etc/apt/sources.list": "envbuild:envbuild",
        "/lib": "envbuild:envbuild",
        "/usr/lib/again": "os-package:util-linux",
    }.items():
        assert image.owner(path) == [owner], path
    assert image.owned().unowned == ()


def test_what_envbuild_puts_next_to_the_packages_has_an_owner():
    image = Image()
    image.files |= {"usr/local/bin/uv": b"x", "usr/local/bin/pip": b"x", "opt/envbuild/constraints.txt": b"x"}
    assert image.owner("/usr/local/bin/uv") == ["file:uv"]
    assert image.owner("/usr/local/bin/pip") == image.owner("/opt/envbuild/constraints.txt") == ["envbuild:envbuild"]
    compiled = f"{SITE}/__pycache__/_envbuild_home.cpython-311.pyc"
    home = [f"{SITE}/_envbuild_home.py", f"{SITE}/_envbuild_home.pth", compiled]
    image.files |= dict.fromkeys(home, b"x")
    assert [image.owner(f"/{path}") for path in home] == [["envbuild:envbuild"]] * 3
    assert image.owned().unowned == ()


def test_what_belongs_to_nobody_is_listed():
    image = Image()
    image.files |= {"usr/bin/planted": b"x", "opt/envbuild/planted": b"x", f"{SITE}/planted.py": b"x"}
    image.files[f"{SITE}/__pycache__/planted.cpython-311.pyc"] = b"x"
    image.files[f"{LISTS}/planted.list"] = b"/usr/bin/of-planted\n"  # a package that the lock does not name
    image.files |= {"usr/bin/of-planted": b"x", "etc/pam.d/common-auth": b"x"}  # of a package that is not there
    image.files[f"{LISTS}/mawk.list"] = b"/usr/bin/mawk\n"
    image.files["usr/bin/mawk"] = b"x"
    image.links |= {"usr/local/bin/ls": "/usr/bin/mawk", "etc/alternatives/loop": "/etc/alternatives/loop"}
    image.links["etc/alternatives/out"] = "../../../../nowhere"
    image.files |= {".dockerenv": b"", "etc/hosts": b"10.0.0.1 mirror"}  # an engine's own are empty
    image.links["etc/mtab"] = "/proc/mounts"
    assert set(image.owned().unowned) == {
        "/usr/bin/planted",
        "/opt/envbuild/planted",
        f"/{SITE}/planted.py",
        f"/{SITE}/__pycache__/planted.cpython-311.pyc",
        f"/{LISTS}/planted.list",
        "/usr/bin/of-planted",
        "/etc/pam.d/common-auth",
        "/usr/local/bin/ls",
        "/etc/alternatives/loop",
        "/etc/alternatives/out",
        "/etc/hosts",
    }


def test_a_distribution_that_the_lock_does_not_name_belongs_to_nobody():
    image = Image()
    image.files[f"{SITE}/evil-1.0.dist-info/RECORD"] = b"evil.py,,\nevil-1.0.dist-info/RECORD,,\n"
    image.files[f"{SITE}/evil.py"] = b"x"
    assert set(image.owned().unowned) == {f"/{SITE}/evil.py", f"/{SITE}/evil-1.0.dist-info/RECORD"}


def test_a_record_of_another_folder_takes_no_file_that_is_not_there():
    """A RECORD may name what it likes; only files of the image are listed."""
    image = Image()
    name = next(path for path in image.files if path.endswith(".dist-info/RECORD") and "_vendor" not in path)
    image.files[name] += b"../../../../../../etc/nowhere,,\n"
    assert "/etc/nowhere" not in {path for paths in image.owned().files.values() for path in paths}


def test_paths_that_are_no_text_are_listed_as_text():
    image = Image()
    image.files["usr/bin/\udcff"] = b"x"
    assert image.owned().unowned == ("/usr/bin/\\xff",)
    json.loads(sbom(image.lock, inventory(image.lock), image=IMAGE, owned=image.owned()))


def test_lists_out_of_bounds_are_refused(monkeypatch):
    import envbuild.supply.owners as module

    monkeypatch.setattr(module, "_LISTS_LIMIT", 1000)
    image = Image()
    image.files[f"{LISTS}/libc6.list"] = b"/x\n" * 1000
    with pytest.raises(TarError, match="dpkg's lists"):
        image.owned()


def test_a_path_with_odd_characters_is_one_line_of_a_list():
    """Only a line feed ends a line of dpkg's lists."""
    image = Image()
    image.files[f"{LISTS}/libc6.list"] = "/usr/lib/a\x85b\x0bc\u2028d\n/usr/lib/e".encode()
    image.files |= {"usr/lib/a\x85b\x0bc\u2028d": b"x", "usr/lib/e": b"x"}
    assert image.owned().unowned == ()


def test_the_lists_of_a_hostile_image_take_little_room_and_time():
    """Many short lines in many lists of one package; as lists of text they took thirty times their size."""
    image = Image()
    image.files |= {f"{LISTS}/libc6:a{number}.list": b"/\n" * 1000 for number in range(1000)}
    seen = Seen()
    tree = read_tree(io.BytesIO(image.tar()), seen.take)
    installed, inputs = hold_to_records(tree), inventory(image.lock)
    tracemalloc.start()
    try:
        owners_of(image.plan, inputs, seen, tree, installed)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 2 << 20


# ---- the SBOM


@cache
def validator():
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.V1_6)


def valid(body: bytes) -> dict:
    """The SBOM, which the format's schema accepts."""
    assert validator().validate_str(body.decode()) is None
    return json.loads(body)


def test_an_image_s_sbom_has_its_inputs_and_their_files():
    image = Image()
    image.files["usr/bin/planted"] = b"x"
    owned, inputs = image.owned(), inventory(image.lock)
    body = sbom(image.lock, inputs, image=IMAGE, owned=owned)
    assert sbom(image.lock, inputs, image=IMAGE, owned=image.owned()) == body
    found = valid(body)
    by_ref = {each["bom-ref"]: each for each in found["components"]}
    assert by_ref.keys() == {each.ref for each in inputs} | {"none:/usr/bin/planted"}
    places = [each["location"] for c in found["components"] for each in c.get("evidence", {}).get("occurrences", ())]
    assert set(places) | {"/usr/bin/planted"} == {f"/{path}" for path in image.files}
    torch = next(each for ref, each in by_ref.items() if ref.startswith("wheel:torch@"))
    (package,) = [p for s in image.lock.python for p in s.packages if p.name == "torch"]
    assert torch["hashes"] == [{"alg": "SHA-256", "content": package.hashes[0]}]
    assert torch["purl"].startswith("pkg:pypi/torch@")
    assert by_ref["os-package:dpkg@1.0?arch=amd64"]["purl"] == "pkg:deb/debian/dpkg@1.0?arch=amd64&distro=debian-12"
    stated = {each["name"]: each["value"] for each in found["metadata"]["component"]["properties"]}
    assert stated == {"io.envbuild.image": IMAGE, "io.envbuild.lock": image.lock.digest}


def test_many_files_of_no_input_take_little_time():
    """8,000 of them took half a minute, as the library compares each component with the others."""
    image = Image()
    unowned = tuple(f"/usr/bin/planted-{number}" for number in range(20_000))
    inputs = inventory(image.lock)
    began = time.process_time()
    body = sbom(image.lock, inputs, image=IMAGE, owned=Owned(files={}, unowned=unowned))
    assert time.process_time() - began < 10
    found = json.loads(body)
    assert {f"none:{path}" for path in unowned} <= {each["bom-ref"] for each in found["components"]}
    assert len(found["dependencies"]) == len(unowned) + len(inputs) + 1


def test_two_paths_that_print_alike_are_one_component():
    lock = Image().lock
    body = sbom(lock, inventory(lock), image=IMAGE, owned=Owned(files={}, unowned=("/a\\xff", "/a\\xff")))
    assert [each["name"] for each in valid(body)["components"]].count("/a\\xff") == 1


def test_every_input_of_a_lock_is_in_its_sbom():
    """A cell with compiled wheels, source trees and files."""
    lock = complete(inputs_for(cuda="13.0", te="2.12", gpu="h100")).lock
    inputs = inventory(lock, {"te": {"sha256": "a" * 64}})
    found = valid(sbom(lock, inputs))
    refs = {each["bom-ref"]: each for each in found["components"]}
    hashes = {text for each in found["components"] for text in (h["content"] for h in each.get("hashes", ()))}
    locked = [p.sha256 for s in lock.os for p in s.packages] + [p.sha256 for p in lock.root.packages]
    locked += [h for s in lock.python for p in s.packages for h in p.hashes]
    locked += [f.sha256 for f in (lock.uv, *lock.files)]
    assert set(locked) | {"a" * 64} == hashes
    for source in lock.sources:
        component = refs[f"source:{source.name}@{source.commit}"]
        assert component["scope"] == "excluded"  # it takes part in the build alone
        assert {"name": "io.envbuild.git-tree", "value": source.tree} in component["properties"]
    made_from = {each["ref"]: each.get("dependsOn", []) for each in found["dependencies"]}
    for axis in lock.components:
        ref = next(ref for ref in refs if ref.startswith(f"compiled-wheel:{axis}@"))
        assert made_from[ref], axis
        assert ref in made_from["image"]


@pytest.mark.parametrize("choice", ["training", "none"])
def test_a_compiled_wheel_states_the_choice_of_its_kernels(choice):
    lock = complete(inputs_for(cuda="13.0", te="2.12", gpu="h100", flash_attn_hopper="3.0.0", fa3_kernels=choice)).lock
    stated = {
        each["name"]: [p["value"] for p in each["properties"] if p["name"] == "io.envbuild.fa3-kernels"]
        for each in valid(sbom(lock, inventory(lock)))["components"]
        if each["bom-ref"].startswith("compiled-wheel:")
    }
    assert stated.pop("flash-attn-hopper") == ([choice] if choice != "none" else [])
    assert not any(stated.values())


@pytest.mark.parametrize(
    "url",
    [
        "https://github.com/foo",
        "https://github.com",
        "https://github.com/a//.git",
        "https://github.com/.git",
        "https://[::::]/x.git",
        "https://[::1]:99999/x.git",
        "file:///x",
    ],
)
def test_a_lock_whose_sources_have_odd_addresses_has_an_sbom(url):
    """A lock may name any address of the right characters."""
    lock = complete(inputs_for(cuda="13.0", te="2.12", gpu="h100")).lock
    value = lock.model_dump(mode="json")
    value["sources"] = [each | {"url": url, "submodules": []} for each in value["sources"]]
    if url.startswith("https:"):
        value["uv"]["url"] = url
        value["files"] = [each | {"url": url} for each in value["files"]]
    odd = Lock.model_validate(value)
    assert odd.sources
    found = valid(sbom(odd, inventory(odd)))
    purls = {each["purl"] for each in found["components"] if each["bom-ref"].startswith("source:")}
    assert all(purl.startswith("pkg:generic/") for purl in purls)


@pytest.mark.parametrize("sha256", ["", "x", "A" * 64, "a" * 63, "a" * 64 + "\n", "\x1b[2J", 5, None, ["a" * 64]])
def test_what_an_image_states_as_the_hash_of_a_compiled_wheel_is_a_hash_or_left_out(sha256):
    lock = complete(inputs_for(cuda="13.0", te="2.12", gpu="h100")).lock
    inputs = inventory(lock, {"te": {"sha256": sha256}})
    (wheel,) = [each for each in inputs if (each.kind, each.name) == ("compiled-wheel", "te")]
    assert wheel.sha256 == ()
    valid(sbom(lock, inputs))


@pytest.mark.parametrize(
    ("url", "start"),
    [("https://github.com/a/b.git", "pkg:github/a/b@"), ("https://github.com/a/b/", "pkg:github/a/b@")],
)
def test_a_source_on_github_has_its_package_url(url, start):
    lock = complete(inputs_for(cuda="13.0", te="2.12", gpu="h100")).lock
    value = lock.model_dump(mode="json")
    value["sources"] = [each | {"url": url, "submodules": []} for each in value["sources"][:1]]
    odd = Lock.model_validate(value)
    found = json.loads(sbom(odd, inventory(odd)))
    (purl,) = [each["purl"] for each in found["components"] if each["bom-ref"].startswith("source:")]
    assert purl.startswith(start)


# ---- what is printed


@pytest.mark.parametrize("command", ["sbom", "sbom --json"])
def test_the_printed_sbom_is_the_one_that_a_file_gets(command, tmp_path, capsys):
    """What people read is masked and escaped; this is a document, and others compare its bytes."""
    locked = complete(inputs_for(cuda="cpu"))
    uv = locked.lock.uv.model_copy(update={"url": f"{locked.lock.uv.url}?token=abc&x=://a@b"})
    write_lock(Locked(lock=locked.lock.model_copy(update={"uv": uv}), pylocks=locked.pylocks), tmp_path / "lock")
    printed = []
    for words in (command.split(), ["sbom", "--output", str(tmp_path / "sbom.json")]):
        with pytest.raises(SystemExit) as ended:
            main([*words, str(tmp_path / "lock")])
        assert not ended.value.code
        printed.append(capsys.readouterr().out)
    body = (tmp_path / "sbom.json").read_text()
    assert "token=abc&x=://a@b" in body
    if command == "sbom":
        assert printed[0] == body
    else:
        assert json.loads(printed[0])["document"] == json.loads(body)


# ---- provenance


def test_provenance_names_the_image_the_lock_its_inputs_and_the_builder(tmp_path):
    lock = complete(inputs_for(cuda="13.0", te="2.12", gpu="h100")).lock
    key = read_private_key(make_key_pair(tmp_path, "a", None)[0], lambda: None).public
    inputs = inventory(lock)
    layers = ["sha256:" + "2" * 64]
    body = provenance(lock, inputs, image=IMAGE, layers=layers, builder=key.builder, wheels_from="r.example/w")
    found = json.loads(body)
    assert (found["_type"], found["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        "https://slsa.dev/provenance/v1",
    )
    assert found["subject"] == [{"name": lock.as_cell.id, "digest": {"sha256": "1" * 64}}]
    definition = found["predicate"]["buildDefinition"]
    assert set(definition) == {"buildType", "externalParameters", "internalParameters", "resolvedDependencies"}
    first, *rest = definition["resolvedDependencies"]
    assert (first["name"], first["digest"]) == ("lock", {"sha256": lock.digest.removeprefix("sha256:")})
    made = {each.ref for each in inputs if each.kind in {"compiled-wheel", "envbuild"}}
    assert {each["name"] for each in rest} == {each.ref for each in inputs} - made
    assert all(each.get("digest") or each["annotations"].get("sha256Any") for each in rest)
    run = found["predicate"]["runDetails"]
    assert run["builder"]["id"].startswith("urn:envbuild:key:sha256:")
    assert run["byproducts"] == [{"name": "layers/0", "digest": {"sha256": "2" * 64}}]
    assert definition["internalParameters"] == {"compiledWheelsFrom": "r.example/w"}
