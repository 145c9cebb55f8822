"""`envbuild image` and `envbuild pull`: the image of a cell, proven as far as this host can."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.axes import keyword
from envbuild.cli.output import emit, json_option, note, tell
from envbuild.cli.road import Asked, asked_from, digest_option, parse_digest, road_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from python_on_whales import DockerClient

    from envbuild.engine.build import Built
    from envbuild.evidence.report import Device, SmokeReport
    from envbuild.lock.files import Locked
    from envbuild.pipeline import Made
    from envbuild.settings import Settings
    from envbuild.stacks import Use
    from envbuild.verify.checks import Audit


@click.command()
@road_options
@click.option("--tag", metavar="NAME:TAG", help="Name of the image. [default: envbuild:<cell id>]")
@click.option("--locked", is_flag=True, help="Use the cell's lock exactly as it is; never make or renew one.")
@click.option("--no-pull", is_flag=True, help="Do not look for a prebuilt image in the registry of the settings.")
@digest_option
@click.option("--no-cache", is_flag=True, help="Run every build step again.")
@click.option("--no-smoke", is_flag=True, help="Stop after the audit.")
@click.option("--push", "do_push", is_flag=True, help="Push the image to the registry of the settings.")
@click.option("--builder", metavar="NAME", help="A buildx builder: local, remote or kubernetes.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Compile jobs at once. [default: from cores, memory and what a job needs]",
)
@click.option(
    "--build-context",
    "contexts",
    multiple=True,
    metavar="STAGE=SOURCE",
    help="Replace an external input, as `docker buildx build` does.",
)
@json_option
def image(
    tag: str | None,
    locked: bool,
    no_pull: bool,
    digest: str | None,
    no_cache: bool,
    no_smoke: bool,
    do_push: bool,
    builder: str | None,
    jobs: int | None,
    contexts: tuple[str, ...],
    as_json: bool,
    lock_file: Path | None,
    sources: tuple[str, ...],
    **flags: Any,
) -> None:
    """Build the image of a cell, or pull it if it is prebuilt; audit it and prove as much as this host allows.

    Builds in the Docker engine or the buildx builder that is there. Of a pulled image the answer says who vouches for
    it; one that only the registry vouches for is not verified. Exits with 3 when no cell fits, 4 when an input or a
    prebuilt image is not what was expected, 5 when a stage fails, 6 or 7 when audit or smoke find a defect, 8 when this host lacks something.
    """
    from envbuild.engine.build import engine_client
    from envbuild.engine.leftovers import clear
    from envbuild.errors import UsageError
    from envbuild.pipeline import make_image, push_image
    from envbuild.verify.proofs import KEPT, kept_proof

    started = time.monotonic()
    substitutes = _contexts(contexts)
    expected = parse_digest(digest)
    if substitutes and do_push:
        raise UsageError(
            "an image with a replaced input is not what its lock says, and the registry holds images by their lock",
            where="--push with --build-context",
            hint="leave --push out; docker tag and docker push publish it under a name of its own",
        )
    asked = asked_from(flags, lock_file=lock_file, sources=sources)
    changed = {k: v for k, v in (("builder", builder), ("jobs", jobs)) if v is not None}
    settings = asked.settings.model_copy(update=changed)
    tell(settings)
    note(f"cell {asked.solution.cell.id}")
    client = engine_client(settings)
    clear(settings)
    asked, found, left_out = _with_lock(
        asked,
        settings,
        client,
        tag,
        flags,
        lock_file,
        sources,
        replaced=substitutes,
        locked_only=locked,
        pull=not no_pull,
    )
    from envbuild.cli.show import StageDisplay

    display: list[StageDisplay] = []

    def show(plan: Any) -> Any:
        display.append(StageDisplay({s.name: s.title for s in plan.stages}))
        display[0].__enter__()  # entered here, left below, whatever happens between
        return display[0].change, display[0].note

    try:
        made = make_image(
            settings,
            asked.matrix,
            asked.inputs,
            client,
            found,
            tag=tag,
            locked_only=locked,
            pull=not no_pull,
            cache=not no_cache,
            display=show,
            substitutes=substitutes,
            digest=expected,
        )
    finally:
        for each in display:
            each.__exit__(None, None, None)
    report = _report(asked, made, left_out)
    device = _device(settings, made)
    proof = asked.stack.proof if asked.stack else ()
    kept = kept_proof(settings, made.built.digest, device, stack_proof=proof) if made.origin == "found" else None
    failure: Exception | None = None
    if kept is not None:
        report |= {key: kept[key] for key in KEPT} | {"proven": "earlier, on this machine"}
    else:
        failure = _prove(settings, client, made, report, device, proof=proof, with_smoke=not no_smoke)
    report["replaced"] = substitutes
    report["not_proven"] += [
        f"the image of this lock: {stage} was replaced by {source}" for stage, source in substitutes.items()
    ]
    if made.verified.by == "nobody":
        report["not_proven"].append(
            "that the image was made from its lock: only the registry vouches for it, and what the image says of itself in "
            "an audit or a test is its own word (--no-pull builds it here, --digest says which one you expect)"
        )
    report["pushed"] = push_image(settings, client, made) if do_push and failure is None else None
    report["seconds"] = round(time.monotonic() - started, 1)
    emit(report, as_json=as_json, human=lambda: _told(report))
    if failure is not None:
        raise failure


def _contexts(texts: tuple[str, ...]) -> dict[str, str]:
    from envbuild.errors import UsageError

    found = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not equals or not name or not source:
            raise UsageError(
                f"{text!r} replaces nothing",
                where="--build-context",
                hint="write STAGE=SOURCE, as in base=docker-image://debian:12",
            )
        found[name] = source
    return found


def _with_lock(
    asked: Asked,
    settings: "Settings",
    client: "DockerClient",
    tag: str | None,
    flags: dict[str, Any],
    lock_file: Path | None,
    sources: tuple[str, ...],
    *,
    replaced: "Mapping[str, str]",
    locked_only: bool,
    pull: bool,
) -> tuple[Asked, "tuple[Locked, Path]", dict[str, str]]:
    """Return the request's lock; a component that nobody asked for and whose source is out of reach is left out."""
    from envbuild.lock.files import read_lock
    from envbuild.lock.find import check_fits, require_complete
    from envbuild.pipeline import UnreachableError, find_present, lock_for, require_sources
    from envbuild.plan.plan import plan_of

    if lock_file is not None:
        named = read_lock(lock_file)
        check_fits(named.lock, asked.inputs, str(lock_file))
        require_complete(named.lock, str(lock_file), replaced)
        return asked, (named, lock_file), {}
    try:
        found = lock_for(settings, asked.matrix, asked.inputs, locked_only=locked_only, note=note, replaced=replaced)
        plan = plan_of(asked.matrix, found[0], asked.stack)
        if find_present(settings, client, plan, tag or plan.tag, pull=pull, expected=None) is None:
            require_sources(settings, plan, replaced=replaced, note=note)
    except UnreachableError as error:
        lacking = {m.component: m.host for m in error.missing}
        droppable = all(
            axis in asked.matrix.axes and asked.matrix.axes[axis].use == "default" and not _was_asked(flags, axis)
            for axis in lacking
        )
        if locked_only or not droppable:
            raise
    else:
        return asked, found, {}
    left_out = {axis: f"its source is out of reach ({host}), and nobody asked for it" for axis, host in lacking.items()}
    for name, why in left_out.items():
        note(f"{name} is left out: {why}; `--{name} auto` insists on it")
    again = {**flags, **{keyword(name): "none" for name in left_out}}
    asked = asked_from(again, lock_file=None, sources=sources)
    note(f"cell {asked.solution.cell.id}")
    found = lock_for(settings, asked.matrix, asked.inputs, locked_only=False, note=note, replaced=replaced)
    return asked, found, left_out


