"""Who confirms that a registry's image is the one that a lock makes.

A registry proves nothing: the digest that it names is the digest of what it serves. Somebody else must have named the
digest before: a person, this machine when it built the image itself, the registry's catalogue with the signatures that
the settings ask for, or a committed evidence record.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from envbuild.engine.built import own_build
from envbuild.engine.image import Image
from envbuild.errors import LockError
from envbuild.plan.plan import Plan
from envbuild.settings import Settings

if TYPE_CHECKING:
    from envbuild.evidence.records import Evidence

By = Literal["flag", "build", "steps", "catalog", "evidence", "nobody"]

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_WORDS: dict[By, str] = {
    "flag": "verified: it has the digest that --digest named",
    "build": "verified: this machine built an image of this digest from the lock",
    "steps": "not verified: this machine built it, but finished steps may have come from {record}, and nobody signs those",
    "catalog": "verified: it has the digest in the catalogue that {record} signed",
    "evidence": "verified: it has the digest in the evidence record {record}",
    "nobody": "not verified: no source but the registry names its digest; the lock in it is the requested one",
}


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What is known of an image's digest.

    Attributes:
        by: who named the digest: a person (`flag`), this machine's own build (`build`), a build here that may have taken
            finished steps of others (`steps`), the signed catalogue (`catalog`), an evidence record (`evidence`), or
            `nobody` but the registry.
        digest: the image's digest.
        record: id of the evidence record, who signed the catalogue, or where the steps came from.

    """

    by: By
    digest: str
    record: str | None = None

    @property
    def text(self) -> str:
        """It in words."""
        return _WORDS[self.by].format(record=self.record)

    def as_json(self) -> dict[str, str | None]:
        """Return it as JSON values."""
        return {"by": self.by, "digest": self.digest, "record": self.record, "text": self.text}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The digests that a lock's image may have, by the best of those who know."""

    by: By
    records: dict[str, str | None]
    """Digest -> id of the evidence record that names it, or who signed the catalogue that does."""

    def verify(self, digest: str, *, where: str, what: str, hint: str | None = None) -> Verified:
        """Return that `digest` is an expected one.

        Args:
            digest: what an image has.
            where: of the error: the image.
            what: of the error: which image it is, such as `the registry's image`.
            hint: of the error; what to do about a registry's image by default.

        Raises:
            LockError: it is another one.

        """
        if digest in self.records:
            return Verified(by=self.by, digest=digest, record=self.records[digest])
        named = {
            "flag": "--digest names",
            "build": "this machine built from the same lock",
            "steps": "this machine built from the same lock",
            "catalog": "the signed catalogue names",
            "evidence": "the evidence records of this lock name",
        }[self.by]
        raise LockError(
            f"{what} is not the one that was expected: it has {digest}, {named} {' or '.join(self.records)}",
            where=where,
            hint=hint
            or "find out who changed it; `envbuild image --no-pull` builds the image here"
            + ("" if self.by == "flag" else ", and --digest names another digest that you trust"),
        )


def expected_digests(
    settings: Settings,
    plan: Plan,
    records: Iterable["Evidence"],
    *,
    flag: str | None = None,
    catalog: Mapping[str, str] | None = None,
    layers: Sequence[str] = (),
) -> Expected | None:
    """Return which digests the image of `plan` may have, or None when nobody named any.

    A person's word comes first, then what this machine built from exactly this plan, then the signed catalogue (`catalog`:
    digest -> who signed), then the records of runs that passed in an image of exactly this lock.

    What follows from a lock are the layers, uncompressed. So where the signed catalogue names another digest whose layers
    (`layers`, from its entry) are those that this machine built, it says which compression of them to expect.
    """
    if flag is not None:
        return Expected(by="flag", records={flag: None})
    own = own_build(settings, plan)
    repacked = own is not None and bool(catalog and own.layers) and own.layers == tuple(layers)
    if own is not None and own.steps_from is None and not repacked:
        return Expected(by="build", records={own.digest: None})
    if catalog:
        return Expected(by="catalog", records=dict(catalog))
    lock = plan.lock.digest
    found = {
        record.image: record.id
        for record in records
        if record.passed and record.lock_digest == lock and record.image and _is_digest(record.image)
    }
    return Expected(by="evidence", records=dict(found)) if found else None


def require_own_content(settings: Settings, plan: Plan, verified: Verified, image: Image, *, where: str) -> None:
    """Check that an image which the catalogue names has the layers and the configuration that this machine built from its plan.

    The catalogue's entry states the layers before the pull (`expected_digests`); this compares those of the image itself, and
    how a container of it starts: the same files under another entry point are another image. Where this machine built none,
    or not every step, there is nothing to compare with.

    Args:
        settings: where the notes of builds are.
        plan: of the image.
        verified: who named its digest.
        image: it, in the engine.
        where: of the error: the image.

    Raises:
        LockError: it has others.

    """
    own = own_build(settings, plan)
    if verified.by != "catalog" or own is None or own.steps_from is not None or not own.layers:
        return
    if image.layers != own.layers:
        raise LockError(
            "the registry's image has other layers than this machine built from the lock",
            where=where,
            hint="the catalogue's entry states the right ones: ask who publishes there; "
            "`envbuild image --no-pull` builds the image here",
        )
    if own.config and image.config != own.config:
        raise LockError(
            "the registry's image has the layers that this machine built from the lock, and starts them in another way: "
            "its environment, entry point, user or another part of its configuration differs",
            where=where,
            hint="ask who publishes there; `envbuild image --no-pull` builds the image here",
        )


def verified_build(digest: str, steps_from: str | None) -> Verified:
    """Return what is known of an image that this machine built, with finished steps from a repository or without."""
    return Verified(by="steps" if steps_from else "build", digest=digest, record=steps_from)


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """The note on an image that was pulled for a plan: it is in the engine, and this machine did not build it."""

    verified: Verified
    reference: str


def remember_pulled(settings: Settings, plan: Plan, pulled: Pulled) -> None:
    """Note that an image was pulled for exactly this plan, and who confirmed its digest."""
    place = settings.cache_dir / "pulled" / plan.key
    place.parent.mkdir(parents=True, exist_ok=True)
    body = {
        "digest": pulled.verified.digest,
        "by": pulled.verified.by,
        "record": pulled.verified.record,
        "reference": pulled.reference,
    }
    place.write_text(json.dumps(body), encoding="utf-8")


def pulled_for(settings: Settings, plan: Plan) -> Pulled | None:
    """Return the note on the image that was pulled for exactly this plan, or None."""
    note: Any = None
    with contextlib.suppress(OSError, ValueError):  # half a note is none
        note = json.loads((settings.cache_dir / "pulled" / plan.key).read_text(encoding="utf-8"))
    if not isinstance(note, dict) or note.get("by") not in tuple(_WORDS) or not _is_digest(note.get("digest")):
        return None
    record = note.get("record")
    verified = Verified(by=note["by"], digest=note["digest"], record=str(record) if record else None)
    return Pulled(verified=verified, reference=str(note.get("reference")))
