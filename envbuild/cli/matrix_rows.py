"""`envbuild matrix AXIS` and `matrix cells`: the releases of an axis, the combinations that fit, what is known of each."""

from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.axes import pin_options, request_from
from envbuild.cli.complete import complete_axis, completing
from envbuild.cli.output import emit, json_option, progress_options
from envbuild.components import CHOICES
from envbuild.util.text import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envbuild.evidence.listed import Listed, Listing
    from envbuild.matrix.load import Matrix
    from envbuild.matrix.model import Release, Rule

_SHOWN = 400
"""Characters of a release's relations in a listing; `--json` has all."""


def axis_command(name: str) -> click.Command:
    @click.command(name, help=f"List the releases of {name}, all or those that SPEC matches.")
    @click.argument("spec", required=False, shell_complete=completing(name))
    @json_option
    def axis(spec: str | None, as_json: bool) -> None:
        from envbuild.matrix.load import load_matrix
        from envbuild.solver.asked import matching

        loaded = load_matrix()
        listed = loaded.releases[name]
        releases = listed if spec is None else matching(loaded, name, spec, f"envbuild matrix {name}")
        rules = [rule for rule in loaded.rules if is_about(rule, name)]
        known = _of_releases(loaded, name, releases)
        answer = {
            "matrix": loaded.digest,
            "axis": loaded.axes[name].model_dump(),
            "releases": [
                {
                    **release.model_dump(mode="json", by_alias=True, exclude_none=True),
                    "standing": word.as_json() if word else None,
                }
                for release, word in zip(releases, known, strict=True)
            ],
            "rules": [rule.id for rule in rules],
        }
        emit(answer, as_json=as_json, human=lambda: _releases(releases, known, rules, name))

    return axis


def _listing(loaded: "Matrix", allowed: "dict[str, tuple[str, ...]] | None" = None) -> "Listing":
    from envbuild.evidence.listed import Listing
    from envbuild.evidence.pairs import trials_of
    from envbuild.evidence.refs import committed_evidence

    return Listing(loaded, committed_evidence(), trials_of(loaded), allowed)


def _of_releases(loaded: "Matrix", name: str, releases: "Sequence[Release]") -> "list[Listed | None]":
    from envbuild.evidence.listed import is_spoken_of

    if not is_spoken_of(loaded.axes[name]):
        return [None] * len(releases)
    listing = _listing(loaded)
    return [listing.of({name: release.version}) for release in releases]


def is_about(rule: "Rule", axis: str) -> bool:
    """Return whether a rule is about an axis."""
    parts = (rule.when, rule.needs, rule.with_, rule.without, rule.same, *rule.any_of)
    return any(axis in part for part in parts)


def _releases(releases: "Sequence[Release]", known: "Sequence[Listed | None]", rules: "list[Rule]", name: str) -> str:
    from envbuild.cli.show import table
    from envbuild.matrix.text import spec_text

    with_proof = any(known)
    rows: list[tuple[str, ...]] = [("version", "date", *(("proof",) if with_proof else ()), "states", "source")]
    for release, word in zip(releases, known, strict=True):
        stated = [f"needs {axis} {spec_text(spec)}" for axis, spec in release.needs.items()]
        stated += [f"{axis} {value}" for axis, value in release.fixes.items()]
        if release.commit:
            stated.append(f"commit {release.commit[:12]}")
        if release.aliases:
            stated.append(f"also {', '.join(release.aliases)}")
        if release.asked:
            stated.append("only when requested")
        if name in CHOICES and release.note:
            stated.append(release.note)
        text = "; ".join(stated)
        day = release.date.isoformat() if release.date else ""
        text = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
        proof = (word.text if word else "",) if with_proof else ()
        rows.append((release.version, day, *proof, text, release.source))
    return f"{table(rows, indent='')}\n\n{count_of(len(rules), 'rule names', 'rules name')} {name}: `envbuild matrix rules --axis {name}`"


@click.command()
@click.argument("axes", nargs=-1, required=True, shell_complete=complete_axis)
@click.option("--count", is_flag=True, help="Print only the number of combinations.")
@pin_options
@json_option
@progress_options
def cells(axes: tuple[str, ...], count: bool, as_json: bool, **flags: Any) -> None:
    """List or count the combinations of versions of AXES that fit together.

    The flags narrow the list: `envbuild matrix cells torch te --cuda 12.6 --gpu h100`. The column `proof` has the
    strongest word that runs and trials give a cell with these versions.
    """
    from envbuild.cli.show import table
    from envbuild.evidence.listed import allowed_by
    from envbuild.matrix.load import load_matrix
    from envbuild.solver.asked import read_request
    from envbuild.solver.enumerate import enumerate_cells

    loaded = load_matrix()
    axes = tuple(dict.fromkeys(axes))
    request = request_from(flags)
    found = list(enumerate_cells(loaded, axes, request.pins))
    place = {axis: {r.version: i for i, r in enumerate(loaded.releases[axis])} for axis in axes}
    # what an open axis was asked to be is not among its releases; it is the same in every row then
    found.sort(key=lambda cell: [place[axis].get(cell.get(axis, ""), -1) for axis in axes])
    answer: dict[str, Any] = {"matrix": loaded.digest, "axes": list(axes), "count": len(found)}
    known: list[Listed] = []
    if not count:
        listing = _listing(loaded, allowed_by(read_request(loaded, request)))
        known = [listing.of(cell) for cell in found]
        if as_json:
            answer["cells"] = [{**cell, "standing": word.as_json()} for cell, word in zip(found, known, strict=True)]

    def human() -> str:
        if count:
            return str(len(found))
        rows = [(*(cell.get(axis, "-") for axis in axes), word.text) for cell, word in zip(found, known, strict=True)]
        return table([(*axes, "proof"), *rows], indent="") + f"\n\n{count_of(len(found), 'combination')}"

    emit(answer, as_json=as_json, human=human)
