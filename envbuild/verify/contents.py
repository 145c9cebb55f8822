"""The image's files, as the engine exports them, compared with its lock; the image's Python is not asked."""

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from envbuild.engine.apptainer import FOLDER
from envbuild.engine.image import Image
from envbuild.lock.model import Lock
from envbuild.util.names import shown
from envbuild.util.text import count_of
from envbuild.verify.checks import Check, verdict_of
from envbuild.verify.installed import CARRIED, VENV, Installed, Tree, hold_to_wheel
from envbuild.verify.probe import canonical, read_expectation
from envbuild.verify.wheels import Wheels

_OWN = (f"/{VENV}", f"/{CARRIED}", "/opt/python")


def carried_check(tree: Tree, image: Image, facts: Mapping[str, Any]) -> tuple[Lock | None, Check]:
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
        faults.append(f"/{CARRIED}/lock.json is not a lock")
    if lock is not None and not faults:
        locked = {p.name: p.version for name in ("torch", "env") for p in _packages_of(lock, name)}
        if locked != facts["expected"]["packages"]:
            faults.append("its expected.json lists other packages than its lock.json")
    return lock, verdict_of("the lock it carries", faults, f"{label}, in its label and its files")


def _packages_of(lock: Lock, name: str) -> Sequence[Any]:
    found = lock.python_set(name)
    return found.packages if found else ()


def volumes_check(image: Image) -> Check:
    """Find volumes over envbuild's own folders: such an image is not what a container of it sees later."""
    ours = [path for path in image.volumes if _touches_own(path)]
    faults = [f"{shown(path)} is a volume: a container need not see what the image has there" for path in ours]
    others = ", ".join(shown(path) for path in image.volumes)
    return verdict_of(
        "volumes", faults, f"{others}; none over what envbuild installs, and their files were looked at, too"
    )


def _touches_own(path: str) -> bool:
    clean = "/" + posixpath.normpath(path).strip("/")
    system = clean in {"/", "/opt", "/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc"} or clean.startswith("/usr/")
    return system or any(f"{own}/".startswith(f"{clean}/") or clean.startswith(f"{own}/") for own in _OWN)


def apptainer_check() -> Check:
    """State what of an image that Apptainer runs is compared with nothing."""
    text = f"/{FOLDER} is compared with nothing: its scripts run at each start of a container"
    return Check(name="what Apptainer adds", verdict="unproven", text=text)


def files_check(installed: Installed, facts: Mapping[str, Any]) -> Check:
    """Hold the files against each distribution's own RECORD, and the Python's word of versions against the files."""
    faults = list(installed.changed)
    there = {dist.name for dist in installed.distributions} | set(facts["distributions_of_base"])
    faults += [
        f"{shown(name)} has no RECORD in the environment, and the lock names it"
        for name in facts["expected"]["packages"]
        if canonicalize_name(name) not in there
    ]
    for dist in installed.distributions:
        reported = facts["distributions"].get(dist.name)
        if (
            reported is not None
            and dist.name not in facts["distributions_of_base"]
            and not _equal(reported, dist.version)
        ):
            faults.append(
                f"the image's Python reports {shown(dist.name)} {shown(reported)}, its files are of {shown(dist.version)}"
            )
    text = f"{installed.compared} of {count_of(len(installed.distributions), 'distribution')}, each as its RECORD says"
    text += f"; byte code is not compared ({count_of(installed.compiled, 'file')})"
    return verdict_of("files", faults, text)


def _equal(one: str, other: str) -> bool:
    try:
        return Version(one) == Version(other.replace("_", "-"))
    except InvalidVersion:
        return one.replace("_", "-") == other.replace("_", "-")


def unlisted_check(installed: Installed, expected: Mapping[str, Any]) -> Check:
    """Find files of the environment that no RECORD lists."""
    check = verdict_of(
        "files of no distribution",
        [f"no RECORD lists {path}" for path in installed.unlisted],
        "every file of the environment is listed in a RECORD",
    )
    if check.verdict == "failed" and "stack" in expected["components"]:
        # the steps of a stack may put files there, and its lock names the steps, not the files
        return Check(name=check.name, verdict="unproven", text=check.text)
    return check


def locked_check(
    installed: Installed, tree: Tree, lock: Lock | None, facts: Mapping[str, Any], wheels: Wheels
) -> Check:
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
        text = f"{text}; " if compared else ""
        text += f"not compared with their wheels, which are not known here: {', '.join(shown(n) for n in unknown[:5])}"
        text += f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        text += " (`envbuild audit --deep` fetches what the lock names)"
    check = verdict_of(name, faults, text)
    return Check(name=name, verdict="unproven", text=text) if unknown and not faults else check
