"""The evidence that the solver ranks by, read from matrices/evidence when there is any."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envbuild.matrix.order import EvidenceRef


def evidence_refs() -> "Sequence[EvidenceRef]":
    """Return the evidence of this installation, as the solver takes it."""
    return ()
