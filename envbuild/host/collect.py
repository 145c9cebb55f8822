"""All facts of one machine, each from the probe that finds it."""

import re

from envbuild.host.containers import apptainer_cdi, engine_of, podman_of, toolkit_of
from envbuild.host.hardware import disk_of, driver_version, gpus_of, is_network, memory_of, mounts_of, nics_of
from envbuild.host.model import HostFacts, NetworkMount
from envbuild.host.parse import line_of, match_of, number_of, output_of
from envbuild.host.probe import LocalProbe, Probe
from envbuild.settings import Settings, load_settings


def facts(settings: Settings | None = None, *, probe: Probe | None = None, every: bool = False) -> HostFacts:
    """Describe this machine. Raises nothing itself, whatever is missing.

    Args:
        settings: for the cache folder and the engine's address; this user's own by default.
        probe: what to ask; the machine itself by default.
        every: whether to ask also what no run needs, which takes half a second: the builder, and podman where the
            settings name Docker.

    """
    probe = probe or LocalProbe()
    settings = settings or load_settings()
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', probe.read("/etc/os-release") or "", re.MULTILINE))
    engine = engine_of(probe, settings, builder=every)
    # SingularityCE has other numbers, and other flags
    apptainer = match_of(r"version (\S+)", output_of(probe, "apptainer", "--version"))
    driver = driver_version(probe)
    gpus, gpu_problem = gpus_of(probe)
    mounts = mounts_of(probe)
    return HostFacts(
        os=release.get("PRETTY_NAME"),
        os_id=release.get("ID"),
        kernel=line_of(probe.read("/proc/sys/kernel/osrelease")),
        arch=output_of(probe, "uname", "-m"),
        glibc=match_of(r"glibc (\S+)", output_of(probe, "getconf", "GNU_LIBC_VERSION")),
        cores=number_of(output_of(probe, "nproc")),
        memory_gib=memory_of(probe),
        driver=driver,
        driver_problem=gpu_problem if driver else None,
        gpus=gpus,
        engine=engine,
        toolkit=toolkit_of(probe, engine),
        apptainer=apptainer,
        apptainer_cdi=apptainer_cdi(probe) if apptainer else None,
        podman=podman_of(probe) if every or settings.engine == "podman" else None,
        user_namespaces=_user_namespaces(probe),
        cache=disk_of(probe, str(settings.cache_dir)),
        engine_disk=disk_of(probe, engine.root) if engine.root and settings.engine_is_here else None,
        network_mounts=tuple(NetworkMount(path=path, filesystem=kind) for path, kind in mounts if is_network(kind)),
        infiniband=tuple(nics_of(probe)),
        # rdma_cm is there without any adapter; verbs need a uverbs device.
        infiniband_devices=any(name.startswith("uverbs") for name in probe.entries("/dev/infiniband")),
    )


def _user_namespaces(probe: Probe) -> bool | None:
    most = number_of(line_of(probe.read("/proc/sys/user/max_user_namespaces")))
    if most is None:
        return None
    # Debian's switch, and Ubuntu's; neither is there on other systems
    off = line_of(probe.read("/proc/sys/kernel/unprivileged_userns_clone")) == "0"
    kept = line_of(probe.read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")) == "1"
    return most > 0 and not off and not kept
