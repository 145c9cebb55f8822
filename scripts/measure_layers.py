"""How much images share: builds cells one after the other, and counts the bytes of the layers that each one adds.

    python scripts/measure_layers.py '--cuda 13.0 --te 2.12 --gpu h100' '--cuda 13.0 --te 2.11 --gpu h100'

Bytes are those of a registry and of a pull: compressed blobs, each counted once. An image is removed when it was counted.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Mapping

TAG = "envbuild-measure:layers"


def blobs(tag: str) -> dict[str, int]:
    """Return the bytes of each blob of the engine's image, by digest."""
    with subprocess.Popen(["docker", "image", "save", tag], stdout=subprocess.PIPE) as saved:
        assert saved.stdout is not None
        with tarfile.open(fileobj=saved.stdout, mode="r|") as archive:
            return {
                m.name.rpartition("/")[2]: m.size for m in archive if m.isreg() and m.name.startswith("blobs/sha256/")
            }


def table(images: Mapping[str, Mapping[str, int]]) -> str:
    """Return a table of the images in their order: how many bytes each has, and how many no earlier one has."""
    rows, held = ["| cell | bytes | new bytes |", "|---|---|---|"], dict[str, int]()
    for flags, sizes in images.items():
        new = sum(size for digest, size in sizes.items() if digest not in held)
        rows.append(f"| `{flags}` | {sum(sizes.values()):,} | {new:,} |")
        held |= sizes
    total, largest = sum(held.values()), max(sum(sizes.values()) for sizes in images.values())
    rows.append(f"\n{len(images)} images: {total:,} bytes, {total / largest:.3f} times the largest one alone.")
    return "\n".join(rows)


def main() -> int:
    """Build, count, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", metavar="FLAGS", help="a cell, as `envbuild image` takes it")
    parser.add_argument("--json", action="store_true", help="print the bytes of each blob of each image")
    options = parser.parse_args()
    images: dict[str, dict[str, int]] = {}
    for flags in options.cells:
        command = [
            sys.executable,
            "-m",
            "envbuild",
            "image",
            *shlex.split(flags),
            "--no-pull",
            "--no-smoke",
            "--tag",
            TAG,
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        images[flags] = blobs(TAG)
        subprocess.run(["docker", "image", "rm", "--force", TAG], check=True, stdout=subprocess.DEVNULL)
        print(flags, f"{sum(images[flags].values()):,} bytes", file=sys.stderr)
    print(json.dumps(images, indent=1) if options.json else table(images))
    return 0


if __name__ == "__main__":
    sys.exit(main())