def _was_asked(flags: dict[str, Any], axis: str) -> bool:
    if flags.get(keyword(axis)):
        return True
    if flags.get("stack") is not None:
        from envbuild.stacks import load_stack

        return axis in load_stack(flags["stack"]).axes
    return False


def _prove(
    settings: "Settings",
    client: "DockerClient",
    made: "Made",
    report: dict[str, Any],
    device: "Device",
    *,
    proof: "Sequence[Use]",
    with_smoke: bool,
) -> Exception | None:
    """Audit and smoke the image into `report`, with the stack's own proof; return the error that a failure calls for."""
    from envbuild.engine.build import find_image
    from envbuild.errors import EnvbuildError
    from envbuild.verify.audit import audit
    from envbuild.verify.proofs import keep_proof

    note("audit")
    audited = audit(settings, made.built.tag)
    report["audit"] = audited.as_json()
    report["smoke"], report["stack_proof"] = None, []
    report["proven"] = "now"
    report["not_proven"] = [f"{c.name}: {c.text}" for c in audited.checks if c.verdict == "unproven"]
    if audited.defects:
        report["not_proven"].append("smoke tests, because the audit found defects")
        return _raised(audited.raise_for_defects)
    if not with_smoke:
        report["not_proven"].append("smoke tests were left out by --no-smoke")
        return None
    if not settings.engine_is_here:
        report["not_proven"].append("smoke tests: the engine is on another host (`envbuild smoke TAG` there runs them)")
        return None
    smoked, unproven = _smoke(settings, made, audited, device)
    report["not_proven"] += unproven
    report["smoke"] = {
        "verdict": smoked.verdict,
        "level": str(smoked.level),
        "device": smoked.device,
        **smoked.counts,
        "reason": smoked.reason,
    }
    failure = _raised(smoked.raise_for_verdict)
    if failure is None and proof:
        from envbuild.verify import stack_proof

        note(f"the stack's own proof: {', '.join(use.name for use in proof)}")
        shown = stack_proof.show(settings, made.built.tag, proof, device)
        report["stack_proof"] = [asdict(each) for each in shown]
        report["not_proven"] += [
            f"the stack's proof {each.name}: {each.reason}" for each in shown if each.outcome == "unproven"
        ]
        failure = _raised(lambda: stack_proof.raise_for(shown, made.built.tag))
    if failure is None and find_image(client, made.built.tag, made.built.digest) is not None:
        keep_proof(settings, made.built.digest, report)  # what ran was this image, and none that took its name
    assert failure is None or isinstance(failure, EnvbuildError)  # noqa: S101
    return failure


