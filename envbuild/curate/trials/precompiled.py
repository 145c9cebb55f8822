"""torch's headers, parsed once by g++ for all components that are tried with the same flags."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from envbuild.util.scratch import scratch

_HEADER = "torch_of_a_trial.h"
_INCLUDED = "#include <torch/extension.h>\n"
_MOST = 16
"""Precompiled headers that are kept at a time: of each minor release of torch one. One has 0.8 GB."""


class Precompiled:
    """Precompiled headers of torch by the flags that they were made with; they are gone when its `with` block ends.

    Args:
        run: runs a compiler's command; returns its first error, empty when there is none.

    """

    def __init__(self, run: Callable[[Sequence[str]], str]) -> None:
        self._run = run
        self._folders = ExitStack()
        self._made: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def __enter__(self) -> Self:
        self._place = self._folders.enter_context(scratch("precompiled"))
        return self

    def __exit__(self, *_: object) -> None:
        self._folders.close()
        self._made.clear()

    def flags(self, compiler: str, flags: Sequence[str]) -> tuple[str, ...]:
        """Return the flags that take the header, which is made where it is missing.

        None where torch's headers do not pass by themselves.
        """
        key = hashlib.sha256(json.dumps([compiler, *flags]).encode()).hexdigest()[:16]
        if key not in self._made:
            if len(self._made) >= _MOST:
                oldest, _ = self._made.popitem(last=False)
                (self._place / oldest / f"{_HEADER}.gch").unlink(missing_ok=True)
            self._made[key] = self._make(self._place / key, compiler, flags)
        self._made.move_to_end(key)
        return self._made[key]

    def _make(self, folder: Path, compiler: str, flags: Sequence[str]) -> tuple[str, ...]:
        folder.mkdir(exist_ok=True)
        header = folder / _HEADER
        header.write_text(_INCLUDED, encoding="utf-8")
        command = [compiler, "-x", "c++-header", *flags, "-o", f"{header}.gch", str(header)]
        return ("-I", str(folder), "-include", _HEADER) if self._run(command) == "" else ()
