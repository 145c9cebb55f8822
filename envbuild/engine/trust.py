"""Who confirms that a registry's image is the one that a lock makes.

A registry proves nothing: the digest that it names is the digest of what it serves. Somebody else must have named the
digest before: a person, this machine when it built the image itself, the registry's catalogue with the signatures that
the settings ask for, or a committed evidence record.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from envbuild.engine.built import built_by_other_recipe, is_other_recipe, own_build, recipe_of_image
from envbuild.engine.image import Image
from envbuild.errors import LockError
from envbuild.evidence.content import ImageContent
from envbuild.plan.plan import Plan
from envbuild.settings import Settings
from envbuild.util.names import is_digest

if TYPE_CHECKING:
    from envbuild.evidence.records import Evidence

By = Literal["flag", "build", "steps", "catalog", "evidence", "nobody"]

_SAME: dict[By, str] = {
    "build": "verified: only the compression differs; this machine built its layers and its configuration from the lock, as {digest}",
    "evidence": "verified: only the compression differs; it has the layers and the configuration of {digest}, in the evidence "
    "record {record}",
}
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
        same_as: the digest that was named, where the image has another one and only the compression of its layers differs.
        other_recipe: whether another release's recipe made the image from the lock.

    """

    by: By
    digest: str
    record: str | None = None
    same_as: str | None = None
    other_recipe: bool = False

    @property
    def text(self) -> str:
        """It in words."""
        if self.same_as:
            words = _SAME[self.by].format(record=self.record, digest=self.same_as)
        else:
            words = _WORDS[self.by].format(record=self.record)
        return f"{words}, by another recipe than this release's" if self.other_recipe else words

    def as_json(self) -> dict[str, str | bool | None]:
        """Return it as JSON values."""
        return {
            "by": self.by,
            "digest": self.digest,
            "record": self.record,
            "same_as": self.same_as,
            "other_recipe": self.other_recipe,
            "text": self.text,
        }


