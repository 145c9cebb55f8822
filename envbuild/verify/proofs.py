"""What this machine has proven of an image, by digest: an unchanged image need not be proven again.

A proof says what ran in the image and how it ended. Who confirmed the image's digest is another question: `envbuild.engine.trust`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envbuild.errors import AuditError, EnvbuildError, SmokeError
from envbuild.evidence.report import Device
from envbuild.settings import Settings
from envbuild.stacks.model import Use
from envbuild.util.names import shown
from envbuild.verify.suite import suite_hash

KEPT = ("audit", "smoke", "stack_proof", "not_proven")
"""The parts of the report on an image that are kept."""
_LONGEST = 2000
"""Characters of a failure that are kept."""


def _path(settings: Settings, digest: str) -> Path:
    return settings.cache_dir / "proofs" / f"{digest.removeprefix('sha256:')}.json"


def kept_proof(
    settings: Settings, digest: str, device: Device, *, stack_proof: Sequence[Use] = ()
) -> dict[str, Any] | None:
    """Return what was proven of the image `digest` by today's suite and by the stack's commands as they are, or None.

    Where a GPU can be asked (`device` is cuda) what a processor proved does not do.
    """
    try:
        proof: Any = json.loads(_path(settings, digest).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    whole = isinstance(proof, dict) and proof.keys() >= set(KEPT) and isinstance(proof["smoke"], dict)
    if not whole or proof.get("suite") != suite_hash():
        return None
    if device != "cpu" and proof["smoke"].get("device") != "cuda":
        return None
    kept: dict[str, Any] = proof
    return kept if [each["run"] for each in kept["stack_proof"]] == [use.run for use in stack_proof] else None


def keep_proof(settings: Settings, digest: str, report: Mapping[str, Any]) -> None:
    """Keep what was proven of the image `digest`: the parts KEPT of the report on it."""
    path = _path(settings, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"suite": suite_hash(), **{key: report[key] for key in KEPT}}), encoding="utf-8")


def _failure(settings: Settings, digest: str) -> Path:
    return settings.cache_dir / "failures" / f"{digest.removeprefix('sha256:')}.json"


def _kept_failure(settings: Settings, digest: str) -> dict[str, Any] | None:
    try:
        kept: Any = json.loads(_failure(settings, digest).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        kept = None
    # a note that a full disk cut off is one of a failure all the same
    return kept if isinstance(kept, dict) else {"what": "its note cannot be read", "device": "cpu"}


def keep_failure(settings: Settings, digest: str, error: EnvbuildError, device: Device = "cpu") -> None:
    """Keep that the audit or the smoke tests of the image `digest` failed, until it is proven after all.

    What was proven of it before does not count any more.

    Args:
        settings: say where the cache is.
        digest: `sha256:…` of the image.
        error: the failure. One of this machine says nothing of the image, and is not kept.
        device: where the smoke tests ran; an audit finds the same on either.

    """
    if not isinstance(error, (AuditError, SmokeError)):
        return
    _path(settings, digest).unlink(missing_ok=True)  # first, because it works on a full disk, too
    path = _failure(settings, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    note = {"code": error.exit_code, "what": error.what[:_LONGEST], "device": device}
    path.write_text(json.dumps(note), encoding="utf-8")


def forget_failure(settings: Settings, digest: str, device: Device) -> None:
    """Forget a failure of the image `digest`, which was proven on `device`; what failed on a GPU, a processor does not prove."""
    kept = _kept_failure(settings, digest)
    if device == "cuda" or kept is None or kept.get("device") != "cuda":
        _failure(settings, digest).unlink(missing_ok=True)


def require_no_failure(settings: Settings, digest: str, where: str) -> None:
    """Refuse an image that `envbuild image` found wrong on this machine, at its last look.

    Args:
        settings: say where the cache is.
        digest: `sha256:…` of the image.
        where: its name, for the message.

    Raises:
        AuditError: the audit found defects.
        SmokeError: the smoke tests or the stack's own proof failed.

    """
    kept = _kept_failure(settings, digest)
    if kept is None:
        return
    raised = SmokeError if kept.get("code") == SmokeError.exit_code else AuditError
    what = "\n".join(shown(line, _LONGEST) for line in str(kept.get("what"))[:_LONGEST].splitlines())
    raise raised(
        f"`envbuild image` ended with an error for this image: {what}",
        where=where,
        hint="fix the image and build it again; --even-if-failed publishes it as it is",
    )
