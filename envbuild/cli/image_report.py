"""The answer of `envbuild image`: as JSON values, and as text."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.cli.cell_options import ResolvedRequest

if TYPE_CHECKING:
    from envbuild.pipeline.image import Made


def report_on(asked: ResolvedRequest, made: "Made", unreached: dict[str, str]) -> dict[str, Any]:
    """Return what is known of an image before it is proven, as JSON values.

    Args:
        asked: the request.
        made: the image.
        unreached: the components that are left out as their source cannot be reached, and the host that holds it.

    """
    from envbuild.run.container import shown

    built = made.built
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
        "left_out": {**left_out_of(asked), **{axis: why_unreached(host) for axis, host in unreached.items()}},
        "unreached": unreached,
        "notes": [{"rule": rule.id, "text": rule.why, "source": rule.source} for rule in asked.solution.notes],
        "only_when_asked": sorted(axis for axis in asked.solution.left_out if asked.matrix.axes[axis].use == "asked"),
        "stages": [
            {"name": s.name, "seconds": round(s.seconds, 1), "executed": s.executed, "cached": s.cached}
            for s in built.stages
        ],
        "executed": built.executed,
        "wheels_taken": [
            {"component": each.component, "reference": each.reference, "signers": list(each.signers)}
            for each in built.taken
        ],
        "log": str(built.log) if built.log else None,
        "run": shown(["envbuild", "run", built.tag]),
    }


def why_unreached(host: str) -> str:
    """Return why a component is left out whose source lies on `host`."""
    return f"its source cannot be reached ({host}), and no flag or stack names it"


def left_out_of(asked: ResolvedRequest) -> dict[str, str]:
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
    """Return where an image came from, without its digest, which has its own line."""
    return (reference or "").partition("@")[0]


def _line(text: str) -> str:
    """Return what an image reports about itself, fit for a terminal."""
    from envbuild.util.names import shown

    return shown(text, 2000)


def for_people(report: dict[str, Any]) -> str:
    """Return the whole report in words."""
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
    if report["verified"]["by"] == "nobody":  # its own Python reports it, which cannot be trusted
        lines += ["", "what the image reports about itself"]
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
    forbidden = {axis: why for axis, why in report["left_out"].items() if axis not in report["unreached"]}
    lines += left_out_lines(forbidden)
    if report["notes"]:
        lines += ["", "to know", *(f"  - {note['text']}" for note in report["notes"])]
    if report["only_when_asked"]:
        lines += ["", f"not in it; a flag or a stack adds them: {', '.join(report['only_when_asked'])}"]
    if report["pushed"]:
        lines += ["", f"pushed to {report['pushed']}"]
        lines += [f"wheel of {each['component']} in {each['reference']}" for each in report["wheels_pushed"]]
    lines += ["", "run it", f"  {report['run']}"]
    # last, where nobody overlooks it: with the network it would be in the image
    return "\n".join([*lines, *unreached_lines(report["unreached"])])


def left_out_lines(left_out: Mapping[str, str]) -> list[str]:
    """Return the block of an answer on the components of `left_out_of`; nothing where there is none."""
    return ["", "left out", *(f"  - {axis}: {why}" for axis, why in left_out.items())] if left_out else []


def unreached_lines(unreached: Mapping[str, str]) -> list[str]:
    """Return the last block of an answer: the components whose source could not be reached, by the host that holds it."""
    if not unreached:
        return []
    rows = (f"  - {axis} ({host}): `--{axis} auto` requires it" for axis, host in unreached.items())
    return ["", "left out, because the source cannot be reached from here", *rows]
