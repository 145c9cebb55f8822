"""Where a user's own files lie: the home, and the folders of the XDG specification."""

import os
from collections.abc import Mapping
from pathlib import Path


def home_of(env: Mapping[str, str]) -> Path | None:
    """Return the home that HOME names, else the account; None where neither names one."""
    text = env.get("HOME")
    if not text:
        import pwd

        try:
            text = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # a container run under a number that no account has
            return None
    return Path(text) if Path(text).is_absolute() else None


def xdg_folder(env: Mapping[str, str], variable: str, below_home: str) -> Path | None:
    """Return the folder that `variable` names, else the one below the home; None where there is no home."""
    text = env.get(variable, "")
    if Path(text).is_absolute():  # the XDG specification has relative values ignored
        return Path(text)
    home = home_of(env)
    return home / below_home if home else None