def _raised(check: "Callable[[], None]") -> Exception | None:
    from envbuild.errors import EnvbuildError

    try:
        check()
    except EnvbuildError as error:
        return error
    return None


def _device(settings: "Settings", made: "Made") -> "Device":
    """Return where this host can prove the image: on its GPUs, when the cell is for CUDA, or on the processor."""
    from envbuild.host import facts as host_facts

    return "cuda" if made.plan.cell.versions["cuda"] != "cpu" and host_facts(settings=settings).gpus else "cpu"


def _smoke(settings: "Settings", made: "Made", audited: "Audit", device: "Device") -> "tuple[SmokeReport, list[str]]":
    """Run the smoke levels that this host can, and name those that it cannot."""
    from envbuild.evidence.report import Level
    from envbuild.verify.smoke import SmokeRequest, run_smoke
    from envbuild.verify.target import ImageTarget

    lacking = device == "cpu" and made.plan.cell.versions["cuda"] != "cpu"
    note("smoke" + (" (on CPU)" if lacking else ""))
    request = SmokeRequest(
        target=ImageTarget(reference=made.built.tag),
        expected=audited.facts["expected"],
        level=Level.DISTRIBUTED,
        device=device,
    )
    report = run_smoke(request, settings)
    unproven = "kernels and training on a GPU: this host has none (`envbuild smoke TAG` there proves them)"
    return report, [unproven] if lacking else []


def _report(asked: Asked, made: "Made", left_out: dict[str, str]) -> dict[str, Any]:
    from envbuild.run.container import shown

    built: Built = made.built
    lock = made.locked.lock
    return {
        "tag": built.tag,
        "digest": built.digest,
        "size_bytes": built.size,
        "origin": made.origin,
        "verified": made.verified.as_json(),
        "reference": made.reference,
        "cell": dict(lock.cell),
        "id": lock.as_cell.id,
        "lock": {"digest": lock.digest, "folder": str(made.lock_folder), "complete": lock.complete},
        "left_out": {**_left_out(asked), **left_out},
        "only_when_asked": sorted(axis for axis in asked.solution.left_out if asked.matrix.axes[axis].use == "asked"),
        "stages": [
            {"name": s.name, "seconds": round(s.seconds, 1), "executed": s.executed, "cached": s.cached}
            for s in built.stages
        ],
        "executed": built.executed,
        "log": str(built.log) if built.log else None,
        "run": shown(["envbuild", "run", built.tag]),
    }


def _left_out(asked: Asked) -> dict[str, str]:
    """Return the components that every image holds unless something forbids them, and what forbade them."""
    return {
        axis: why
        for axis, why in asked.solution.left_out.items()
        if asked.matrix.axes[axis].use == "default" and axis not in {"gpu", "toolchain"}
    }


def _short(path: str) -> str:
    home = str(Path.home())
    return "~" + path[len(home) :] if path.startswith(home + "/") else path


def _place(reference: str | None) -> str:
    """Return where an image came from, without its digest, which stands in a line of its own."""
    return (reference or "").partition("@")[0]


def _line(text: str) -> str:
    """Return what an image says of itself, fit for a terminal."""
    from envbuild.util.names import shown

    return shown(text, 2000)


