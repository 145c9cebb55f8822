"""Whether an error is that of a full disk, or of a user's full share of one."""

import errno
import re

_FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)


def is_full(error: OSError) -> bool:
    """Return whether a call failed because the disk, or this user's quota of it, is full."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT}


def says_full(text: str) -> bool:
    """Return whether a program's output says so, in the words of the C library."""
    return _FULL.search(text) is not None
