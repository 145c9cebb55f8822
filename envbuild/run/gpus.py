"""The GPUs that an image is compiled for, next to those of a machine."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from envbuild.matrix.fleet import gpus_in
from envbuild.util.names import shown

_SM_IN_ID = re.compile(r"sm(\d{2,3})")


def sms_in_id(cell_id: str) -> tuple[int, ...]:
    """Return the SM numbers that a cell's id names; none for an id without one, or for another text."""
    return tuple(int(found[1]) for part in cell_id.split("-") if (found := _SM_IN_ID.fullmatch(part)))


def unserved(sms: Collection[int], gpus: Iterable[tuple[str, str | None]]) -> str:
    """Return what to say of GPUs that an image is not compiled for; nothing where there are none.

    Args:
        sms: SM numbers that the image is compiled for; none where that is not known.
        gpus: name and SM number of each GPU of the machine, None where the driver does not report it.

    """
    other = {f"{shown(name, 60)} (sm_{sm})" for name, sm in gpus if sm and sm.isdecimal() and int(sm) not in sms}
    if not sms or not other:
        return ""
    return (
        f"the image is compiled for {_listed(sms)}, and this machine has {', '.join(sorted(other))}: "
        "kernels may be missing, or the driver compiles them as they first run"
    )


def after_run(cell: Mapping[str, Any], gpus: Iterable[Mapping[str, Any]]) -> str:
    """Return what a run of the smoke tests leaves open about a cell's GPUs; nothing where it was on every one of them.

    Args:
        cell: axis -> version.
        gpus: `name` and `sm` of each GPU that the run saw.

    """
    numbers = [name.removeprefix("sm_") for name in gpus_in(cell)]
    sms = [int(number) for number in numbers if number.isdecimal() and len(number) <= 3]
    seen = [(str(gpu.get("name", "")), str(gpu.get("sm", ""))) for gpu in gpus]
    if not seen:
        return ""
    if text := unserved(sms, seen):
        return text
    left = [sm for sm in sms if str(sm) not in {sm for _, sm in seen}]
    return f"this run proves nothing for {_listed(left)}, which the image is for, too" if left else ""


def _listed(sms: Collection[int]) -> str:
    return " and ".join(filter(None, (", ".join(f"sm_{sm}" for sm in list(sms)[:-1]), f"sm_{list(sms)[-1]}")))
