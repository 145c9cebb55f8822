#!/usr/bin/env python3
"""Publish the images that jobs proved and pushed in the signed catalogue: scripts/ci/publish.py --results FOLDER

FOLDER holds what scripts/ci/cell.py left of each cell. Each image is pulled by the digest that its job came to, and
`envbuild catalog publish` signs for it: with the keys in the settings, or with the identity token that CI gives this job
(ENVBUILD_SIGNING_IDENTITY). Run it by with-login, in a job that builds nothing: what a build runs must not get the token.

It goes on past a failure, and exits as the first one did.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from collect import results_in
from workflow import ROOT, cell_text, code, summary, table

from envbuild.settings import load_settings
from envbuild.util.below import OutsideError, read_below
from envbuild.util.foreign_json import parse_json
from envbuild.util.names import Digest, checked

RESULT_LIMIT = 4 << 20


def proven(folder: Path) -> tuple[str, str] | None:
    """Return the cell and the digest of the image that a job proved, or None where it proved none.

    Raises:
        ValueError: what it left cannot be read.

    """
    try:
        found: Any = parse_json(read_below(folder, "result.json", limit=RESULT_LIMIT), limit=RESULT_LIMIT)
    except (OSError, OutsideError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(found, dict):
        raise ValueError("it is no object")  # noqa: TRY004 - every reader of foreign data raises ValueError
    image = found.get("image")
    if found.get("ended") != "passed" or not isinstance(image, dict):
        return None
    return str(found.get("id")), checked(Digest, image.get("digest"))


def publish(registry: str, docker: tuple[str, ...], digest: str) -> int:
    """Publish an image of the registry; return the exit code."""
    reference = f"{registry}@{digest}"
    held = identity_of(docker, reference)
    if subprocess.run([*docker, "pull", "--quiet", reference], check=False).returncode:
        return 8
    try:
        words = [sys.executable, "-m", "envbuild", "catalog", "publish", reference, "--digest", digest]
        return subprocess.run(words, check=False).returncode
    finally:
        if not held:  # the next image needs the room; what was here before stays
            image = identity_of(docker, reference)
            subprocess.run([*docker, "image", "rm", "--force", image], check=False, capture_output=True)


def identity_of(docker: tuple[str, ...], reference: str) -> str:
    """Return the id of an image of the engine, or an empty text."""
    words = [*docker, "image", "inspect", "--format", "{{.Id}}", reference]
    return subprocess.run(words, check=False, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Publish what passed; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, metavar="FOLDER", help="what the jobs left")
    results = parser.parse_args().results.absolute()
    os.chdir(ROOT)
    settings = load_settings()
    if not settings.registry:
        sys.exit("error: no registry is set (ENVBUILD_REGISTRY)")
    rows, exit_code = [], 0
    for folder in results_in(results):
        try:
            found = proven(folder)
        except ValueError as error:
            rows.append([code(folder.name), "", f"its result cannot be read: {cell_text(error)}"])
            exit_code = exit_code or 2
            continue
        if found is None:
            continue
        cell, digest = found
        ended = publish(settings.registry, settings.docker_command, digest)
        rows.append([code(cell), code(digest), f"exit code {ended}" if ended else "published"])
        exit_code = exit_code or ended
    summary(
        "### Published\n\n" + table(["cell", "image", "how"], rows) if rows else "No cell passed; nothing to publish."
    )
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
