"""The oldest buildx and BuildKit that images are built with, and why these."""

import re

BUILDX = "0.15"
"""Before it `buildx bake --progress rawjson` wrote an event over many lines (BuildKit's pull request 4770), which nothing here
reads: no stage is named, and an image that Docker 28 has stored looks like a failure (`rewrite-timestamp` and `unpack`)."""
BUILDKIT = "0.13"
"""The first with the exporter's option `rewrite-timestamp` (BuildKit's pull request 4057). An older one passes over it, and makes
an image of another digest."""


def older(version: str | None, floor: str) -> bool:
    """Return whether a version as a program writes it, `v0.13.1-desktop.1`, is before `floor`; an unknown one is not.

    A distribution that compiles a program without stating its version makes it write `v0.0.0+unknown`, as Debian's engine
    does of its BuildKit: that is unknown, too.
    """
    found = re.match(r"v?(\d{1,6})\.(\d{1,6})", version or "")
    if found is None or (not int(found[1]) and not int(found[2])):
        return False
    major, minor = floor.split(".")
    return (int(found[1]), int(found[2])) < (int(major), int(minor))
