"""A wheel or a folder of this machine: its binaries, looked at without an image and without installing anything."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.components import COMPONENTS
from envbuild.errors import AuditError, UsageError
from envbuild.util.foreign_tar import TarError
from envbuild.util.names import shown
from envbuild.util.scratch import scratch
from envbuild.verify.binaries.examine import examine
from envbuild.verify.binaries.files import read_folder, read_wheel_binaries
from envbuild.verify.binaries.findings import Result
from envbuild.verify.binaries.process import RootExpectation


@dataclass(frozen=True, kw_only=True)
class LocalAudit:
    """What was found in a wheel or a folder."""

    path: Path
    checks: tuple[Result, ...]

    def raise_for_defects(self) -> None:
        """Raise AuditError naming every defect, unless there is none."""
        defects = [check for check in self.checks if check.verdict == "failed"]
        if defects:
            lines = "".join(f"\n  - {check.name}: {check.text}" for check in defects)
            count = f"{len(defects)} defects" if len(defects) > 1 else "a defect"
            raise AuditError(f"its binaries have {count}{lines}", where=str(self.path))

    def as_json(self) -> dict[str, Any]:
        """Return the audit as JSON values."""
        return {
            "path": str(self.path),
            "defects": sum(check.verdict == "failed" for check in self.checks),
            "checks": [{"name": c.name, "verdict": c.verdict, "text": c.text} for c in self.checks],
        }


def local_path(text: str) -> Path | None:
    """Return the wheel or folder that an argument names; None where it names an image.

    The name of an image starts with no dot and no slash, and ends with no slash. Only its tag may end with `.whl`.
    """
    path = Path(text)
    if text.startswith(("/", "./", "../")) or text in {".", ".."} or text.endswith("/"):
        return path
    return path if text.endswith(".whl") and (":" not in text or path.is_file()) else None


def audit_local(path: Path, sms: Sequence[int] = ()) -> LocalAudit:
    """Look into the binaries of a wheel or of a folder: a root, or a folder of packages.

    Args:
        path: a file that ends with `.whl`, or a folder.
        sms: SM numbers of the GPUs that its code is to run on; empty to list what there is.

    Raises:
        UsageError: it is neither, it cannot be read, or it is a folder without a binary.
        AuditError: it is damaged, or out of bounds.

    """
    hint = (
        "name a file that ends with .whl, or a folder such as .venv/lib/python3.12/site-packages; "
        "or an image: FILE.oci.tar, an OCI layout, FILE.sif or a sandbox"
    )
    try:
        if path.is_dir():
            files = read_folder(path)
        elif path.suffix == ".whl" and path.is_file():
            with scratch("binaries") as folder:
                files = read_wheel_binaries(path, folder)
        else:
            what = "is neither a wheel nor a folder" if path.exists() else "does not exist"
            raise UsageError(f"{shown(str(path))} {what}", hint=hint)
    except OSError as error:
        raise UsageError(f"{shown(str(path))} cannot be read: {error.strerror or error}", hint=hint) from None
    except (TarError, ValueError) as error:
        hint = "fetch or build it again"
        raise AuditError(f"its binaries cannot be read: {error}", where=shown(str(path)), hint=hint) from None
    if path.is_dir() and not files.binaries:
        raise UsageError(f"{shown(str(path))} holds no binary, so there is nothing to check", hint=hint)
    held = {name: modules for component in COMPONENTS.values() for name, modules in component.extensions.items()}
    return LocalAudit(path=path, checks=examine(files, RootExpectation(sms=tuple(sms), extensions=held)))
