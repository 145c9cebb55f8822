"""Artifacts in one repository of a registry: pushed, pulled, and attached to what they are about."""

import hashlib
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self
from urllib.parse import quote

from envbuild.errors import EnvbuildError, LockError
from envbuild.net.exchange import Answer, Bounds, Upload
from envbuild.net.fetch import body_of
from envbuild.registry.manifests import (
    EMPTY_CONFIG,
    EMPTY_TYPE,
    INDEX,
    LARGEST_MANIFEST,
    MANIFEST,
    Artifact,
    Descriptor,
    described,
    index_body,
    read_artifact,
    read_referrers,
    typed,
)
from envbuild.registry.session import SMALL, Session
from envbuild.settings import Settings
from envbuild.util.names import Digest, checked, shown

_BLOB_S = 3600.0
_CHUNK = 1 << 18
_PAGES = 20
_ATTEMPTS = 8
_SETTLE_S = 1.5
_LONGEST_S = 30.0
# A registry that keeps links in files rewrites the link of a blob while another push sends that blob, and a manifest that
# names it is refused at that moment (docker-registry 2.8.3: 10 of 600 manifests, four pushes of one blob at once).
_BLOB_UNKNOWN = frozenset({400, 404})
_PAUSES_S = (0.2, 0.8, 2.0)
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
# A registry that is asked for one type alone answers 404 for a manifest of another.
_ACCEPT = (
    f"{MANIFEST}, {INDEX}, application/vnd.docker.distribution.manifest.v2+json, "
    "application/vnd.docker.distribution.manifest.list.v2+json"
)
_AGAIN = "try once more, as a broken connection looks alike; then have it pushed again, and ask who may push there"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A manifest as a registry served it, its bytes checked against its digest."""

    descriptor: Descriptor
    body: bytes

    def artifact(self) -> Artifact:
        """Return what it states.

        Raises:
            ValueError: it is no manifest of an artifact.

        """
        return read_artifact(self.body)


class Repository:
    """A repository that artifacts are pulled from and pushed to. Connections and the login are kept until it is closed.

    Every method raises HostError where the registry cannot be reached or refuses, and LockError where what it serves is
    not what was asked for.

    Args:
        name: `registry.example.org/team/name`.
        settings: the proxies and the CA bundle.

    """

    def __init__(self, name: str, settings: Settings | None = None) -> None:
        self._session = Session(name, settings)
        self.name = self._session.name

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.__exit__(kind, error, trace)

    # ---- pulling

    def manifest(self, reference: str) -> Manifest | None:
        """Return the manifest of a tag or a digest, or None where the repository has none.

        By digest, its bytes have that digest. By tag, it is whatever the registry says: a hint.
        """
        url = self._session.url(f"manifests/{_reference(reference)}")
        answer, body = self._session.ask(url, body_of, accept=_ACCEPT)
        if answer.status == 404:
            return None
        if body is None:
            raise self._session.refused(answer, url)
        media_type = answer.content_type or MANIFEST
        try:
            found = described(body, media_type)
        except ValueError as error:
            raise self._session.unusable(f"a manifest of no type: {shown(str(error))}", url) from None
        stated = answer.headers.get("docker-content-digest", "")
        for named in (stated, reference if reference.startswith("sha256:") else ""):
            if named and named != found.digest:
                raise LockError(
                    f"the manifest that {self.name} serves is another one: it is {found.digest}, not {shown(named, 100)}",
                    where=url,
                    hint=_AGAIN,
                )
        return Manifest(descriptor=found, body=body)

    def artifact(
        self, reference: str, artifact_type: str, *, subject: str | None = None
    ) -> tuple[Descriptor, Artifact] | None:
        """Return the artifact of a tag or a digest and its own descriptor, or None where there is none.

        Args:
            reference: a tag or a digest.
            artifact_type: what it must be.
            subject: the digest that it must be about, where there is one.

        """
        found = self.manifest(reference)
        if found is None:
            return None
        where = f"{self.name}{'@' if reference.startswith('sha256:') else ':'}{reference}"
        try:
            artifact = found.artifact()
        except ValueError as error:
            raise LockError(f"a manifest cannot be read: {error}", where=where, hint=_AGAIN) from None
        if artifact.artifact_type != artifact_type:
            what = f"an artifact of another type: {shown(artifact.artifact_type, 100)}, not {artifact_type}"
            raise LockError(f"the registry holds {what}", where=where, hint=_AGAIN)
        about = artifact.subject.digest if artifact.subject else None
        if subject is not None and about != subject:
            raise LockError(f"the artifact is about {about or 'nothing'}, not {subject}", where=where, hint=_AGAIN)
        return found.descriptor, artifact

    def read_blob(self, blob: Descriptor, *, limit: int) -> bytes:
        """Return the content of a blob of at most `limit` bytes; it has the size and the digest of its descriptor."""
        self._check_size(blob, limit)
        url = self._session.url(f"blobs/{checked(Digest, blob.digest)}")
        answer, body = self._session.ask(url, body_of, bounds=_bounds(blob.size), hashed=True)
        if body is None:
            raise self._missing(blob, answer, url)
        self._check(blob, len(body), hashlib.sha256(body).hexdigest(), url)
        return body

    def save_blob(self, blob: Descriptor, file: BinaryIO, *, limit: int) -> None:
        """Write the content of a blob of at most `limit` bytes to `file`, from its start.

        What is in `file` counts only once this returns: each attempt starts over, and the digest is known at the end.
        """
        self._check_size(blob, limit)
        url = self._session.url(f"blobs/{checked(Digest, blob.digest)}")

        def take(_: Answer, chunks: Iterator[bytes]) -> tuple[int, str]:
            file.seek(0)
            file.truncate()
            size, seen = 0, hashlib.sha256()
            for chunk in chunks:
                file.write(chunk)
                seen.update(chunk)
                size += len(chunk)
            return size, seen.hexdigest()

        answer, taken = self._session.ask(url, take, bounds=_bounds(blob.size), hashed=True)
        if taken is None:
            raise self._missing(blob, answer, url)
        self._check(blob, *taken, url)

    def _check_size(self, blob: Descriptor, limit: int) -> None:
        if blob.size > limit:
            raise LockError(
                f"a blob is too large: {blob.size} bytes, and at most {limit} are accepted",
                where=f"{self.name}@{blob.digest}",
                hint=_AGAIN,
            )

    def _check(self, blob: Descriptor, size: int, digest: str, url: str) -> None:
        if (size, f"sha256:{digest}") != (blob.size, blob.digest):
            raise LockError(
                f"a blob that {self.name} serves is another one: {size} bytes of sha256:{digest}, "
                f"not {blob.size} of {blob.digest}",
                where=url,
                hint=_AGAIN,
            )

    def _missing(self, blob: Descriptor, answer: Answer, url: str) -> EnvbuildError:
        if answer.status != 404:
            return self._session.refused(answer, url)
        return LockError(f"the registry does not hold a blob: {blob.digest}", where=url, hint="have it pushed again")

    def referrers(self, digest: str, artifact_type: str | None = None) -> tuple[Descriptor, ...]:
        """Return the manifests that the registry lists as being about `digest`, of one type or of any.

        The list is a hint: `artifact` with `subject` checks each. It comes from the referrers API, or where the registry
        has none from the tag that stands in for it (OCI distribution specification 1.1, "Referrers tag schema").
        """
        url: str | None = self._session.url(f"referrers/{checked(Digest, digest)}")
        found: list[Descriptor] = []
        for _ in range(_PAGES):
            if url is None:
                break
            answer, body = self._session.ask(url, body_of, accept=INDEX)
            if answer.status in {400, 404, 405} or (body is not None and answer.content_type != INDEX):
                found = list(self._tagged_referrers(digest))
                break
            if body is None:
                raise self._session.refused(answer, url)
            found += self._read_index(body, url)
            link = re.search(r'<([^<>\s]{1,4096})>\s*;\s*rel="?next"?', answer.headers.get("link", "")[:8192])
            url = self._session.own_url(url, link[1]) if link else None
        if artifact_type is None:
            return tuple(found)
        return tuple(each for each in found if each.artifactType == artifact_type)

    def _tagged_referrers(self, digest: str) -> tuple[Descriptor, ...]:
        tag = _fallback_tag(digest)
        held = self.manifest(tag)
        return self._read_index(held.body, f"{self.name}:{tag}") if held else ()

    def _read_index(self, body: bytes, where: str) -> tuple[Descriptor, ...]:
        try:
            return read_referrers(body)
        except ValueError as error:
            raise LockError(f"a list of referrers cannot be read: {error}", where=where, hint=_AGAIN) from None

    # ---- pushing

    def has_blob(self, digest: str) -> bool:
        """Return whether the repository says that it holds a blob. It may be wrong; nobody may rely on it but a push."""
        url = self._session.url(f"blobs/{checked(Digest, digest)}")
        answer, _ = self._session.ask(url, body_of, method="HEAD")
        return answer.good

    def push_blob(
        self, content: bytes | Path, media_type: str, *, annotations: Mapping[str, str] | None = None
    ) -> Descriptor:
        """Push a blob unless the repository has it, and return its descriptor.

        A file is read twice: for its digest, and to send it. One that changes meanwhile is refused by the registry.
        """
        if isinstance(content, bytes):
            blob, source = described(content, media_type, annotations=annotations), _chunks_of(content)
        else:
            with content.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                size = file.tell()  # plain-words: allow tell - of a file
            blob = Descriptor(
                mediaType=media_type, digest=f"sha256:{digest}", size=size, annotations=dict(annotations or {})
            )
            source = _chunks_in(content)
        if self.has_blob(blob.digest):
            return blob
        start = self._session.url("blobs/uploads/")
        answer, _ = self._session.ask(start, body_of, method="POST")
        if answer.status != 202 or not answer.headers.get("location"):
            raise self._session.refused(answer, start)
        place = self._session.own_url(start, answer.headers["location"])
        place += f"{'&' if '?' in place else '?'}digest={quote(blob.digest)}"
        # once: after a failure the upload may be half done, and only a new one starts from nothing
        bounds = replace(_bounds(blob.size), attempts=1)
        answer, _ = self._session.ask(
            place, body_of, method="PUT", upload=Upload(size=blob.size, chunks=source), bounds=bounds
        )
        if not answer.good:
            raise self._session.refused(answer, start)
        return blob

    def push_artifact(self, artifact: Artifact, *, tag: str | None = None) -> Descriptor:
        """Push a manifest whose blobs are there, under a tag or by its digest alone, and return its descriptor.

        One with a subject is listed among the referrers of that, also where the registry keeps no such list.
        """
        if artifact.config.digest == described(EMPTY_CONFIG, EMPTY_TYPE).digest:
            self.push_blob(EMPTY_CONFIG, EMPTY_TYPE)
        body = artifact.body()
        own = typed(described(body, MANIFEST, annotations=artifact.annotations), artifact.artifact_type)
        answer = self._put(tag or own.digest, body, MANIFEST)
        if artifact.subject is not None and "oci-subject" not in answer.headers:
            self._list_referrer(artifact.subject.digest, own)
        return own

    def push_manifest(self, body: bytes, media_type: str, *, tag: str) -> Descriptor:
        """Push a manifest that was made elsewhere, or one that is there, under a tag."""
        self._put(_reference(tag), body, media_type)
        return described(body, media_type)

    def _put(self, reference: str, body: bytes, media_type: str) -> Answer:
        if len(body) > LARGEST_MANIFEST:
            raise LockError(
                f"a manifest is too large: {len(body)} bytes, and registries take {LARGEST_MANIFEST}",
                where=f"{self.name}:{reference}",
            )
        url = self._session.url(f"manifests/{_reference(reference)}")
        upload = Upload(size=len(body), chunks=_chunks_of(body), media_type=media_type)
        for pause in (0.0, *_PAUSES_S):
            time.sleep(pause)
            answer, _ = self._session.ask(url, body_of, method="PUT", upload=upload)
            if answer.status not in _BLOB_UNKNOWN:
                break
        if not answer.good:
            raise self._session.refused(answer, url)
        stated, own = answer.headers.get("docker-content-digest", ""), described(body, media_type).digest
        if stated and stated != own:
            raise self._session.unusable(f"it stored {shown(stated, 100)}, not {own}", url)
        return answer

    def _list_referrer(self, subject: str, own: Descriptor) -> None:
        """Add a manifest to the tag that lists the referrers of `subject`."""
        tag = _fallback_tag(subject)

        def added() -> bytes | None:
            listed = self._tagged_referrers(subject)
            return None if any(each.digest == own.digest for each in listed) else index_body((*listed, own))

        self.change_tag(tag, added, INDEX)

    def change_tag(self, tag: str, change: Callable[[], bytes | None], media_type: str) -> None:
        """Write what `change` returns to a tag, until it returns None: that what it wants is there.

        A registry has no compare-and-swap, so `change` reads the tag each time, and is asked again a while after a write:
        by then, whoever read the tag before that write has written, too, and whoever reads it later sees the write.
        What another push overwrote is written once more. A push that takes longer than that from its reading to its
        writing can still undo another one.

        Raises:
            LockError: other pushes came between each time.

        """
        for attempt in range(_ATTEMPTS):
            if attempt > 1:
                time.sleep(random.uniform(0, _SETTLE_S))  # noqa: S311 - so that writers do not meet again
            started = time.monotonic()
            body = change()
            if body is None:
                return
            self._put(tag, body, media_type)
            time.sleep(min(_LONGEST_S, max(_SETTLE_S, 4 * (time.monotonic() - started))))
        if change() is None:
            return
        raise LockError(
            f"{self.name}:{tag} was changed by others each time that it was written",
            hint="push again when the others are done",
        )


def _fallback_tag(digest: str) -> str:
    return checked(Digest, digest).replace(":", "-")


def _reference(text: str) -> str:
    if text.startswith("sha256:"):
        return checked(Digest, text)
    if not _TAG.fullmatch(text):
        raise ValueError(f"{shown(text, 80)!r} is neither a tag nor a digest")
    return text


def _bounds(size: int) -> Bounds:
    return replace(SMALL, size=size) if size <= SMALL.size else replace(SMALL, size=size, stall_s=60.0, total_s=_BLOB_S)


def _chunks_of(body: bytes) -> Callable[[], Iterator[bytes]]:
    def chunks() -> Iterator[bytes]:
        for start in range(0, len(body), _CHUNK):
            yield body[start : start + _CHUNK]

    return chunks


def _chunks_in(path: Path) -> Callable[[], Iterator[bytes]]:
    def chunks() -> Iterator[bytes]:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield chunk

    return chunks
