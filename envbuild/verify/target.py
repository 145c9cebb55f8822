"""Where the suite runs: an image or an interpreter of this host, and the first look at it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.errors import SmokeError, UsageError
from envbuild.evidence.records import REPLACED
from envbuild.evidence.report import where_of
from envbuild.util.foreign_json import parse_json
from envbuild.util.processes import bounded
from envbuild.verify.expectation import EXPECTED_IN_IMAGE, EXPECTED_LIMIT, shape_fault

if TYPE_CHECKING:
    from envbuild.engine.image import Image
    from envbuild.run.runtime import Runtime
    from envbuild.settings import Settings

PYTHON_IN_IMAGE = 'exec "$(command -v python3 || command -v python)" "$@"'
"""For `sh -c`: run the image's Python with the arguments that follow."""
_LOOK_S = 120.0
_PROBE = (
    "import json,os,sys;p={0!r};"
    "print(json.dumps({{'python':list(sys.version_info[:2]),'executable':sys.executable,"
    "'expected':json.load(open(p)) if os.path.isfile(p) else None}}))"
)


@dataclass(frozen=True, kw_only=True)
class HostTarget:
    """The environment of an interpreter on this host."""

    python: Path


@dataclass(frozen=True, kw_only=True)
class ImageTarget:
    """An image: the engine's, or a file or folder that Apptainer runs."""

    reference: str


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A target after a look at it: its Python, and what it carries."""

    stated: Mapping[str, Any]
    """What a report says of it: `{"kind": "image", "reference", "digest", "digest_from", "runtime", "interpreter"}`, with what is known
    of `{"layers", "config", "recipe", "release"}` (see `ImageContent`), or `{"kind": "host", "interpreter"}`."""
    python: tuple[int, int]
    expected: Mapping[str, Any] | None = None
    """What it must contain; `built_with` has the inputs that an image states as replaced, too."""
    image: "Image | None" = None
    """What the tag named at the time of the look; this is what runs."""
    runtime: "Runtime | None" = None
    """What runs it."""


def look(target: HostTarget | ImageTarget, settings: "Settings", note: Callable[[str], None] = lambda _: None) -> Seen:
    """Ask the target for its Python and, if it is an image, for the expectation it carries.

    Args:
        target: what is asked.
        settings: say where the engine and the cache are.
        note: takes a line about what takes its time: an archive is unpacked.

    Raises:
        HostError: there is no such interpreter or image, nothing that runs it, or it is for another processor.
        SmokeError: the image has no Python.

    """
    from envbuild.engine.client import last_line
    from envbuild.engine.replaced import replaced_in
    from envbuild.run.runtime import runtime_for

    probe = _PROBE.format(EXPECTED_IN_IMAGE if isinstance(target, ImageTarget) else "")
    image: Image | None = None
    runtime: Runtime | None = None
    if isinstance(target, HostTarget):
        try:
            ran = bounded([str(target.python), "-c", probe], seconds=_LOOK_S, limit=EXPECTED_LIMIT)
        except OSError as error:
            raise UsageError(f"{target.python} does not run: {error.strerror}", where="--python") from None
        stated: dict[str, Any] = {"kind": "host"}
        where = where_of({**stated, "interpreter": target.python})
    else:
        runtime = runtime_for(settings, target.reference)
        image = runtime.look_up(target.reference, note)
        runtime.require_runnable(image)
        ran = runtime.confined(
            "look",
            image,
            ["-c", PYTHON_IN_IMAGE, "sh", "-c", probe],
            entrypoint="sh",
            seconds=_LOOK_S,
            limit=EXPECTED_LIMIT,
        )
        stated = {
            "kind": "image",
            "reference": target.reference,
            "digest": image.digest,
            "digest_from": image.confirmed_by,
            "runtime": runtime.describe(),
            **_content(image, settings),
        }
        where = f"{target.reference} ({image.digest})"
    if ran.fault:
        raise SmokeError(f"its Python {ran.fault}", where=where)
    if ran.code:
        raise SmokeError(f"its Python does not run: {last_line(ran) or 'it printed nothing'}", where=where)
    try:
        python, executable, expected = read_look(ran.out)
    except ValueError as error:
        raise SmokeError(f"the output of its Python cannot be read: {error}", where=where) from None
    if expected is not None and image is not None and (others := replaced_in(image.labels)):
        expected["built_with"] = {**expected.get("built_with", {}), **dict.fromkeys(others, REPLACED)}
    return Seen(
        stated={**stated, "interpreter": executable}, python=python, expected=expected, image=image, runtime=runtime
    )


def _content(image: "Image", settings: "Settings") -> dict[str, Any]:
    """Return what an image is, however it was compressed, and which recipe made it, as far as this machine knows; see `ImageContent`."""
    from envbuild.engine.built import recipe_of_image

    if image.confirmed_by == "label":
        return {}
    own = recipe_of_image(settings, image.digest)
    by = own if own.recipe else image
    known = {"layers": list(image.layers), "config": image.config, "recipe": by.recipe, "release": by.release}
    return {name: value for name, value in known.items() if value}


def read_look(out: bytes) -> tuple[tuple[int, int], str, dict[str, Any] | None]:
    """Return what the first look at a Python printed: its version, its path and the expectation that it found.

    Raises:
        ValueError: it printed something else.

    """
    line = next((text for text in reversed(out.splitlines()) if text.startswith(b"{")), None)
    if line is None:
        raise ValueError("no answer")
    found = parse_json(line, limit=EXPECTED_LIMIT)
    match found:
        case {"python": [int(major), int(minor)], "executable": str(executable), "expected": dict() | None as expected}:
            pass
        case _:
            raise ValueError("not its version, path and expectation")
    if not (2 <= major < 100 and 0 <= minor < 1000) or isinstance(major, bool) or isinstance(minor, bool):
        raise ValueError("no version of Python")
    if expected is not None and (fault := shape_fault(expected)):
        raise ValueError(f"no expectation: {fault}")
    return (major, minor), executable, expected
