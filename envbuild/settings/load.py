"""Which value wins: the environment, the settings file, what the machine states, the default."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from envbuild.errors import DataError, HostError
from envbuild.settings.machine import from_machine, split_value
from envbuild.settings.model import Settings
from envbuild.settings.places import default_cache, exists, is_writable
from envbuild.util.homes import home_of, xdg_folder
from envbuild.util.names import shown
from envbuild.util.text import redact
from envbuild.util.toml import read_toml

_NOT_SETTINGS = frozenset(
    # the file of the settings, what shows tracebacks, and what the shell rendering reads
    {"ENVBUILD_CONFIG", "ENVBUILD_DEBUG"}
    | {f"ENVBUILD_{name}" for name in ("ADOPT_TORCH", "OFFLINE", "PREFIX", "PYTHON", "UV", "WHEELS")}
)


def config_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the path of the settings file, whether it exists or not; None when this user has no home to hold one."""
    env = os.environ if environ is None else environ
    if env.get("ENVBUILD_CONFIG"):
        return Path(env["ENVBUILD_CONFIG"])
    folder = xdg_folder(env, "XDG_CONFIG_HOME", ".config")
    return folder / "envbuild" / "config.toml" if folder else None


def load_settings(*, environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> Settings:
    """Read the settings of this user on this machine. Reads files, touches no network.

    It writes nothing, but for the cache's folder under `$TMPDIR` where it falls back to that.

    Args:
        environ: the environment; this process's own by default.
        root: the folder that `/etc` is looked for in.

    Raises:
        DataError: the settings file or an `ENVBUILD_` variable holds an unknown key or a value that cannot be.
        HostError: the `cache_dir` that was set cannot be written.

    """
    env = os.environ if environ is None else environ
    notices: list[str] = []
    chosen: dict[str, tuple[Any, str]] = {}

    path = config_path(env)
    if path is not None and (env.get("ENVBUILD_CONFIG") or exists(path)):
        chosen |= {key: (value, str(path)) for key, value in _from_file(path, env).items()}
    chosen |= _from_environment(env, notices)

    for key, value, origin in from_machine(env, root):
        if key in chosen:
            continue
        try:
            chosen[key] = (_validated({key: value}, env)[key], origin)
        except ValidationError as error:
            notices.append(f"{key}: passing over the value of {origin}: {_message(error)}")

    if "cache_dir" in chosen:
        value, origin = chosen["cache_dir"]
        if not is_writable(value):
            raise HostError(
                f"the cache folder {value} cannot be written",
                where=f"cache_dir from {origin}",
                hint="choose a folder that this user can write, or remove the setting",
            )
    else:
        chosen["cache_dir"] = (default_cache(env, notices), "default")

    settings = Settings.model_validate({key: value for key, (value, _) in chosen.items()})
    settings._origins.update({key: origin for key, (_, origin) in chosen.items()})  # noqa: SLF001
    settings._notices = tuple(notices)  # noqa: SLF001
    return settings


def _validated(values: Mapping[str, Any], env: Mapping[str, str], folder: Path | None = None) -> dict[str, Any]:
    """Return `values` as the model reads them; raises pydantic's ValidationError."""
    context = {"home": home_of(env), "folder": folder}
    model = Settings.model_validate({"cache_dir": "/", **values}, context=context)
    return {key: getattr(model, key) for key in values}


def _message(error: ValidationError) -> str:
    # Without the input that pydantic would show: it may hold a password.
    first = error.errors(include_url=False, include_input=False)[0]
    return redact(first["msg"].removeprefix("Value error, "))


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key[:60], Settings.model_fields, n=1)
    return f"did you mean {close[0]}? " if close else ""


def _from_file(path: Path, env: Mapping[str, str]) -> dict[str, Any]:
    if env.get("ENVBUILD_CONFIG") and not exists(path):
        raise DataError(
            "the settings file that ENVBUILD_CONFIG names does not exist",
            where=str(path),
            hint="correct or unset ENVBUILD_CONFIG",
        )
    raw = read_toml(path)
    for key in raw:
        if key not in Settings.model_fields:
            raise DataError(
                f"{shown(key, 60)!r} is not a setting",
                where=str(path),
                hint=f"{_nearest(key)}docs/reference/settings.md lists the settings: {', '.join(Settings.model_fields)}",
            )
    try:
        return _validated(raw, env, path.absolute().parent)
    except ValidationError as error:
        key = str(error.errors(include_input=False)[0]["loc"][0])
        raise DataError(f"{key}: {_message(error)}", where=str(path), hint=f"correct {key} in that file") from None


def _from_environment(env: Mapping[str, str], notices: list[str]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for name, text in sorted(env.items()):
        if not name.startswith("ENVBUILD_") or name in _NOT_SETTINGS or not text.strip():
            continue
        key = name.removeprefix("ENVBUILD_").lower()
        if key not in Settings.model_fields:
            # Not an error: a site may use such a name for something else.
            notices.append(f"{name} is not a setting: {_nearest(key)}docs/reference/settings.md lists them")
            continue
        try:
            found[key] = (_validated({key: split_value(key, text)}, env)[key], name)
        except ValidationError as error:
            raise DataError(f"{key}: {_message(error)}", where=name, hint=f"correct or unset {name}") from None
    return found
