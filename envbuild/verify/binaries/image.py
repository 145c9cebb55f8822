"""The binaries of an image, compared with the list in it of what must be installed."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.matrix.fleet import gpus_in
from envbuild.util.scratch import scratch
from envbuild.verify.binaries.examine import examine
from envbuild.verify.binaries.files import Files, Reader
from envbuild.verify.binaries.process import RootExpectation
from envbuild.verify.checks import Check

_MOST_GPUS = 20
"""Architectures of a fleet at most; NVIDIA's GPUs that the matrix lists have 11."""


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
    components: dict[str, str] = {
        axis: canonicalize_name(each["distribution"])
        for axis, each in expected["components"].items()
        if each.get("distribution")
    }
    numbers = [name.removeprefix("sm_") for name in gpus_in(expected["cell"])]
    sms = tuple(int(number) for number in numbers if number.isdecimal() and len(number) <= 3)
    served = {
        name: [int(sm) for sm in expected["components"][axis]["sms"] if str(sm).isdecimal()]
        for axis, name in components.items()
        if isinstance(expected["components"][axis].get("sms"), list)
    }
    path = next((text.partition("=")[2] for text in environment if text.startswith("LD_LIBRARY_PATH=")), "")
    asked = RootExpectation(
        sms=sms if len(sms) == len(numbers) <= _MOST_GPUS else (),
        served=served,
        library_path=tuple(folder for folder in path.split(":") if folder.startswith("/")),
        extensions={
            name: tuple(expected["components"][axis].get("extensions", ())) for axis, name in components.items()
        },
        compiled=frozenset(name for axis, name in components.items() if axis in facts["built"]),
        devel=expected["flavor"] == "devel",
    )
    return tuple(Check(name=each.name, verdict=each.verdict, text=each.text) for each in examine(files, asked))
