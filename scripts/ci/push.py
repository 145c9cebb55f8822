#!/usr/bin/env python3
"""Push the image of a cell that scripts/ci/cell.py proved on this machine: scripts/ci/push.py '--cuda 13.0 --te 2.12'

The image is there and its proof is remembered, so that nothing is built or tested again. Run it by with-login.
"""

import os
import sys

from cell import tag_of
from workflow import ROOT, words_of

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FLAGS")
    os.chdir(ROOT)
    flags = sys.argv[1]
    command = [sys.executable, "-m", "envbuild", "image", *words_of(flags), "--tag", tag_of(flags), "--push"]
    os.execv(sys.executable, command)
