"""Regular expressions that are compiled when they are first used: most commands use few of those that modules state."""

import re
from typing import Any, cast


class _Pattern:
    def __init__(self, text: str, flags: int) -> None:
        self._stated = text, flags

    def __getattr__(self, name: str) -> Any:
        found = getattr(re.compile(*self._stated), name)
        setattr(self, name, found)
        return found


def pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    """Return what `re.compile` returns, compiled at its first use."""
    return cast("re.Pattern[str]", _Pattern(text, flags))
