"""Why a build failed: the lock, the network, the disk, or the stage itself."""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from envbuild.engine.builders import says_missing
from envbuild.engine.progress import Watch
from envbuild.errors import BuildError, EnvbuildError, HostError, LockError
from envbuild.settings import Settings
from envbuild.util.space import says_full

# How uv and os-install say that a file's hash is not the lock's.
_FOREIGN = re.compile(r"[Hh]ash mismatch for|which the lock does not name")

# How os-install, uv, git and the engine say that a host did not answer, or answered that it cannot serve now.
_UNREACHED = re.compile(
    r"no package lists from (?!\S+\s+4(?:03|04|10)\b)|Temporary failure|[Cc]ould not resolve|no such host"
    r"|[Cc]onnection (?:refused|reset|timed out|failed)|[Uu]nable to connect|dns error|error sending request"
    r"|HTTP status server error|HTTP status client error \(429|returned error: 5\d\d|unexpected status.*: 5\d\d|i/o timeout"
    r"|due to network timeout|request or response body error"  # an answer that stops, or breaks off
)

# How they say that a host does not have it, or no longer.
_GONE = re.compile(
    r"E: Version '.+' for '.+' was not found|E: Failed to fetch \S+\s+4(?:04|10)\b|no package lists from \S+\s+4(?:04|10)\b"
    r"|HTTP status client error \(4(?:04|10)\b|failed to resolve source metadata for \S+ .*: not found|not our ref"
)

# What BuildKit prints when a step's input is no longer in its cache: garbage collection or a prune removed it.
_LOST = re.compile(r"content digest \S+: not found|snapshot \S+ does not exist|lease \S+: not found")

# The stages whose steps have no network: what they reach for is missing in the lock or in the source.
_OFFLINE = re.compile(r"(?:build|compiled|tree)-|stack$")

# Less than this where the cache lies, and a failure is the disk's.
_NO_SPACE_GIB = 0.06


def stage_failure(settings: Settings, watch: Watch, target: str, log: Path) -> EnvbuildError:
    """Return the error for a build of `target` that failed, from what `watch` saw."""
    stage, lines = watch.failure()
    printed = ":\n    " + "\n    ".join(lines)
    output = watch.tail()  # what matters of it may not be among `lines`
    watch.log.flush()
    if missing := says_missing(settings, "\n".join(lines)):
        return missing
    foreign = [line for line in lines if _FOREIGN.search(line)]
    if foreign:
        return LockError(
            f"stage {stage or target} got a file that the lock does not name{printed}",
            where=f"the whole log is in {log}",
            hint="ask who runs the index or mirror why it changed; lock again only if the change is meant",
        )
    what = f"stage {stage or target} failed{printed}"
    where = f"the whole log is in {log}"
    again = "then run the same command again: finished stages come from the cache"
    if no_answer(stage, lines):
        check = "check that the engine's containers reach the network and resolve names, and the mirror, proxy and index settings"
        return disk_or(settings, log, HostError(what, where=where, hint=f"{check}; {again}"), output)
    if _fetch_says(_GONE, stage, lines):
        what = f"stage {stage or target} asked a host for what it does not have, or no longer{printed}"
        hint = (
            "without --lock and --locked, run the same command again: OS packages are then pinned again; else lock again, "
            "or name a mirror or an index in the settings that keeps what the lock names"
        )
        return disk_or(settings, log, LockError(what, where=where, hint=hint), output)
    if any(_LOST.search(line) for line in (*lines, *watch.errors)):
        error = HostError(
            f"the builder removed from its cache what stage {stage or target} needs{printed}",
            where=where,
            hint="run the same command again; if that ends so, too, free some of the disk or raise the limits of the "
            "builder's cache (https://docs.docker.com/build/cache/garbage-collection/)",
        )
        return disk_or(settings, log, error, output)
    return disk_or(settings, log, BuildError(what, where=where, hint=f"fix the cause; {again}"), output)


def no_answer(stage: str, lines: Iterable[str]) -> bool:
    """Return whether a stage failed because a host that it asked did not answer; `lines` are the last of its output."""
    return _fetch_says(_UNREACHED, stage, lines)


def _fetch_says(pattern: re.Pattern[str], stage: str, lines: Iterable[str]) -> bool:
    return not _OFFLINE.match(stage) and any(pattern.search(line) for line in lines)


def disk_or(settings: Settings, log: Path, error: EnvbuildError, output: str = "") -> EnvbuildError:
    """Return `error`, or the full disk where that is what it or `output`, the end of a log, comes from."""
    text = f"{error.what} {error.hint} {output}"
    free = shutil.disk_usage(settings.cache_dir).free / 2**30
    if says_full(text) or free < _NO_SPACE_GIB:
        return HostError(
            f"the disk is full, or this user's quota of it ({free:.1f} GiB free on the disk of the cache)",
            where=f"the whole log is in {log}",
            hint="free some (docker builder prune, docker image prune) and run again; finished stages come from the cache",
        )
    return error
