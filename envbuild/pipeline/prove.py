"""What this host can prove of an image: audit, smoke tests, the proof that its stack asks for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from envbuild.engine.built import find_image
from envbuild.engine.client import EngineClient
from envbuild.errors import EnvbuildError
from envbuild.evidence.recording import from_report
from envbuild.evidence.records import record_evidence
from envbuild.evidence.report import Device, Level, SmokeReport
from envbuild.host import facts as host_facts
from envbuild.pipeline.image import Made
from envbuild.pipeline.locked import Note
from envbuild.run.gpus import after_run
from envbuild.settings import Settings
from envbuild.stacks.model import Use
from envbuild.verify import stack_proof
from envbuild.verify.audit import audit
from envbuild.verify.checks import Audit
from envbuild.verify.proofs import KEPT, forget_failure, keep_failure, keep_proof, kept_proof
from envbuild.verify.smoke import SmokeRequest, run_smoke
from envbuild.verify.target import ImageTarget


@dataclass(kw_only=True)
class Proof:
    """What was shown of an image.

    Attributes:
        audit: the audit, as JSON values.
        smoke: the smoke tests in short, as JSON values; None where they did not run.
        stack_proof: each command of the stack's own proof, as JSON values.
        not_proven: what was not shown, and why.
        proven: when it was shown.
        evidence: the record of the smoke tests; None where none was asked for, or they did not run.
        failure: what calls for an exit code.

    """

    audit: dict[str, Any]
    smoke: dict[str, Any] | None = None
    stack_proof: list[dict[str, Any]] = field(default_factory=list)
    not_proven: list[str] = field(default_factory=list)
    proven: str = "now"
    evidence: Path | None = None
    failure: EnvbuildError | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values, without the failure."""
        return {key: getattr(self, key) for key in (*KEPT, "proven")}


def device_for(settings: Settings, made: Made) -> Device:
    """Return where this host can prove the image: on its GPUs, when the cell is for CUDA, or on the processor."""
    return "cuda" if made.plan.cell.versions["cuda"] != "cpu" and host_facts(settings=settings).gpus else "cpu"


def prove(
    client: EngineClient,
    made: Made,
    *,
    proof: Sequence[Use],
    with_smoke: bool,
    note: Note,
    progress: Callable[[Mapping[str, Any]], None] = lambda _: None,
    record: Path | None = None,
) -> Proof:
    """Show of an image what this host can; what it showed earlier of an image that was there already is not shown again.

    With `record` it is: a record is of a run.

    Args:
        client: the engine that holds it.
        made: the image.
        proof: the commands of its stack.
        with_smoke: whether smoke tests are run after the audit.
        note: takes a line about what is done.
        progress: takes every event of the smoke tests as it comes.
        record: the folder that gets the evidence record of the smoke tests, however they end.

    Raises:
        HostError: something that looking at the image needs is missing on this host, or the record cannot be written.

    """
    settings, device = client.settings, device_for(client.settings, made)
    if made.origin == "found" and record is None:
        kept = kept_proof(settings, made.built.digest, device, stack_proof=proof)
        if kept is not None:
            return Proof(**{key: kept[key] for key in KEPT}, proven="earlier, on this machine")
    note("audit")
    audited = audit(settings, made.built.tag)
    found = Proof(
        audit=audited.as_json(),
        not_proven=[f"{c.name}: {c.text}" for c in audited.checks if c.verdict == "unproven"],
    )
    if audited.defects:
        found.not_proven.append("smoke tests, because the audit found defects")
        found.failure = _raised(audited.raise_for_defects)
    elif not with_smoke:
        found.not_proven.append("smoke tests were left out by --no-smoke")
    elif not settings.engine_is_here:
        found.not_proven.append("smoke tests: the engine is on another host (`envbuild smoke TAG` there runs them)")
    else:
        _run(found, client, made, audited, device, proof, note, progress, record)
    if found.failure is not None:
        try:
            keep_failure(settings, made.built.digest, found.failure, _ran_on(found))
        except OSError as error:  # the failure itself says more than a full disk
            note(
                f"note: the failure is not kept ({error.strerror}); `envbuild catalog publish` will not refuse this image"
            )
    return found


def _run(
    found: Proof,
    client: EngineClient,
    made: Made,
    audited: Audit,
    device: Device,
    proof: Sequence[Use],
    note: Note,
    progress: Callable[[Mapping[str, Any]], None],
    record: Path | None,
) -> None:
    """Run the smoke tests and the stack's own proof, into `found`."""
    settings = client.settings
    smoked, unproven = _smoke(settings, made, audited, device, note, progress)
    if record is not None:
        expected = audited.facts["expected"]
        evidence = from_report(smoked, adopted=expected.get("adopted"), built_with=expected.get("built_with"))
        found.evidence = record_evidence(evidence, record)
        note(f"recorded in {found.evidence}")
    found.not_proven += unproven
    found.smoke = {
        "verdict": smoked.verdict,
        "level": str(smoked.level),
        "device": smoked.device,
        **smoked.counts,
        "reason": smoked.reason,
    }
    found.failure = _raised(smoked.raise_for_verdict)
    if found.failure is None and proof:
        note(f"the stack's own proof: {', '.join(use.name for use in proof)}")
        shown = stack_proof.show(settings, made.built.tag, proof, device)
        found.stack_proof = [asdict(each) for each in shown]
        found.not_proven += [
            f"the stack's proof {each.name}: {each.reason}" for each in shown if each.outcome == "unproven"
        ]
        found.failure = _raised(lambda: stack_proof.raise_for(shown, made.built.tag))
    if found.failure is None and find_image(client, made.built.tag, made.built.digest) is not None:
        forget_failure(settings, made.built.digest, _ran_on(found))
        keep_proof(settings, made.built.digest, found.as_json())  # what ran was this image, and none that took its name


def _ran_on(found: Proof) -> Device:
    return "cuda" if found.smoke is not None and found.smoke["device"] == "cuda" else "cpu"


def _raised(check: Callable[[], None]) -> EnvbuildError | None:
    try:
        check()
    except EnvbuildError as error:
        return error
    return None


def _smoke(
    settings: Settings,
    made: Made,
    audited: Audit,
    device: Device,
    note: Note,
    progress: Callable[[Mapping[str, Any]], None],
) -> tuple[SmokeReport, list[str]]:
    """Run the smoke levels that this host can, and name those that it cannot."""
    on_cpu_only = device == "cpu" and made.plan.cell.versions["cuda"] != "cpu"
    note("smoke tests" + (" on the CPU" if on_cpu_only else ""))
    request = SmokeRequest(
        target=ImageTarget(reference=made.built.tag),
        expected=audited.facts["expected"],
        level=Level.DISTRIBUTED,
        device=device,
    )
    report = run_smoke(request, settings, progress=progress)
    unproven = "kernels and training on a GPU: this host has none (`envbuild smoke TAG` there proves them)"
    if on_cpu_only:
        return report, [unproven]
    left = after_run(report.cell, report.machine.get("gpus", ())) if device == "cuda" else ""
    return report, [left] if left else []
