"""Image -> audit: what an image holds, held against its lock, without a GPU.

Two looks. One from outside reads the image's files as the engine hands them over, and needs no trust in the image. The
other runs a probe in the image's own Python, which alone can say what imports; it is confined, and its words are only
taken for what the first look cannot see.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from envbuild.engine.client import said_last
from envbuild.engine.guest import export, look_up, run_guest
from envbuild.engine.image import Image
from envbuild.errors import AuditError
from envbuild.lock.model import Lock
from envbuild.paths import data_dir
from envbuild.settings import Settings
from envbuild.util.foreign_tar import TarError
from envbuild.util.names import shown
from envbuild.verify.installed import (
    CARRIED,
    VENV,
    Installed,
    Tree,
    hold_to_records,
    hold_to_wheel,
    read_tree,
)
from envbuild.verify.probe import LIMIT, canonical, read_expectation, read_probe
from envbuild.verify.wheels import Wheels

# What only the driver brings: on a machine without one, a module that needs it fails to load for that reason alone.
_DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
_SIZE_LIMIT = 1.05
# Where NVIDIA's images and ours have the CUDA toolkit.
_TOOLKIT = "/usr/local/cuda"
_PROBE_S = 900.0
"""Seconds that the probe may take: it imports every package, from a cold disk perhaps."""
_EXPORT_S = 3600.0
"""Seconds that the engine may take to hand the files over; 5.5 GB take half a minute."""
_FAULTS_SHOWN = 20
_VOLUMES = 64
"""Volumes that an image may declare: the engine makes each of them for every container."""
_OWN = (f"/{VENV}", f"/{CARRIED}", "/opt/python")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at. `unproven` is what this machine cannot decide."""

    name: str
    verdict: Literal["passed", "failed", "unproven"]
    text: str


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found."""

    image: str
    digest: str
    """Of what was looked at: the tag may name another image by now."""
    checks: tuple[Check, ...]
    facts: dict[str, Any]

    @property
    def defects(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(c for c in self.checks if c.verdict == "failed")

    def raise_for_defects(self) -> None:
        """Raise AuditError naming every defect, unless there is none."""
        if self.defects:
            lines = "".join(f"\n  - {c.name}: {c.text}" for c in self.defects)
            raise AuditError(
                f"the image has {len(self.defects)} defects{lines}",
                where=f"{self.image} ({self.digest})",
                hint="it is not what its lock says; build it again",
            )

    def as_json(self) -> dict[str, Any]:
        """Return the audit as JSON values."""
        return {
            "image": self.image,
            "digest": self.digest,
            "defects": len(self.defects),
            "checks": [{"name": c.name, "verdict": c.verdict, "text": c.text} for c in self.checks],
            "size": {"bytes": self.facts.get("bytes"), "installed_bytes": self.facts.get("installed_bytes")},
        }


def audit(settings: Settings, image: str, *, deep: bool = False, note: Callable[[str], None] = lambda _: None) -> Audit:
    """Look into `image` and hold it against the expectation that it carries.

    Args:
        settings: say where the engine is, and the caches and indexes.
        image: its tag, digest or id.
        deep: bring each locked wheel whose RECORD is not kept here yet, to hold the installed files against it.
        note: told what takes its time.

    Raises:
        HostError: no engine, or no such image; with `deep`, an index that cannot be reached.
        AuditError: the image has no Python, or no expectation: it was not made by envbuild. Or it says what cannot be read.
        LockError: with `deep`, no index has a locked wheel.

    """
    found = look_up(settings, image)
    if len(found.volumes) > _VOLUMES:
        raise AuditError(
            f"the image declares {len(found.volumes)} volumes", where=image, hint="no image of envbuild has one"
        )
    facts = _probe(settings, found)
    if facts["expected"] is None:
        raise AuditError(
            "the image does not say what it is meant to hold",
            where=f"{image}: /{CARRIED}/expected.json",
            hint="audit takes images that envbuild built",
        )
    note("reading the image's files")
    tree = _tree(settings, found)
    installed = hold_to_records(tree)
    facts |= {
        "compilers": tree.compilers,
        "cuda_runtimes": tree.cuda_runtimes,
        "caches": tree.caches,
        "caches_total": tree.caches_total,
        # what the image's Python does not name, and what lies there all the same
        "distributions": {d.name: d.version for d in installed.distributions} | facts["distributions"],
    }
    lock, carried = _carried(tree, found, facts)
    wheels = Wheels(settings)
    if deep and lock is not None:
        _fetch(settings, wheels, lock, note)
    checks = (
        carried,
        *judge(facts),
        *([_volumes(found)] if found.volumes else []),
        _files(installed, facts),
        _unlisted(installed, facts["expected"]),
        _locked(installed, tree, lock, facts, wheels),
    )
    return Audit(image=image, digest=found.digest, checks=checks, facts=facts)


def _probe(settings: Settings, image: Image) -> dict[str, Any]:
    probe = (data_dir("dockerfiles") / "recipe" / "image-probe").read_bytes()
    word = uuid.uuid4().hex
    hint = "audit takes images that envbuild built"
    # The image's own entry point has no say: it would run instead.
    said = run_guest(
        settings,
        "audit",
        image,
        ["-", word],
        entrypoint="python",
        seconds=_PROBE_S,
        limit=LIMIT,
        stdin=probe,
    )
    if said.fault:
        raise AuditError(f"the image's Python {said.fault}", where=image.reference, hint=hint)
    if said.code:
        last = said_last(said)
        raise AuditError(
            "the image's Python does not run" + (f": {last}" if last else ""), where=image.reference, hint=hint
        )
    try:
        return read_probe(said.out, word)
    except ValueError as error:
        raise AuditError(
            f"what the image's Python says cannot be read: {error}", where=image.reference, hint=hint
        ) from None


def _tree(settings: Settings, image: Image) -> Tree:
    try:
        with export(settings, image, seconds=_EXPORT_S) as stream:
            return read_tree(stream)
    except TarError as error:
        raise AuditError(f"the image's files cannot be read: {error}", where=image.reference) from None
    except TimeoutError as error:
        raise AuditError(f"reading the image's files {error}", where=image.reference) from None


def _carried(tree: Tree, image: Image, facts: Mapping[str, Any]) -> tuple[Lock | None, Check]:
    """Return the lock that the image carries, and whether all that the image says of its lock is the same."""
    faults = []
    label, lock = image.labels.get("io.envbuild.lock"), None
    try:
        stated = read_expectation(tree.carried.get("expected.json", b"").decode("utf-8", "replace"))
        if canonical(stated) != canonical(facts["expected"]):
            faults.append("its Python reads another expected.json than its files hold")
        if label != stated.get("lock_digest"):
            faults.append(
                f"its label names the lock {shown(str(label))}, its expected.json {shown(str(stated.get('lock_digest')))}"
            )
    except ValueError as error:
        faults.append(f"/{CARRIED}/expected.json cannot be read: {error}")
    try:
        lock = Lock.model_validate_json(tree.carried.get("lock.json", b""))
        if lock.digest != label:
            faults.append(f"its lock.json is the lock {lock.digest}, its label names {shown(str(label))}")
    except (ValueError, RecursionError):
        faults.append(f"/{CARRIED}/lock.json is no lock")
    if lock is not None and not faults:
        locked = {p.name: p.version for name in ("torch", "env") for p in _packages_of(lock, name)}
        if locked != facts["expected"]["packages"]:
            faults.append("its expected.json lists other packages than its lock.json")
    return lock, _verdict("the lock it carries", faults, f"{label}, in its label and its files")


def _packages_of(lock: Lock, name: str) -> Sequence[Any]:
    found = lock.python_set(name)
    return found.packages if found else ()


def _fetch(settings: Settings, wheels: Wheels, lock: Lock, note: Callable[[str], None]) -> None:
    from envbuild.lock.python import torch_index

    official = "https://download.pytorch.org/whl"
    for name in ("torch", "env"):
        python_set = lock.python_set(name)
        if python_set is None:
            continue
        indexes = [settings.index_url, *settings.extra_index_urls]
        if python_set.index and python_set.index.startswith(official):  # of foreign addresses this one alone is known
            indexes.insert(0, torch_index(settings, python_set.index))
        for package in python_set.packages:
            if not any(wheels.known(sha256) is not None for sha256 in package.hashes):
                wheels.fetch(package.name, package.version, package.hashes, indexes, note)


def _volumes(image: Image) -> Check:
    """An image that hides its own folders behind a volume is not what a container of it sees later."""
    ours = [path for path in image.volumes if _touches_own(path)]
    faults = [f"{shown(path)} is a volume: a container need not see what the image has there" for path in ours]
    others = ", ".join(shown(path) for path in image.volumes)
    return _verdict(
        "volumes", faults, f"{others}; none over what envbuild installs, and their files were looked at, too"
    )


def _touches_own(path: str) -> bool:
    import posixpath

    clean = "/" + posixpath.normpath(path).strip("/")
    system = clean in {"/", "/opt", "/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc"} or clean.startswith("/usr/")
    return system or any(f"{own}/".startswith(f"{clean}/") or clean.startswith(f"{own}/") for own in _OWN)


def _files(installed: Installed, facts: Mapping[str, Any]) -> Check:
    faults = list(installed.changed)
    for dist in installed.distributions:
        said = facts["distributions"].get(dist.name)
        if said is not None and dist.name not in facts["distributions_of_base"] and not _equal(said, dist.version):
            faults.append(
                f"the image's Python says {shown(dist.name)} {shown(said)}, its files are of {shown(dist.version)}"
            )
    text = f"{installed.compared} of {len(installed.distributions)} distributions, each as its RECORD says"
    text += f"; byte code is not compared ({installed.compiled} files)"
    return _verdict("files", faults, text)


def _equal(one: str, other: str) -> bool:
    try:
        return Version(one) == Version(other.replace("_", "-"))
    except InvalidVersion:
        return one.replace("_", "-") == other.replace("_", "-")


def _unlisted(installed: Installed, expected: Mapping[str, Any]) -> Check:
    check = _verdict(
        "files of no distribution",
        [f"no RECORD lists {path}" for path in installed.unlisted],
        "every file of the environment is listed in a RECORD",
    )
    if check.verdict == "failed" and "stack" in expected["components"]:
        # the steps of a stack may put files there, and its lock names the steps, not the files
        return Check(name=check.name, verdict="unproven", text=check.text)
    return check


def _locked(installed: Installed, tree: Tree, lock: Lock | None, facts: Mapping[str, Any], wheels: Wheels) -> Check:
    """Hold the installed files against the RECORDs of the locked wheels, as far as those are known here."""
    name = "locked wheels"
    if lock is None or not facts["expected"]["packages"]:
        return Check(name=name, verdict="unproven", text="the image was built without a lock")
    hashes = {p.name: p.hashes for s in ("torch", "env") for p in _packages_of(lock, s)}
    by_name = {
        str(canonicalize_name(c.get("distribution", ""))): axis for axis, c in facts["expected"]["components"].items()
    }
    listing: dict[str, list[tuple[str, bytes | None]]] = {}
    for dist in installed.distributions:
        for row in dist.rows:
            listing.setdefault(dist.place(row), []).append((dist.name, row.sha256))
    shared = {place: lists for place, lists in listing.items() if len(lists) > 1}
    faults, compared, unknown = [], 0, []
    for dist in installed.distributions:
        known = [wheels.known(sha256) for sha256 in hashes.get(dist.name, ())]
        record = facts["built"].get(by_name.get(dist.name, ""))
        if dist.name not in hashes and record is not None:
            known = [wheels.built(record["sha256"])]
        rows = [each for each in known if each is not None]
        if not rows:
            unknown.append(dist.name)
            continue
        others = {place: {sha256 for who, sha256 in lists if who != dist.name} for place, lists in shared.items()}
        found = min((hold_to_wheel(dist, each, tree, others) for each in rows), key=len)
        if found and len(rows) < len(known):  # it may be of another wheel of this version, which is not known here
            unknown.append(dist.name)
            continue
        compared += 1
        faults += found
    text = f"{compared} of {len(installed.distributions)} distributions are the files of their locked wheels"
    if unknown:
        text += f"; not compared, since their wheels are not known here: {', '.join(shown(n) for n in unknown[:5])}"
        text += f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        text += " (`envbuild audit --deep` fetches what the lock names)"
    check = _verdict(name, faults, text)
    return Check(name=name, verdict="unproven", text=text) if unknown and not faults else check


def judge(facts: dict[str, Any]) -> tuple[Check, ...]:
    """Hold what the probe found against what the lock says."""
    expected = facts["expected"]
    return (
        _packages(facts, expected),
        _torch(facts, expected),
        *_imports(facts),
        *_built(facts, expected),
        *([_toolchain(facts)] if expected["flavor"] == "runtime" else []),
        _one_cuda(facts, expected),
        *([_headers(facts)] if "te" in expected["components"] and expected["cell"]["cuda"] != "cpu" else []),
        _leftovers(facts),
        _size(facts),
    )


def _verdict(name: str, faults: list[str], good: str) -> Check:
    more = f"; and {len(faults) - _FAULTS_SHOWN} more" if len(faults) > _FAULTS_SHOWN else ""
    text = "; ".join(faults[:_FAULTS_SHOWN]) + more if faults else good
    return Check(name=name, verdict="failed" if faults else "passed", text=shown(text, 20_000))


def _packages(facts: dict[str, Any], expected: dict[str, Any]) -> Check:
    if not expected["packages"]:
        return Check(name="packages", verdict="unproven", text="the image was built without a lock")
    found = facts["distributions"]
    own = {c["distribution"].lower().replace("_", "-") for c in expected["components"].values() if "distribution" in c}
    faults = [
        f"{shown(name)} is {shown(found.get(name, 'missing'))}, the lock says {shown(version)}"
        for name, version in expected["packages"].items()
        if not _same(found.get(name), version)
    ]
    faults += [
        f"{shown(name)} {shown(found[name])} is not in the lock"
        for name in found
        if name not in expected["packages"] and name not in own and name not in facts["distributions_of_base"]
    ]
    return _verdict(
        "packages",
        faults,
        f"{len(expected['packages'])} distributions, each at its locked version, and no other{_beside(facts)}",
    )


def _beside(facts: dict[str, Any]) -> str:
    count = len(facts["distributions_of_base"])
    return f" but {count} of the base image" if count else ""


def _same(found: str | None, locked: str) -> bool:
    return found is not None and (found == locked or found.split("+")[0] == locked)


def _torch(facts: dict[str, Any], expected: dict[str, Any]) -> Check:
    torch, cuda = facts["torch"], expected["cell"]["cuda"]
    if "error" in torch:
        return Check(name="torch", verdict="failed", text=f"torch does not import: {shown(torch['error'])}")
    wanted = None if cuda == "cpu" else cuda
    faults = (
        []
        if torch["cuda"] == wanted
        else [
            f"torch {shown(str(torch['version']))} was built for CUDA {shown(str(torch['cuda']))}, the cell says {cuda}"
        ]
    )
    return _verdict("torch", faults, f"torch {torch['version']}, CUDA {torch['cuda'] or 'none'}")


def _imports(facts: dict[str, Any]) -> list[Check]:
    checks = []
    for key, error in facts["imports"].items():
        name = f"import {shown(key.split(':')[1])}"
        if error is None:
            checks.append(Check(name=name, verdict="passed", text="imports without a GPU"))
        elif any(library in error for library in _DRIVER_LIBRARIES):
            text = f"needs the driver's library: {shown(error)}"
            checks.append(Check(name=name, verdict="unproven", text=text))
        elif "[Errno 30]" in error:
            text = f"writes a file as it is imported, which the audit does not let it: {shown(error)}"
            checks.append(Check(name=name, verdict="unproven", text=text))
        else:
            checks.append(Check(name=name, verdict="failed", text=shown(error)))
    return checks


def _built(facts: dict[str, Any], expected: dict[str, Any]) -> list[Check]:
    checks = []
    for axis, component in expected["components"].items():
        wanted = component.get("extensions")
        if not wanted:
            continue
        record = facts["built"].get(axis)
        if record is None:
            checks.append(
                Check(name=f"{axis} wheel", verdict="failed", text="the image carries no record of its build")
            )
            continue
        lacking = sorted(set(wanted) - set(record["extensions"]))
        faults = [f"built without {shown(', '.join(lacking))}"] if lacking else []
        checks.append(
            _verdict(
                f"{axis} wheel",
                faults,
                f"{len(record['extensions'])} extension modules, sha256 {shown(record['sha256'][:16])}…",
            )
        )
    return checks


def _toolchain(facts: dict[str, Any]) -> Check:
    return _verdict(
        "no compiler", [f"{shown(path)} is a CUDA compiler" for path in facts["compilers"]], "no nvcc, cicc or cudafe++"
    )


def _headers(facts: dict[str, Any]) -> Check:
    found = facts["cuda_headers"]
    lacking = "Transformer Engine compiles kernels as it runs, and finds no cuda_runtime.h"
    return _verdict("CUDA headers", [] if found else [lacking], f"in {found}")


def _one_cuda(facts: dict[str, Any], expected: dict[str, Any]) -> Check:
    found, cuda = facts["cuda_runtimes"], expected["cell"]["cuda"]
    if cuda == "cpu":
        return _verdict("no CUDA", [f"{shown(path)} in a CPU image" for path in found], "no CUDA runtime library")
    # A toolkit beside torch is meant to be there where the image keeps its compiler; it has the cell's CUDA or is wrong.
    toolkit = [path for path in found if path.startswith(_TOOLKIT) and expected["flavor"] == "devel"]
    beside = [path for path in found if path not in toolkit]
    faults = [f"{shown(path)} is not of CUDA {cuda}" for path in toolkit if not _has_version(path, cuda)]
    if len(beside) > 1 or not found:
        faults.append(f"{len(beside)} CUDA runtimes: {', '.join(beside)}" if beside else "no CUDA runtime")
    return _verdict("one CUDA", faults, ", ".join(found))


def _has_version(path: str, cuda: str) -> bool:
    return path.rpartition("libcudart.so.")[2].startswith(f"{cuda}.")


def _leftovers(facts: dict[str, Any]) -> Check:
    faults = (
        [f"{facts['caches_total']} files of caches or build trees, such as {', '.join(facts['caches'][:3])}"]
        if facts["caches"]
        else []
    )
    return _verdict("nothing left over", faults, "no package cache, no build tree")


def _size(facts: dict[str, Any]) -> Check:
    if facts["distributions_of_base"]:
        text = (
            f"{facts['bytes'] / 2**30:.2f} GiB on disk; what of it the base image's maker left over is not told apart"
        )
        return Check(name="size", verdict="unproven", text=text)
    ratio = facts["bytes"] / max(1, facts["installed_bytes"])
    text = f"{facts['bytes'] / 2**30:.2f} GiB on disk, {ratio:.3f} times the installed packages"
    return Check(name="size", verdict="passed" if ratio <= _SIZE_LIMIT else "failed", text=text)
