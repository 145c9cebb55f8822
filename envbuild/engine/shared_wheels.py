"""Compiled wheels as artifacts of a registry, by key: pushed from the store of this machine, and taken into it.

A wheel runs code as soon as it is imported, so the registry's word is no reason to take one. It is taken where

- its manifest is signed by enough of those whom the settings trust, or its sha256 is the one that a record on this machine
  states, and
- the inputs that the manifest holds are, byte for byte, those of the stage that needs the wheel: a signed wheel of another
  key does not pass under this one, and
- its file has the sha256 of its build record, and is a sound wheel of the distribution that the component installs.

A manifest holds the wheel, its build record (`record.json`, as it lies in images) and its inputs, the text that the key is
the sha256 of. Its tag is the component and the key.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from envbuild.catalog.store import policy_of
from envbuild.components.base import Wheel
from envbuild.engine.kept import keep_inputs, keep_wheel, place_of_wheel, remember_taken
from envbuild.engine.wheel_file import check_wheel
from envbuild.engine.wheels import BuildRecord, KeptWheel, parse_record
from envbuild.errors import HostError, LockError
from envbuild.plan.plan import Plan
from envbuild.registry.manifests import MANIFEST, Artifact, Descriptor, artifact_of, described
from envbuild.registry.repository import Repository
from envbuild.registry.signatures import Policy, require_signed, sign
from envbuild.registry.signers import Signer
from envbuild.settings import Settings
from envbuild.util.below import OutsideError, read_below
from envbuild.util.names import shown
from envbuild.util.scratch import scratch

ARTIFACT_TYPE = "application/vnd.envbuild.wheel.v1"
WHEEL_TYPE = "application/vnd.envbuild.wheel.v1.whl+zip"
RECORD_TYPE = "application/vnd.envbuild.wheel.record.v1+json"
INPUTS_TYPE = "application/vnd.envbuild.wheel.inputs.v1+json"
TITLE = "org.opencontainers.image.title"
"""The file name that other tools give a blob (OCI image specification, "Pre-Defined Annotation Keys")."""

_TEXT = 1 << 20
LARGEST = 4 << 30
"""Bytes of a wheel; flash-attention's are the largest that we compile, some 0.5 GB."""
_REFUSED = "ask who publishes there"


def repository_of(settings: Settings) -> str | None:
    """Return the repository of the settings' registry that holds wheels, or None without a registry."""
    return f"{settings.registry}/wheels" if settings.registry else None


def tag_of(component: str, key: str) -> str:
    """Return the tag of a wheel."""
    return f"{component}-{key}"


class NotSharedError(LockError):
    """A wheel's key does not cover all that it was compiled from, so that nobody can take it by the key."""


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What became of a wheel that was to be pushed."""

    tag: str
    digest: str
    """The manifest's."""
    new: bool
    """Whether it was not there before."""


