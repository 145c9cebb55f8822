"""The one settings file and its environment.

A value comes from the first of: the environment (`ENVBUILD_<KEY>`), the settings file, what this machine already says for
the same thing (uv's and pip's configuration, proxy variables, apt's sources), the default. `Settings.origin` names the one.
"""

from envbuild.settings.load import config_path, load_settings
from envbuild.settings.model import LIST_KEYS, Settings
from envbuild.util.text import redact

__all__ = ["LIST_KEYS", "Settings", "config_path", "load_settings", "redact"]
