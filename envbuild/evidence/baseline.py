"""A bench run against the record of an earlier one: a slow image is a finding, and what changed is named."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from envbuild.errors import DataError, UsageError
from envbuild.evidence.named import altered, gpu_of, run_differences
from envbuild.evidence.records import Evidence
from envbuild.evidence.report import Level
from envbuild.lock.compare import differing_locks
from envbuild.util.frozen import Frozen
from envbuild.util.names import shown

SLOWEST = 0.95
"""Below this part of the baseline's tokens per second a run is slow.

Of the committed runs of the default cell on H200, 16 on three days, none is below 0.9504 of another in any row
(docs/results/train.md).
"""
_RATE = "tokens per second"
_LOWEST, _HIGHEST = 1e-6, 1e15
"""No rate is outside of these; what a record states may be."""


class Rate(Frozen):
    """One row of the bench in two runs, in tokens per second."""

    name: str
    before: float
    now: float

    @property
    def part(self) -> float:
        """The present rate as a part of the earlier one."""
        return self.now / self.before

    @property
    def slow(self) -> bool:
        """Whether that is too little."""
        return self.part < SLOWEST

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"name": self.name, "baseline": self.before, "now": self.now, "part": round(self.part, 4)}


class Held(Frozen):
    """A run and its baseline, row by row."""

    rates: tuple[Rate, ...]
    absent: tuple[str, ...]
    """Rows that only one of the two has: of other counts of ranks, or of a component that the other cell does not have."""

    @property
    def slow(self) -> tuple[Rate, ...]:
        """The rows that are too slow, the slowest first."""
        return tuple(sorted((rate for rate in self.rates if rate.slow), key=lambda rate: rate.part))


def check_baseline(baseline: Evidence, where: str) -> None:
    """Raise DataError where a record is no baseline: it did not pass, is of a part of the tests, or has no rate."""
    problem = (
        f"its run came to {baseline.verdict}"
        if not baseline.passed
        else f"it has no {_RATE}; its run went to the level {shown(baseline.level)} on {baseline.device}"
        if not dict(_rates(baseline, where))
        else ""
    )
    if problem:
        raise DataError(
            f"this record is no baseline: {problem}",
            where=where,
            hint=f"name the record of a `smoke --level {Level.BENCH.value}` that passed on a GPU",
        )


def hold(run: Evidence, baseline: Evidence, where: str) -> Held:
    """Compare a run with its baseline.

    Args:
        run: the run.
        baseline: an earlier one, which `check_baseline` has passed.
        where: the baseline's file, for messages.

    Raises:
        UsageError: they are of other models of GPU.
        DataError: they have no row in common.

    """
    if gpu_of(run) != gpu_of(baseline):
        raise UsageError(
            f"the baseline is of {shown(gpu_of(baseline))}, this run was on {shown(gpu_of(run))}",
            where=where,
            hint="name a record of the same model of GPU; rates of two models are no comparison",
        )
    # A test that failed because it was slow has measured all the same, and its rows are what one wants to see.
    before, now = dict(_rates(baseline, where)), dict(_rates(run, "this run", ("passed", "failed")))
    rates = tuple(Rate(name=name, before=before[name], now=now[name]) for name in before if name in now)
    if not rates:
        raise DataError(f"this run and the baseline have no row with {_RATE} in common", where=where)
    return Held(rates=rates, absent=tuple(sorted(before.keys() ^ now.keys())))


def next_to(run: Evidence, baseline: Evidence, path: Path, locks: Sequence[Path]) -> tuple[dict[str, Any], str]:
    """Return how the run's rates are next to the baseline's, as JSON values, and what makes it a failure, if anything.

    Args:
        run: the run.
        baseline: an earlier one, which `check_baseline` has passed.
        path: the baseline's file.
        locks: folders of locks, in which those of the two are looked for.

    Raises:
        UsageError, DataError: as `hold`.

    """
    held = hold(run, baseline, str(path))
    changed = run_differences(baseline, run)
    differing, note = differing_locks((baseline.lock_digest, run.lock_digest), locks)
    answer = {
        "record": baseline.id,
        "slowest": SLOWEST,
        "rates": [rate.as_json() for rate in held.rates],
        "not_compared": list(held.absent),
        "runs_differ": [each.as_json() for each in changed],
        "locks_differ": None if differing is None else [each.as_json() for each in differing],
        "locks_note": note,
    }
    if not held.slow:
        return answer, ""
    rate = held.slow[0]
    text = f"slow: {rate.name} has {rate.now:,.0f} {_RATE}, {rate.part:.1%} of the baseline's {rate.before:,.0f}" + (
        f" (and {len(held.slow) - 1} more)" if len(held.slow) > 1 else ""
    )
    names = [each.what for each in (*changed, *(differing or ()))]
    what = f"; changed since: {', '.join(names[:12])}" if names else "; nothing that is recorded changed since"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    hint = (
        "; both images are of one lock: `envbuild audit` names the files that it does not give"
        if altered(baseline, run)
        else ""
    )
    return answer, text + what + more + hint


def _rates(record: Evidence, where: str, outcomes: Collection[str] = ("passed",)) -> Iterator[tuple[str, float]]:
    for test in record.tests:
        if test.level != Level.BENCH or test.outcome not in outcomes:
            continue
        for name, figure in test.figures.items():
            value = figure.get("value")
            if not name.endswith(_RATE):
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not _LOWEST <= value <= _HIGHEST:
                raise DataError(f"{shown(name)} is no rate", where=where)
            yield name.removesuffix(_RATE).rstrip(", "), float(value)
