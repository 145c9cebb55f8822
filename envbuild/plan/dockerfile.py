"""Plan -> Dockerfile and bake file."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING

from envbuild.errors import LockError
from envbuild.paths import data_dir
from envbuild.plan.plan import Plan
from envbuild.util import quote

if TYPE_CHECKING:
    from jinja2 import Environment


_COMPILED = "Dockerfile.j2"
_HEAD = """'''dockerfiles/Dockerfile.j2 as Python. Written by scripts/compile_template.py: do not edit.

Long because Jinja writes a line for each piece of the template.
'''
# mypy: ignore-errors
from envbuild.plan.template_runtime import {names}

OF = "{sha256}"
"""

_SEARCHED = ("PATH", "LD_LIBRARY_PATH")
OF_CONTAINERS = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_REQUIRE_CUDA")
"""Variables that the NVIDIA container toolkit reads, and nothing in the image."""


def envpath(value: str, name: str) -> str:
    """Quote the value of a variable for ENV; a search path that ends in itself goes on with what the base image has."""
    if name in _SEARCHED and value.endswith(f":${name}"):
        return quote.dockerfile_env(value.removesuffix(f"${name}"))[:-1] + f'${name}"'
    return quote.dockerfile_env(value)


def shellpath(value: str, name: str) -> str:
    """Quote the value of a variable for a shell, which would run what stands between backquotes."""
    return envpath(value, name).replace("`", "\\`")


def _words(values: Iterable[str]) -> str:
    return " ".join(map(quote.plain, values))


def _commas(values: Iterable[str]) -> str:
    return ",".join(map(quote.plain, values))


def _globs(values: Iterable[str]) -> str:
    return " ".join(map(quote.shell_glob, values))


def _heredoc(text: str) -> str:
    return quote.heredoc(text, "envbuild_end")


def _finalize(value: object) -> object:
    """Return what an expression of a template writes: text that a quoting function made, or a value that needs none."""
    from markupsafe import Markup

    return value if hasattr(value, "__html__") else Markup(quote.plain(str(value)))  # noqa: S704


@cache
def _templates() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    env = Environment(
        loader=FileSystemLoader(data_dir("dockerfiles")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Markup is what a quoting function made. Whatever else a template writes goes through `_finalize` first, so that
        # no value is written as it is.
        autoescape=True,
        finalize=_finalize,
    )

    env.filters |= _filters()
    return env


def _filters() -> "dict[str, Callable[..., str]]":
    from markupsafe import Markup

    def quoting(function: Callable[..., str]) -> Callable[..., Markup]:
        return lambda *values: Markup(function(*values))  # noqa: S704

    filters: dict[str, Callable[..., str]] = {
        "comment": quote.comment,
        "word": quote.dockerfile_word,
        "envquote": quote.dockerfile_env,
        "envpath": envpath,
        "shellpath": shellpath,
        "words": _words,
        "commas": _commas,
        "globs": _globs,
        "heredoc": _heredoc,
        "pattern": quote.sed_pattern,
    }
    return {name: quoting(function) for name, function in filters.items()}


def rendered(template: str, **values: object) -> str:
    """Return the text of a template of dockerfiles/.

    Raises:
        LockError: a value cannot be written into this format: a lock or a stack that no envbuild made.

    """
    try:
        if template == _COMPILED and getattr(values["plan"], "stack", None) is None:
            text = _by_compiled(values)
            if text is not None:
                return text
        return _templates().get_template(template).render(**values)
    except ValueError as error:
        raise LockError(
            f"a value of the lock or stack cannot be written into the build: {error}",
            where=template,
            hint="do not build it; ask where the lock or the stack comes from",
        ) from error


def _by_compiled(values: dict[str, object]) -> str | None:
    """Return the text of Dockerfile.j2 by its compiled form; None where that is of another template."""
    from envbuild.plan import compiled_dockerfile as compiled
    from envbuild.plan.template_runtime import Context, Environment

    source = (data_dir("dockerfiles") / _COMPILED).read_bytes()
    if hashlib.sha256(source).hexdigest() != compiled.OF:
        return None
    environment = Environment(_filters(), _finalize)
    return "".join(compiled.root(Context(values), environment=environment))  # type: ignore[no-untyped-call]


def compiled_source() -> str:
    """Return Dockerfile.j2 as a Python module, for `envbuild/plan/compiled_dockerfile.py`."""
    source = (data_dir("dockerfiles") / _COMPILED).read_bytes()
    from envbuild.plan import template_runtime

    code = str(_templates().compile(source.decode(), name=_COMPILED, raw=True))
    runtime, _, body = code.partition("\n")
    names = set(re.findall(r"\w+", runtime)) & set(template_runtime.__all__)
    return _HEAD.format(sha256=hashlib.sha256(source).hexdigest(), names=", ".join(sorted(names))) + body.replace(
        "environment=environment):", "*, environment):", 1
    )


def dockerfile(plan: Plan) -> str:
    """Return the Dockerfile: one self-contained text, the same for the same lock everywhere."""
    return rendered("Dockerfile.j2", plan=plan)


def recipe_digest(plan: Plan) -> str:
    """Return the digest (`sha256:…`) of the Dockerfile: one recipe for the image of a lock.

    Another release of envbuild may write another Dockerfile for the same lock, and then the image has another digest. What
    else may change an image is not in it: how the Debian root is made, and the builder's own release.
    """
    return f"sha256:{hashlib.sha256(dockerfile(plan).encode()).hexdigest()}"


def bake(plan: Plan) -> str:
    """Return the bake file: a target for the image and one for each compiled wheel."""
    common: dict[str, object] = {
        "context": ".",
        "dockerfile": "Dockerfile",
        "args": {"SOURCE_DATE_EPOCH": str(plan.lock.epoch)},
    }
    if plan.platform:
        common["platforms"] = [plan.platform]
    targets: dict[str, object] = {
        "image": {
            **common,
            "target": "image",
            "tags": [quote.bake(plan.tag)],
            "attest": ["type=provenance,disabled=true"],
        }
    }
    for component in plan.components:
        targets[f"wheel-{component.axis}"] = {
            **common,
            "target": f"wheel-{component.axis}",
            "attest": ["type=provenance,disabled=true"],
        }
    return json.dumps({"group": {"default": {"targets": ["image"]}}, "target": targets}, indent=1) + "\n"
