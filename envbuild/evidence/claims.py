"""What is known of a cell: one of four words for the whole and for each component, and the reason.

The words are `Proof`'s: run on this GPU, run elsewhere, tried without a GPU, stated only. A record gives a word no further
than it counts (`place.differences`).
"""

import datetime as dt
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from envbuild.components import CHOICES, COMPONENTS, SOFTWARE
from envbuild.evidence.place import differences, parts, place_of, proof_of, replaced_of
from envbuild.evidence.records import Evidence
from envbuild.evidence.standing import Standing, Status, Suite, evidence_for, standing_for
from envbuild.matrix.cell import NONE, Cell
from envbuild.matrix.fleet import GPU, gpus_in
from envbuild.matrix.model import AxisName
from envbuild.solver.proof import EvidenceRef, Proof
from envbuild.util.frozen import Frozen, field, replace


class Tried(Protocol):
    """What trials of two releases came to."""

    @property
    def verdict(self) -> str:
        """`passed`, `failed` or `undecided`."""

    @property
    def read(self) -> Mapping[AxisName, str]:
        """What they read that is another release or build than what was asked about."""

    def describe(self) -> str:
        """Return it in words: `tried: metadata and names passed`."""


class Trials(Protocol):
    """The trials that there are, by pair."""

    def of(self, versions: Mapping[AxisName, str]) -> Tried | None:
        """Return what is known of two releases, axis -> version; None where they were not tried."""


class ComponentClaim(Frozen):
    """What is known of one component of a cell."""

    proof: Proof
    text: str
    """The word, with what it is short of "run on this GPU" where little says it: `run elsewhere (sm_90)`."""
    record: str | None = None
    """Id of the record that it rests on."""
    tried: Mapping[AxisName, str] = field(default_factory=dict)
    """What the trials with each other component of the cell came to, in words."""
    read: tuple[str, ...] = ()
    """What these trials read that is another release or build than the cell's: `torch 2.12.1+cu130`."""


class Claim(Frozen):
    """What is known of a cell from its own records, from those of another cell with its software, or from trials."""

    status: Status
    """As `Standing.status`, and `never` where the run does not count for this cell."""
    proof: Proof
    text: str
    """The same in words."""
    record: Evidence | None = None
    """The record that it rests on."""
    differences: Mapping[str, str] = field(default_factory=dict)
    """What of that run was not as in this cell, in words by kind."""
    components: Mapping[AxisName, ComponentClaim] = field(default_factory=dict)
    gpus: Mapping[str, "Claim"] = field(default_factory=dict)
    """Of a mixed fleet: what is known of each GPU, such as `sm_90`; the claim itself is then the weakest of them."""

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values; `ran_on` is on what the record's run took place, None where there is none.

        `ran_on` has an axis of CHOICES only where something was chosen.
        """
        record = self.record
        place = place_of(record) if record else {}
        place = {axis: value for axis, value in place.items() if axis not in CHOICES or value != NONE}
        return {
            "status": self.status,
            "text": self.text,
            "date": f"{record.date.astimezone(dt.UTC):%Y-%m-%dT%H:%M:%SZ}" if record else None,
            "claim": self.proof.value,
            "record": record.id if record else None,
            "ran_on": {"machine": record.machine, "image": record.image, **place} if record else None,
            "differences": dict(self.differences),
            "components": {
                axis: {
                    "claim": each.proof.value,
                    "text": each.text,
                    "record": each.record,
                    "tried": dict(each.tried),
                }
                for axis, each in self.components.items()
            },
            **({"gpus": {gpu: _short(each) for gpu, each in self.gpus.items()}} if self.gpus else {}),
        }


def _short(claim: Claim) -> dict[str, str | None]:
    record = claim.record.id if claim.record else None
    return {"claim": claim.proof.value, "status": claim.status, "text": claim.text, "record": record}


def claim_of(
    cell: Cell,
    proven: Iterable[EvidenceRef],
    records: Collection[Evidence],
    *,
    suite: Suite | None = None,
    lock_digest: str | None = None,
    trials: Trials | None = None,
) -> Claim:
    """Return what is known of the cell: from its own records, or where they prove less, from others with its software or trials.

    A failure of the cell itself comes before whatever others prove.

    Of a mixed fleet it is what is known of each GPU, with the components that are for that GPU.

    Args:
        cell: the cell.
        proven: the records that the solver found for its software.
        records: every record.
        suite: as for `evidence_for`.
        lock_digest: the cell's lock; a record of the cell with another one is stale.
        trials: the ledger of trials.

    """
    proven = tuple(proven)

    def of(versions: Mapping[AxisName, str]) -> Claim:
        return _claim_of(cell.id, versions, proven, records, suite=suite, lock_digest=lock_digest, trials=trials)

    gpus = gpus_in(cell.versions)
    if len(gpus) < 2:
        return of(cell.versions)
    return _of_fleet({gpu: of(versions_on(cell.versions, gpu)) for gpu in gpus})


def versions_on(versions: Mapping[AxisName, str], gpu: str) -> dict[AxisName, str]:
    """Return what of a fleet's cell one of its GPUs runs: without the components that are for others alone."""
    sm = gpu.removeprefix("sm_")
    unserved = {axis for axis, component in COMPONENTS.items() if component.sms and sm not in component.sms}
    return {**{axis: version for axis, version in versions.items() if axis not in unserved}, GPU: gpu}