def _told(report: dict[str, Any]) -> str:
    from envbuild.cli.show import table

    unpacked, packed = report["audit"]["size"]["bytes"] / 2**30, report["size_bytes"] / 2**30
    earlier = f", pulled earlier from {_place(report['reference'])}" if report["reference"] else ", unchanged"
    how = {
        "found": f"was there already{earlier}",
        "pulled": f"pulled from {_place(report['reference'])}",
        "built": "built",
    }[report["origin"]]
    lines = [
        f"{report['tag']}",
        f"  {how} in {report['seconds']:.0f} s",
        f"  digest  {report['digest']}",
        *([f"  trust   {report['verified']['text']}"] if report["reference"] else []),
        f"  size    {unpacked:.2f} GiB, {packed:.2f} GiB compressed",
        f"  lock    {report['lock']['digest'][:26]}… in {_short(report['lock']['folder'])}",
    ]
    ran = [s for s in report["stages"] if s["executed"] or s["cached"]]
    if ran:
        lines += ["", "where the time went"]
        rows: list[tuple[str, ...]] = [
            (s["name"], f"{s['seconds']:7.1f} s" if s["executed"] else "   cached")
            for s in ran
            if s["executed"] == 0 or s["seconds"] >= 0.1
        ]
        lines.append(table(rows))
    if report["verified"]["by"] == "nobody":  # its own Python says it, and who knows whose that is
        lines += ["", "what the image says of itself"]
    else:
        lines += ["", "proven" if report["proven"] == "now" else f"proven {report['proven']}"]
    checks = report["audit"]["checks"]
    lines += [
        f"  {'ok' if c['verdict'] == 'passed' else 'DEFECT':6} {_line(c['name'])}: {_line(c['text'])}"
        for c in checks
        if c["verdict"] != "unproven"
    ]
    if report["smoke"]:
        s = report["smoke"]
        lines.append(
            f"  {'ok' if s['verdict'] == 'passed' else s['verdict'].upper():6} smoke on {s['device']}: {s['passed']} passed, {s['failed']} failed, {s['skipped']} skipped"
        )
    lines += [
        f"  {'ok' if each['outcome'] == 'passed' else 'FAILED':6} the stack's proof {each['name']}"
        for each in report["stack_proof"]
        if each["outcome"] != "unproven"
    ]
    if report["not_proven"]:
        lines += ["", "not proven", *(f"  - {_line(text)}" for text in report["not_proven"])]
    if report["left_out"]:
        lines += ["", "left out", *(f"  - {axis}: {why}" for axis, why in report["left_out"].items())]
    if report["only_when_asked"]:
        lines += ["", f"not in it, being asked for by flag or stack only: {', '.join(report['only_when_asked'])}"]
    if report["pushed"]:
        lines += ["", f"pushed to {report['pushed']}"]
    return "\n".join([*lines, "", "run it", f"  {report['run']}"])


@click.command()
@road_options
@click.option("--tag", metavar="NAME:TAG", help="Name of the image. [default: envbuild:<cell id>]")
@digest_option
@json_option
def pull(
    tag: str | None,
    digest: str | None,
    as_json: bool,
    lock_file: Path | None,
    sources: tuple[str, ...],
    **flags: Any,
) -> None:
    """Pull the prebuilt image of a cell's lock from the registry of the settings, and say who vouches for it.

    The image must carry the lock that was asked for. Its content is verified only where somebody else than the registry
    named its digest: --digest, this machine's own build of the lock, or a committed evidence record. Then any other
    digest is refused. Otherwise the answer says that it is not verified.

    Exits with 4 when the cell has no lock or the image is not the expected one, and with 8 when the registry does not
    hold it.
    """
    from envbuild.engine.build import engine_client
    from envbuild.errors import DataError, HostError
    from envbuild.lock.files import read_lock
    from envbuild.pipeline import expected_of, lock_for, pull_prebuilt, registry_reference
    from envbuild.plan.plan import plan_of

    named = parse_digest(digest)
    asked = asked_from(flags, lock_file=lock_file, sources=sources)
    if lock_file is not None:
        locked = read_lock(lock_file)
    else:
        locked, _ = lock_for(asked.settings, asked.matrix, asked.inputs, locked_only=True, note=note)
    plan = plan_of(asked.matrix, locked, asked.stack)
    name = tag or plan.tag
    reference = registry_reference(asked.settings, locked.lock)
    if reference is None:
        raise DataError(
            "no registry is set to pull from",
            where="pull",
            hint="set `registry` in the settings, such as ghcr.io/acme/envbuild",
        )
    expected = expected_of(asked.settings, plan, named)
    found = pull_prebuilt(asked.settings, engine_client(asked.settings), plan, name, expected=expected)
    if found is None:
        raise HostError(
            "the registry holds no image of this lock",
            where=reference,
            hint="build it: envbuild image, with --push to put it there",
        )
    built, pulled = found
    answer = {
        "tag": built.tag,
        "digest": built.digest,
        "size_bytes": built.size,
        "reference": reference,
        "lock": locked.lock.digest,
        "verified": pulled.verified.as_json(),
    }
    emit(
        answer,
        as_json=as_json,
        human=lambda: f"{built.tag}\n  from    {reference}\n  digest  {built.digest}\n  trust   {pulled.verified.text}",
    )