class UnknownImageError(LockError):
    """No trusted source confirms an image, and none names the image that this release makes from the lock."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The digests that a lock's image may have, by the best of those who know."""

    by: By
    records: dict[str, str | None]
    """Digest -> id of the evidence record that names it, or who signed the catalogue that does. Empty where only images by other
    recipes are known: those say nothing of the digest by this one."""
    contents: Mapping[str, ImageContent] = field(default_factory=dict)
    """Digest -> what the image is, however its layers are compressed, where that is known; also of `others`."""
    others: Mapping[str, Verified] = field(default_factory=dict)
    """Digests of images of the lock by another recipe, and who named each."""
    recipe_known: bool = True
    """Whether `records` are of images by this release's recipe. An older evidence record does not state its image's recipe."""

    def verify(
        self, digest: str, *, where: str, what: str, hint: str | None = None, content: ImageContent | None = None
    ) -> Verified:
        """Return that an image is an expected one, by its digest or by its content.

        Args:
            digest: what the image has.
            where: of the error: the image.
            what: of the error: which image it is, such as `the registry's image`.
            hint: of the error; what to do about a registry's image by default.
            content: what the image is. What only the registry states of it must be verified again once the engine has it.

        Raises:
            LockError: it is another one.
            UnknownImageError: it is another one, and the expected digests may be by another recipe.

        """
        found = self._named(digest) or self._same(digest, content)
        if found is not None:
            return found
        raise self._refusal(digest, where, what, hint)

    def _named(self, digest: str) -> Verified | None:
        if digest in self.records:
            return Verified(by=self.by, digest=digest, record=self.records[digest])
        # an older image of the lock is no answer where the one by this recipe is known
        return self.others.get(digest) if not (self.records and self.recipe_known) else None

    def _same(self, digest: str, content: ImageContent | None) -> Verified | None:
        for known, stated in self.contents.items():
            if stated.same_image(content) and (found := self._named(known)) is not None:
                return replace(found, digest=digest, same_as=known)
        return None

    def _refusal(self, digest: str, where: str, what: str, hint: str | None) -> LockError:
        named = {
            "flag": "--digest names",
            "build": "this machine built from the same lock",
            "steps": "this machine built from the same lock",
            "catalog": "the signed catalogue names",
            "evidence": "the evidence records of this lock name",
        }[self.by]
        if self.records and self.recipe_known:
            other = "; it is an image by another recipe" if digest in self.others else ""
            return LockError(
                f"{what} is not the one that was expected: it has {digest}, {named} {' or '.join(self.records)}{other}",
                where=where,
                hint=hint
                or "find out who changed it; `envbuild image --no-pull` builds the image here"
                + ("" if self.by == "flag" else ", and --digest names another digest that you trust"),
            )
        hint = (
            hint
            or "build it here (envbuild image --lock FOLDER), have it signed into a catalogue, or name its digest with --digest"
        )
        if self.records:
            return UnknownImageError(
                f"{what} is not the one that was expected: it has {digest}, {named} {' or '.join(self.records)}. They do not state "
                "which recipe made their images. If another recipe did, nobody confirms this image",
                where=where,
                hint=hint,
            )
        own = [each.record for each in self.others.values() if each.record]
        who = f"the evidence record {' or '.join(own)} is" if own else "what this machine built from the lock is"
        return UnknownImageError(
            f"nobody confirms {what}, which has {digest}: {who} of an image that another recipe made, {' or '.join(self.others)}",
            where=where,
            hint=hint,
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

    An image follows from its lock and from the recipe of a release. A build or a record by another recipe does not say which
    digest to expect; its image is still one of the lock. One that does not state its recipe counts where none of this
    recipe is known.
    """
    if flag is not None:
        return Expected(by="flag", records={flag: None})
    own = own_build(settings, plan)
    others: dict[str, Verified] = {}
    contents: dict[str, ImageContent] = {}
    if own is not None and own.steps_from is None:
        repacked = bool(catalog and own.layers) and own.layers == tuple(layers)
        if built_by_other_recipe(settings, plan, own.digest):
            others[own.digest] = Verified(by="build", digest=own.digest, other_recipe=True)
            contents[own.digest] = own.content
        elif not repacked:
            return Expected(by="build", records={own.digest: None}, contents={own.digest: own.content})
    if catalog:
        return Expected(by="catalog", records=dict(catalog))
    known: dict[str, str | None] = {}
    unknown: dict[str, str | None] = {}
    for record in records:
        digest = record.image
        if not (record.passed and record.lock_digest == plan.lock.digest and digest and is_digest(digest)):
            continue
        recipe = recipe_of_image(settings, digest).recipe
        if record.content is not None:
            contents[digest] = record.content
            recipe = record.content.recipe or recipe
        if recipe is None:
            unknown[digest] = record.id
        elif is_other_recipe(recipe, plan):
            others[digest] = Verified(by="evidence", digest=digest, record=record.id, other_recipe=True)
        else:
            known[digest] = record.id
    others = {digest: each for digest, each in others.items() if digest not in known}
    found = known or {digest: record for digest, record in unknown.items() if digest not in others}
    if not found and not others:
        return None
    return Expected(by="evidence", records=found, contents=contents, others=others, recipe_known=bool(known))


def require_own_content(settings: Settings, plan: Plan, verified: Verified, image: Image, *, where: str) -> None:
    """Check that an image which the catalogue names has the layers and the configuration that this machine built from its plan.

    The catalogue's entry states the layers before the pull (`expected_digests`); this compares those of the image itself, and
    how a container of it starts: the same files under another entry point are another image. Where this machine built none,
    or not every step, or by another recipe, there is nothing to compare with.

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
    if built_by_other_recipe(settings, plan, own.digest):
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
        "same_as": pulled.verified.same_as,
        "other_recipe": pulled.verified.other_recipe,
        "reference": pulled.reference,
    }
    place.write_text(json.dumps(body), encoding="utf-8")


def pulled_for(settings: Settings, plan: Plan) -> Pulled | None:
    """Return the note on the image that was pulled for exactly this plan, or None."""
    note: Any = None
    with contextlib.suppress(OSError, ValueError):  # half a note is none
        note = json.loads((settings.cache_dir / "pulled" / plan.key).read_text(encoding="utf-8"))
    if not isinstance(note, dict) or note.get("by") not in tuple(_WORDS) or not is_digest(note.get("digest")):
        return None
    record, same_as = note.get("record"), note.get("same_as")
    verified = Verified(
        by=note["by"],
        digest=note["digest"],
        record=str(record) if record else None,
        same_as=same_as if is_digest(same_as) and note["by"] in _SAME else None,
        other_recipe=note.get("other_recipe") is True,
    )
    return Pulled(verified=verified, reference=str(note.get("reference")))