_WORST: tuple[Status, ...] = ("failed", "never", "stale", "verified")


def _of_fleet(gpus: Mapping[str, Claim]) -> Claim:
    weakest = min(gpus.values(), key=lambda each: (_STRENGTH.index(each.proof), _WORST.index(each.status)))
    axes = dict.fromkeys(axis for each in gpus.values() for axis in each.components)
    components = {}
    for axis in axes:
        held = {gpu: each.components[axis] for gpu, each in gpus.items() if axis in each.components}
        least = min(held.values(), key=lambda each: _STRENGTH.index(each.proof))
        components[axis] = replace(least, text=_by_gpu({gpu: each.text for gpu, each in held.items()}))
    return replace(
        weakest,
        status=min((each.status for each in gpus.values()), key=_WORST.index),
        text=_by_gpu({gpu: each.text for gpu, each in gpus.items()}),
        components=components,
        gpus=gpus,
    )


def _by_gpu(texts: Mapping[str, str]) -> str:
    """Return the text of each GPU, those of the same text together."""
    alike: dict[str, list[str]] = {}
    for gpu, text in texts.items():
        alike.setdefault(text, []).append(gpu)
    return "; ".join(f"{', '.join(named)}: {text}" for text, named in alike.items())


def _claim_of(
    own_id: str,
    versions: Mapping[AxisName, str],
    proven: Iterable[EvidenceRef],
    records: Collection[Evidence],
    *,
    suite: Suite | None,
    lock_digest: str | None,
    trials: Trials | None,
) -> Claim:
    components = component_claims(versions, records, trials)

    def claim(standing: Standing, cell_id: str | None = None) -> Claim:
        record = standing.record
        assert record is not None  # noqa: S101  # asked only where there is one
        found = differences(record, versions)
        proof = proof_of(record, versions) if record.passed else Proof.STATED
        text = _words(standing, record, proof, found, versions)
        return Claim(
            # a failure warns wherever it was; a pass is one of this cell only where it counts for it
            status="never" if record.passed and (found or proof is Proof.STATED) else standing.status,
            proof=proof,
            text=text if cell_id is None else f"{text}, in {cell_id}",
            record=record,
            differences=found,
            components=components,
        )

    own = [record for record in records if record.cell_id == own_id]
    standing = standing_for(own, versions, suite=suite, lock_digest=lock_digest)
    mine = claim(standing) if standing.record else None
    if mine and standing.record and (mine.proof is Proof.HERE or not standing.record.passed):
        return mine

    def stronger(other: Claim) -> Claim:
        """Return what another cell's run or trials prove, or this cell's own run, where that is no less."""
        warns = other.status == "failed" and mine and mine.proof is Proof.STATED
        return other if not mine or warns or _is_stronger(other.proof, mine.proof) else mine

    ids = {ref.id for ref in proven}
    others = [record for record in records if record.id in ids]  # of cells that hold what was left open
    if not others:
        tried = _tried(components)
        read = _read(components)
        with_ = f", with {', '.join(read)}" if read else ""
        text = f"{tried.words}: trials of its components with each other passed{with_}" if tried is Proof.TRIED else ""
        text = text or f"{tried.words}: no run of it is recorded"
        return stronger(Claim(status="never", proof=tried, text=text, components=components))

    nearest = min(
        others,
        key=lambda other: (
            len(_not_held(other, versions)),
            other.device == "cpu",
            len(differences(other, versions)),
            other.image is None,
            -other.date.timestamp(),
        ),
    )
    alike = [
        r
        for r in records
        if r.cell_id == nearest.cell_id and differences(r, versions) == differences(nearest, versions)
    ]
    found = claim(evidence_for(alike, cell_id=nearest.cell_id, suite=suite), nearest.cell_id)
    if missing := _not_held(nearest, versions):
        return mine or Claim(
            status="never",
            proof=min((each.proof for each in components.values()), key=_STRENGTH.index, default=Proof.STATED),
            text=f"{Proof.STATED.words}; all but {', '.join(missing)}: {found.text}",
            components=components,
        )
    return stronger(found)


def _not_held(record: Evidence, versions: Mapping[AxisName, str]) -> list[AxisName]:
    """Return the software of a cell that the run does not speak of: in another version, from another source, or not there."""
    replaced = replaced_of(record)
    return [
        name for name in SOFTWARE if name in versions and (name in replaced or record.cell.get(name) != versions[name])
    ]


_STRENGTH = (Proof.STATED, Proof.TRIED, Proof.ELSEWHERE, Proof.HERE)


