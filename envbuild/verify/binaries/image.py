"""The binaries of an image, compared with the list in it of what must be installed."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.util.scratch import scratch
from envbuild.verify.binaries.examine import examine
from envbuild.verify.binaries.files import Files, Reader
from envbuild.verify.binaries.process import RootExpectation
from envbuild.verify.checks import Check


@contextlib.contextmanager
def reader() -> Iterator[Reader]:
    """Make a reader of an image's members, with a scratch file for as long as it is needed.

    Raises:
        OSError: there is no room for it.

    """
    with scratch("binaries") as folder:
        made = Reader(folder)
        try:
            yield made
        finally:
            made.close()


def binary_checks(files: Files, facts: Mapping[str, Any], environment: Sequence[str]) -> tuple[Check, ...]:
    """Return the checks of an image's binaries.

    Args:
        files: what was read of it.
        facts: `expected` and `built`, as the probe and the image's files say.
        environment: variables of the image, each `NAME=value`.

    """
    expected = facts["expected"]
    components = {
        axis: canonicalize_name(each["distribution"])
        for axis, each in expected["components"].items()
        if each.get("distribution")
    }
    gpu = expected["cell"].get("gpu", "").removeprefix("sm_")
    path = next((text.partition("=")[2] for text in environment if text.startswith("LD_LIBRARY_PATH=")), "")
    asked = RootExpectation(
        sms=(int(gpu),) if gpu.isdecimal() and len(gpu) <= 3 else (),
        library_path=tuple(folder for folder in path.split(":") if folder.startswith("/")),
        extensions={
            name: tuple(expected["components"][axis].get("extensions", ())) for axis, name in components.items()
        },
        compiled=frozenset(name for axis, name in components.items() if axis in facts["built"]),
        devel=expected["flavor"] == "devel",
    )
    return tuple(Check(name=each.name, verdict=each.verdict, text=each.text) for each in examine(files, asked))
