"""The training curves of a record (level `train`), checked, and how two of them differ.

Two curves are compared with a band from the seeds: the seeds differ in the start of the weights alone, the data are the
same, so the spread of their losses is what a change without meaning may come to. The band of a step is the largest loss
of the seeds minus the smallest, averaged over WINDOW steps around it, because five seeds may meet in one step by chance.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from envbuild.errors import DataError
from envbuild.evidence.records import Evidence
from envbuild.util.frozen import Frozen
from envbuild.util.names import shown
from envbuild.util.text import count_of

WINDOW = 9
"""Steps that the band is averaged over, at most; an odd number."""
SEEDS = 5
"""Seeds that a band needs."""
_TEST = "test_train.py::test_train_curve["
_STEPS = 100_000
_LARGEST = 1e30
"""A loss above is none: differences of such numbers would be infinite, which JSON cannot hold."""

Verdict = Literal["equal", "within-band", "outside-band"]


class Curve(Frozen):
    """The losses of one way to train, by seed, and the gradient norms of the first seed."""

    training: Mapping[str, Any]
    """How it was trained: two curves of other settings are no comparison."""
    losses: Mapping[int, Sequence[float]]
    """Seed -> the loss of each step; the first seed is the one that is compared."""
    norms: Sequence[float]

    @property
    def compared(self) -> Sequence[float]:
        """The losses that are compared with another record's."""
        return next(iter(self.losses.values()))

    def band(self) -> list[float]:
        """Return how far apart the losses of the seeds are, by step."""
        spread = [max(values) - min(values) for values in zip(*self.losses.values(), strict=True)]
        half = WINDOW // 2
        return [
            math.fsum(near) / len(near)
            for n in range(len(spread))
            for near in [spread[max(0, n - half) : n + half + 1]]
        ]


def curves_of(record: Evidence, where: str) -> tuple[dict[str, Curve], dict[str, str]]:
    """Return the curves of a record by how they were trained, and why others have none.

    Args:
        record: the record.
        where: the file that it comes from, for messages.

    Raises:
        DataError: it has no curve, or one that cannot be.

    """
    found, without = {}, {}
    for test in record.tests:
        if not test.id.startswith(_TEST):
            continue
        variant = test.id.removeprefix(_TEST).removesuffix("]")
        if test.outcome != "passed":
            without[variant] = f"{test.outcome}: {test.reason.partition(chr(10))[0]}"
            continue
        try:
            found[variant] = _curve(test.figures)
        except ValueError as error:
            raise DataError(
                f"the curve {shown(variant)} of this record cannot be: {error}",
                where=where,
                hint="make another with `envbuild smoke --level train --record FOLDER`",
            ) from None
    if not found:
        raise DataError(
            f"this record has no training curve: its run went to the level {shown(record.level)}"
            + (f" and came to {shown(next(iter(without.values())))}" if without else ""),
            where=where,
            hint="`envbuild smoke --level train --record FOLDER` makes one that has",
        )
    return found, without


def _curve(figures: Mapping[str, Mapping[str, Any]]) -> Curve:
    def value(name: str) -> Any:
        if name not in figures:
            raise ValueError(f"it has no {name}")
        return figures[name].get("value")

    training = value("training")
    match training:
        case {"seeds": list() as seeds, "steps": steps}:
            pass
        case _:
            raise ValueError("how it was trained is not stated")
    if type(steps) is not int or not 1 <= steps <= _STEPS:
        raise ValueError(f"its number of steps is not from 1 to {_STEPS}")
    if any(type(seed) is not int for seed in seeds) or not SEEDS <= len(set(seeds)) == len(seeds) <= 100:
        raise ValueError(f"it does not state {SEEDS} seeds or more, each once")
    return Curve(
        training=training,
        losses={seed: _numbers(value(f"seed {seed}, losses"), steps) for seed in seeds},
        norms=_numbers(value(f"seed {seeds[0]}, gradient norms"), steps),
    )


def _numbers(values: Any, count: int) -> list[float]:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"a list in it does not have {count_of(count, 'number')}")
    for each in values:
        if type(each) not in {int, float} or not abs(each) <= _LARGEST:
            raise ValueError("a list in it has something else than numbers")
    return [float(each) for each in values]


class Place(Frozen):
    """A step in which two curves differ."""

    step: int
    first: float
    second: float
    band: float | None = None
    """How far apart the seeds are there; None of a gradient norm, which has no band."""

    @property
    def difference(self) -> float:
        """How far apart the two are."""
        return abs(self.first - self.second)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        found = {"step": self.step, "first": self.first, "second": self.second, "difference": self.difference}
        return found if self.band is None else {**found, "band": self.band}


class Comparison(Frozen):
    """How two curves of one way to train differ."""

    variant: str
    steps: int
    parted: Place | None
    """The first step in which the losses differ in any bit."""
    norms_parted: Place | None
    """The first step in which the gradient norms do."""
    largest: Place | None
    """Where the losses are furthest apart, in parts of the band."""
    outside: Place | None
    """The first step in which they are further apart than the band."""

    @property
    def verdict(self) -> Verdict:
        """`equal` is to the bit, losses and gradient norms."""
        if self.outside:
            return "outside-band"
        return "within-band" if self.parted or self.norms_parted else "equal"

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        places = {
            "parted": self.parted,
            "gradient_norms_parted": self.norms_parted,
            "largest": self.largest,
            "outside": self.outside,
        }
        return {
            "curve": self.variant,
            "verdict": self.verdict,
            "steps": self.steps,
            **{name: place.as_json() if place else None for name, place in places.items()},
        }


def compare(variant: str, first: Curve, second: Curve) -> Comparison:
    """Compare the second curve with the first, whose seeds make the band.

    Raises:
        ValueError: they were trained in other ways.

    """
    if first.training != second.training:
        keys = [key for key in first.training if first.training[key] != second.training.get(key)]
        keys += [key for key in second.training if key not in first.training]
        raise ValueError(f"trained in another way: {', '.join(shown(str(key)) for key in keys)}")
    band = first.band()
    pairs = enumerate(zip(first.compared, second.compared, strict=True))
    places = [Place(step=n, first=a, second=b, band=band[n]) for n, (a, b) in pairs if a != b]
    norms = enumerate(zip(first.norms, second.norms, strict=True))
    outside = [place for place in places if place.difference > (place.band or 0.0)]
    return Comparison(
        variant=variant,
        steps=len(band),
        parted=places[0] if places else None,
        norms_parted=next((Place(step=n, first=a, second=b) for n, (a, b) in norms if a != b), None),
        largest=max(places, key=_parts) if places else None,
        outside=outside[0] if outside else None,
    )


def _parts(place: Place) -> tuple[float, float]:
    """Return the difference in parts of the band, and as it is where the band is nothing."""
    return (place.difference / place.band if place.band else math.inf, place.difference)