def _is_stronger(one: Proof, other: Proof) -> bool:
    return _STRENGTH.index(one) > _STRENGTH.index(other)


def _words(
    standing: Standing, record: Evidence, proof: Proof, found: Mapping[str, str], versions: Mapping[AxisName, str]
) -> str:
    """Return what a standing says of a cell: `run elsewhere: not run on sm_100; run on sm_90: 4x H200, driver 580, …`."""
    on, here = place_of(record)["gpu"], versions.get("gpu")
    by = f" that envbuild {record.other_release} made" if record.other_release else ""
    machine = f"{f'the image{by}, ' if record.image else ''}{record.machine}, {record.date:%Y-%m-%d}"
    but = [*parts(record), *(words for kind, words in found.items() if kind != "gpu")]
    with_ = f", with {', '.join(but)}" if but else ""
    if not record.passed:
        text = f"failed on {'' if on == NONE else f'{on}: '}{machine}{with_}: {record.reason.partition(chr(10))[0]}"
    elif "gpu" in found:
        text = f"{proof.words}: not run on {here or 'a CPU'}; run on {on}: {machine}{with_}"
    elif proof is Proof.STATED:
        text = f"{proof.words}; run in part: {machine}{with_}"
    elif proof is Proof.ELSEWHERE:
        text = f"{proof.words}: run on {on}: {machine}{with_}"
    else:
        text = f"{proof.words}: {machine}{with_}"
    return f"stale: {text}, but {standing.why_stale}" if standing.status == "stale" else text


def component_claims(
    versions: Mapping[AxisName, str], records: Collection[Evidence], trials: Trials | None = None
) -> dict[AxisName, ComponentClaim]:
    """Return what is known of each component of a cell; runs of some tests alone, or below a training step, give none."""
    whole = [record for record in records if record.passed and not parts(record)]
    return {axis: _component(axis, versions, whole, trials) for axis in SOFTWARE if axis in versions}


def _component(
    axis: AxisName, versions: Mapping[AxisName, str], whole: Sequence[Evidence], trials: Trials | None
) -> ComponentClaim:
    def other(record: Evidence) -> list[str]:
        """Return what of the cell's other software ran in another version, from another source, or not at all."""
        return [
            f"another source of {name}"
            if record.cell.get(name) == versions[name]
            else f"{name} {record.cell.get(name) or NONE}"
            for name in _not_held(record, versions)
        ]

    def proof(record: Evidence) -> Proof:
        word = proof_of(record, {name: each for name, each in versions.items() if name not in replaced_of(record)})
        return Proof.ELSEWHERE if word is Proof.HERE and other(record) else word

    tried = _tried_with(axis, versions, trials)
    holding = [record for record in whole if axis not in _not_held(record, versions)]
    best = max(
        holding,
        key=lambda r: (
            _STRENGTH.index(proof(r)),
            -len(other(r)),
            -len(differences(r, versions)),
            r.image is not None,
            r.date,
        ),
        default=None,
    )
    passed = bool(tried) and all(each.verdict == "passed" for each in tried.values())
    words = {name: each.describe() for name, each in tried.items()}
    if best is None:
        word = Proof.TRIED if passed else Proof.STATED
        read = tuple(dict.fromkeys(f"{name} {v}" for each in tried.values() for name, v in each.read.items()))
        text = f"{word.words} (with {', '.join(read)})" if passed and read else word.words
        return ComponentClaim(proof=word, text=text, tried=words, read=read)
    word = proof(best)
    on = place_of(best)["gpu"]
    short = [*([on] if "gpu" in differences(best, versions) else []), *(f"with {name}" for name in other(best))]
    return ComponentClaim(
        proof=word, text=f"{word.words} ({', '.join(short)})" if short else word.words, record=best.id, tried=words
    )


def _tried_with(axis: AxisName, versions: Mapping[AxisName, str], trials: Trials | None) -> dict[AxisName, Tried]:
    """Return what the trials of a component with each other of the cell came to."""
    if trials is None:
        return {}
    found = {}
    for name in SOFTWARE:
        if name != axis and name in versions:
            tried = trials.of({axis: versions[axis], name: versions[name]})
            if tried is not None:
                found[name] = tried
    return found


def tried_word(versions: Mapping[AxisName, str], trials: Trials) -> tuple[Proof, tuple[str, ...]]:
    """Return the word that trials alone give a cell, and what they read that is another build: `torch 2.10.0+cu128`."""
    components = component_claims(versions, (), trials)
    return _tried(components), _read(components)


def _read(components: Mapping[AxisName, ComponentClaim]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for each in components.values() for name in each.read))


def _tried(components: Mapping[AxisName, ComponentClaim]) -> Proof:
    """Return the word for a cell that never ran: tried, where each component was; CUDA is none, and comes with torch."""
    words = [each.proof for axis, each in components.items() if axis in COMPONENTS]
    return Proof.TRIED if words and all(word is not Proof.STATED for word in words) else Proof.STATED