def push_wheel(repository: Repository, wheel: KeptWheel, keys: Sequence[Signer]) -> Pushed:
    """Push a kept wheel with its record and inputs, and sign its manifest.

    Args:
        repository: where it goes.
        wheel: the wheel.
        keys: sign it; without one it is of use to those alone whose machines hold its record.

    Raises:
        NotSharedError: its inputs are not known or leave something open.
        LockError: another wheel is there under its key, or the registry does not hold what was pushed.
        HostError: the registry cannot be reached or refuses.

    """
    if wheel.inputs is None or wheel.inputs.gaps:
        what = "what it was compiled from is not noted" if wheel.inputs is None else "its key leaves something open"
        why = ", ".join(wheel.inputs.gaps) if wheel.inputs else ""
        raise NotSharedError(
            f"{wheel.record.wheel} cannot be shared: {what}{': ' + why if why else ''}",
            where=str(wheel.folder),
            hint="build a cell that uses it with a complete lock, and push it again",
        )
    check_wheel(wheel.path, wheel.record.wheel)
    tag = tag_of(wheel.record.component, wheel.inputs.key)
    record = read_below(wheel.folder, "record.json", limit=_TEXT)
    inputs = wheel.inputs.text.encode()
    blobs = (
        Descriptor(
            mediaType=WHEEL_TYPE,
            digest=f"sha256:{wheel.record.sha256}",
            size=wheel.size,
            annotations={TITLE: wheel.record.wheel},
        ),
        described(record, RECORD_TYPE, annotations={TITLE: "record.json"}),
        described(inputs, INPUTS_TYPE, annotations={TITLE: "inputs.json"}),
    )
    artifact = artifact_of(ARTIFACT_TYPE, blobs)
    digest = described(artifact.body(), MANIFEST).digest
    there = repository.manifest(tag)
    if there is not None and there.descriptor.digest != digest:
        raise LockError(
            f"the registry holds another {wheel.record.wheel} under the same key: {there.descriptor.digest}",
            where=f"{repository.name}:{tag}",
            hint="the first one stays; compare the two, and have one of them deleted",
        )
    if there is None:
        contents: tuple[bytes | Path, ...] = (wheel.path, record, inputs)
        for blob, content in zip(blobs, contents, strict=True):
            pushed = repository.push_blob(content, blob.mediaType)
            if pushed.digest != blob.digest:
                raise LockError(f"{wheel.record.wheel} changed while it was pushed", where=str(wheel.folder))
        repository.push_artifact(artifact, tag=tag)
    for key in keys:
        sign(repository, digest, key, alone=there is None)
    return Pushed(tag=tag, digest=digest, new=there is None)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A wheel that came from a registry."""

    component: str
    reference: str
    signers: tuple[str, ...]
    """Who signed it; empty where a record of this machine named its sha256."""


def take_wheel(
    settings: Settings, repository: Repository, plan: Plan, component: Wheel, policy: Policy
) -> Taken | None:
    """Put the wheel of a component into the store of this machine, from a registry; None where the registry has none.

    Args:
        settings: where the store is.
        repository: where to look.
        plan: what is built.
        component: whose wheel it is.
        policy: who may sign.

    Raises:
        LockError: the registry holds one that is not to be used. Nothing of it is kept.
        HostError: the registry cannot be reached or refuses.

    """
    stage = plan.stage(f"wheel-{component.axis}")
    tag = tag_of(component.axis, stage.key)
    where = f"{repository.name}:{tag}"
    found = repository.artifact(tag, ARTIFACT_TYPE)
    if found is None:
        return None
    descriptor, artifact = found
    wheel, record_blob, inputs_blob = _blobs_of(artifact, where)
    place = place_of_wheel(settings, plan, component.axis)
    signers: tuple[str, ...] = ()
    body = repository.read_blob(record_blob, limit=_TEXT)
    if body != recorded(place):
        if not policy.verifiers and recorded(place) is not None:
            return None  # nobody is trusted to sign, and it is not the one that was here
        signers = require_signed(
            repository, descriptor.digest, policy, what=f"the registry's wheel of {component.axis}"
        )
    if repository.read_blob(inputs_blob, limit=_TEXT) != stage.text.encode():
        raise _refused("the registry's wheel was compiled from something else than its tag says", where)
    record = _record_of(body, wheel, component.axis, where)
    place.parent.mkdir(parents=True, exist_ok=True)
    with scratch("wheel", place.parent) as folder:
        made = folder / "made"
        made.mkdir()
        # the name is checked by the record's type; the folder is ours
        with (made / record.wheel).open("xb+") as file:
            repository.save_blob(wheel, file, limit=LARGEST)
        _check_file(made / record.wheel, record, component, where)
        (made / "record.json").write_bytes(body)
        for path in made.iterdir():
            path.chmod(0o644)  # an image copies the record with its mode
        reference = f"{where}@{descriptor.digest}"
        if signers:
            remember_taken(settings, record.sha256, reference)
        keep_wheel(made, place, replace=False)
    keep_inputs(place, stage)
    return Taken(component=component.axis, reference=reference, signers=signers)


class SharedWheels:
    """The wheels of the settings' registry, for a build: what is not there is compiled.

    Args:
        settings: the registry, who may sign, and where the store is.
        note: takes a line about a wheel that was taken, or why one was not.

    """

    def __init__(self, settings: Settings, note: Callable[[str], object]) -> None:
        self._settings, self._note = settings, note
        self._name = repository_of(settings)
        self.taken: list[Taken] = []

    def take(self, plan: Plan, component: Wheel) -> bool:
        """Put the wheel of a component into the store, if the registry has one; where it does not answer, there is none.

        Raises:
            DataError: the settings name keys that cannot be read, or fewer than must sign.
            LockError: the registry's wheel must not be used. Nothing of it is kept.

        """
        trusted = self._settings.trusts_signers
        if self._name is None or not (trusted or recorded(place_of_wheel(self._settings, plan, component.axis))):
            return False
        policy = policy_of(self._settings) if trusted else Policy(verifiers=())
        try:
            with Repository(self._name, self._settings) as repository:
                found = take_wheel(self._settings, repository, plan, component, policy)
        except LockError as error:
            hint = "envbuild image --no-pull compiles the wheel here"
            raise LockError(
                error.what, where=error.where, hint=f"{error.hint}; {hint}" if error.hint else hint
            ) from None
        except HostError as error:
            self._note(f"no wheel is taken from {self._name}: {_first_line(error)}")
            self._name = None
            return False
        if found is None:
            return False
        by = f"signed by {', '.join(found.signers)}" if found.signers else "with the sha256 that this machine recorded"
        self._note(f"the wheel of {component.axis} comes from {self._name}, {by}")
        self.taken.append(found)
        return True


def _blobs_of(artifact: Artifact, where: str) -> tuple[Descriptor, Descriptor, Descriptor]:
    """Return wheel, record and inputs of a manifest, which holds these three alone."""
    if tuple(blob.mediaType for blob in artifact.blobs) != (WHEEL_TYPE, RECORD_TYPE, INPUTS_TYPE):
        raise _refused("the registry's wheel has not the parts of one", where)
    wheel, record, inputs = artifact.blobs
    if wheel.size > LARGEST:
        raise _refused(f"the registry's wheel has {wheel.size:,} bytes, more than any that we know", where)
    return wheel, record, inputs


def recorded(place: Path) -> bytes | None:
    """Return this machine's own record of the wheel that belongs to a place of the store, or None.

    The wheel itself may be gone or damaged: then what a registry serves with this very record is the one that was here.
    """
    try:
        body = read_below(place, "record.json", limit=_TEXT)
        parse_record(body)
    except (OSError, OutsideError, ValueError):
        return None
    return body


def _record_of(body: bytes, wheel: Descriptor, axis: str, where: str) -> BuildRecord:
    try:
        record = parse_record(body)
    except ValueError as error:
        raise _refused(f"the registry's wheel has a record that cannot be read: {_first_line(error)}", where) from None
    if record.component != axis or f"sha256:{record.sha256}" != wheel.digest:
        raise _refused("the registry's wheel has the record of another one", where)
    return record


def _check_file(path: Path, record: BuildRecord, component: Wheel, where: str) -> None:
    try:
        file = check_wheel(path, record.wheel)
    except ValueError as error:
        raise _refused(f"the registry's wheel is not sound: {_first_line(error)}", where) from None
    if file.project != canonicalize_name(component.distribution):
        raise _refused(f"the registry's wheel installs {file.project}, not {component.distribution}", where)


def _first_line(error: Exception) -> str:
    return shown(str(error).partition("\n")[0])


def _refused(what: str, where: str) -> LockError:
    return LockError(what, where=where, hint=_REFUSED)
