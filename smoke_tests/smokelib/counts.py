"""On how many ranks, and in which layouts, a number of GPUs is tried."""

import functools
import itertools
import math
from typing import List, Tuple


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun: `1 GPU`, `2 GPUs`."""
    return "{} {}{}".format(number, noun, "" if number == 1 else "s")


def worlds(nproc: int) -> List[int]:
    """Return 2, 4, 8 … as far as there are ranks; the count itself too."""
    sizes = [2**n for n in range(1, nproc.bit_length()) if 2**n <= nproc]
    return sizes if nproc in sizes or nproc == 1 else [*sizes, nproc]


def batch_of(nproc: int, batch: int) -> int:
    """Return the least multiple of `batch` that every one of these counts divides."""
    return functools.reduce(lambda a, b: a * b // math.gcd(a, b), worlds(nproc), batch)


def layouts(nproc: int, batch: int) -> List[Tuple[int, int, int]]:
    """Return (TP, PP, DP) whose product is at most `nproc`: each of 1 or 2, DP alone up to 8, and all three on as many
    ranks as can share the batch."""
    found = []
    for tp, pp in itertools.product((1, 2), (1, 2)):
        for dp in (1, 2, 4, 8):
            if 2 <= tp * pp * dp <= nproc and (dp <= 2 or (tp, pp) == (1, 1)):
                found.append((tp, pp, dp))
    most = max((dp for dp in range(3, nproc // 4 + 1) if batch % dp == 0), default=0)
    return [*found, (2, 2, most)] if most else found
