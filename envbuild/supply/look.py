"""An image of the engine, read for its SBOM and its provenance; nothing of it runs."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from envbuild.engine.built import own_build
from envbuild.engine.image import Image
from envbuild.errors import LockError
from envbuild.plan.plan import Plan
from envbuild.registry.signers import Verifier
from envbuild.run.runtime import runtime_for
from envbuild.settings import Settings
from envbuild.supply.inventory import Input, inventory
from envbuild.supply.owners import Owned, Seen, owners_of
from envbuild.supply.sbom import sbom
from envbuild.supply.slsa import provenance
from envbuild.util.foreign_json import parse_json
from envbuild.util.foreign_tar import TarError
from envbuild.util.names import shown
from envbuild.verify.installed import hold_to_records, read_tree

_EXPORT_S = 3600.0
"""Seconds that the engine may take to hand the files over; 5.5 GB take half a minute."""
_RECORD = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Looked:
    """An image, the inputs of its lock, and whose its files are."""

    image: Image
    plan: Plan
    inputs: tuple[Input, ...]
    owned: Owned

    def sbom(self) -> bytes:
        """Return the image's SBOM."""
        return sbom(self.plan.lock, self.inputs, image=self.image.digest, owned=self.owned)


def look(settings: Settings, image: str, plan: Plan, note: Callable[[str], None] = lambda _: None) -> Looked:
    """Read whose the files of an image are.

    Args:
        settings: say where the engine is.
        image: its tag or its digest.
        plan: what it was made from.
        note: called with what takes its time.

    Raises:
        HostError: no engine, or no such image.
        LockError: its files cannot be read.

    """
    runtime = runtime_for(settings, image)
    found = runtime.look_up(image)
    note("reading the image's files")
    seen = Seen()
    try:
        with runtime.export(found, seconds=_EXPORT_S) as stream:
            tree = read_tree(stream, seen.take)
    except TarError as error:
        raise LockError(f"the image's files cannot be read: {error}", where=shown(image)) from None
    except TimeoutError as error:
        raise LockError(f"reading the image's files {error}", where=shown(image)) from None
    inputs = inventory(plan.lock, _records(tree.carried))
    owned = owners_of(plan, inputs, seen, tree, hold_to_records(tree))
    return Looked(image=found, plan=plan, inputs=inputs, owned=owned)


def _records(carried: Mapping[str, bytes]) -> dict[str, Mapping[str, Any]]:
    """Return the records of compiled wheels that an image carries, by axis; what cannot be read is none."""
    found: dict[str, Mapping[str, Any]] = {}
    for path, body in carried.items():
        folder, _, name = path.rpartition("/")
        if folder == "built" and name.endswith(".json"):
            with contextlib.suppress(ValueError):
                record = parse_json(body, limit=_RECORD)
                if isinstance(record, dict):
                    found[name.removesuffix(".json")] = record
    return found


def own_provenance(settings: Settings, looked: Looked, signer: Verifier) -> bytes | None:
    """Return the provenance of an image that this machine built from exactly its plan; None of any other image.

    Finished steps that came from a repository have no provenance: nobody says who ran them.

    Args:
        settings: say where the cache is.
        looked: the image.
        signer: the builder, who signs it.

    """
    note = own_build(settings, looked.plan)
    if note is None or note.digest != looked.image.digest or note.steps_from is not None:
        return None
    return provenance(
        looked.plan.lock,
        looked.inputs,
        image=looked.image.digest,
        layers=looked.image.layers,
        builder=signer.builder,
        wheels_from=note.wheels_from,
    )
