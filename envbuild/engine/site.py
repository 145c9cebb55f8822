"""What a site gives its builds as secrets: indexes, proxies, CA bundle, OS mirror. Nothing of it reaches an image."""

import os
from pathlib import Path

from envbuild.lock.archives import archive_of, mirrors_of
from envbuild.lock.python import PYTORCH, uv_environment
from envbuild.matrix.cell import DEBIAN_ARCH
from envbuild.plan.plan import Plan
from envbuild.settings import Settings
from envbuild.util import quote

_CA = "/run/envbuild/site/ca.crt"


def secrets(settings: Settings, plan: Plan, folder: Path, *, offline: bool = False) -> dict[str, Path]:
    """Write the secrets that `plan`'s build may mount to `folder`; return them by id.

    With `offline`, no index is asked: the build gets every wheel of the lock as files. `env` is a shell fragment, `ca` the CA bundle, `apt` a sources.list, `jobs-<component>` a number. They are no part of
    any stage's cache key, so the same plan builds the same image at every site.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found: dict[str, Path] = {}
    environment = uv_environment(settings)
    if settings.ca_bundle:
        found["ca"] = settings.ca_bundle
        environment["SSL_CERT_FILE"] = _CA
    pages = [link for link in settings.find_links if link.startswith("http")]  # folders go in as a context
    if offline:
        environment["UV_OFFLINE"] = "1"
    elif pages:
        environment["ENVBUILD_PAGES"] = " ".join(pages)
    if not settings.torch_index.startswith(PYTORCH):
        environment["ENVBUILD_TORCH_INDEX"] = settings.torch_index
    lines = [f"export {name}={quote.shell(value)}" for name, value in sorted(environment.items())]
    lines += [
        f"export {name.lower()}={quote.shell(v)}" for name, v in sorted(environment.items()) if name.endswith("_PROXY")
    ]
    found["env"] = _private(folder / "env", "\n".join(lines) + "\n")
    suite = _suite(plan)
    if suite is not None:
        archive = archive_of(suite)
        mirror, security = mirrors_of(settings, suite, DEBIAN_ARCH[plan.cell.arch])
        # An image that others made may name its own archives, whose keys have been changed since or that cannot be reached.
        if plan.lock.root is None or (mirror, security) != (archive.mirror, archive.security_mirror):
            sources = archive.sources(suite, mirror=mirror, security_mirror=security)
            found["apt"] = _private(folder / "apt.list", "\n".join(sources) + "\n")
    return found


def _suite(plan: Plan) -> str | None:
    if plan.lock.root:
        return plan.lock.root.suite
    return {"ubuntu24.04": "noble", "ubuntu22.04": "jammy", "ubuntu20.04": "focal"}.get(plan.cell.versions["os"])


def _private(path: Path, text: str) -> Path:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    return path


def jobs(settings: Settings, *, job_gib: float, cores: int, memory_gib: float) -> int:
    """Return how many compile jobs run at once: bounded by cores, and by what one job of the component needs.

    Args:
        settings: `jobs` overrides; `memory_gib` lowers the memory that may be used.
        job_gib: peak memory of one job, GiB.
        cores: cores of the machine that builds.
        memory_gib: its memory, GiB.

    """
    if settings.jobs:
        return settings.jobs
    # A tenth stays with the engine and the system.
    budget = min(settings.memory_gib or memory_gib, memory_gib) * 0.9
    return max(1, min(cores, int(budget / job_gib)))
