"""The JSON documents of an image, of which each reader must see the same.

Docker, containerd and Apptainer are written in Go, whose `encoding/json` matches the name of a field without regard to
case and takes the last one that matches. So a manifest with `layers` and `Layers` is one image here and another one there.
"""

from typing import Any

from envbuild.util.foreign_json import parse_json
from envbuild.util.names import shown

_FIELDS = frozenset(
    # image-spec 1.1: index, manifest, descriptor, platform, configuration; Docker's own fields of a configuration
    [
        "annotations",
        "architecture",
        "artifactType",
        "author",
        "comment",
        "config",
        "container",
        "container_config",
        "created",
        "created_by",
        "data",
        "diff_ids",
        "digest",
        "docker_version",
        "empty_layer",
        "history",
        "id",
        "layers",
        "manifests",
        "mediaType",
        "moby.buildkit.cache.v0",
        "moby.buildkit.buildinfo.v1",
        "os",
        "os.features",
        "os.version",
        "parent",
        "platform",
        "rootfs",
        "schemaVersion",
        "size",
        "subject",
        "throwaway",
        "type",
        "urls",
        "variant",
        "ArgsEscaped",
        "AttachStderr",
        "AttachStdin",
        "AttachStdout",
        "Cmd",
        "Domainname",
        "Entrypoint",
        "Env",
        "ExposedPorts",
        "Healthcheck",
        "Hostname",
        "Image",
        "Interval",
        "Labels",
        "MacAddress",
        "Memory",
        "MemorySwap",
        "NetworkDisabled",
        "OnBuild",
        "OpenStdin",
        "Retries",
        "Shell",
        "StartInterval",
        "StartPeriod",
        "StdinOnce",
        "StopSignal",
        "StopTimeout",
        "Test",
        "Timeout",
        "Tty",
        "User",
        "Volumes",
        "WorkingDir",
        "CpuShares",
    ]
)
_FOLDED = frozenset(field.casefold() for field in _FIELDS)
_NAMED_BY_OTHERS = frozenset({"annotations", "Labels", "ExposedPorts", "Volumes"})
"""Objects whose keys are no fields: any name may be there, and Go takes each as it is written."""


def parse_oci(body: bytes | str, *, limit: int) -> Any:
    """Return the value of an index, a manifest or a configuration of at most `limit` bytes.

    Raises:
        ValueError: as `parse_json`, and where a field is written in another case than the specification's, which other
            readers would take for the field.

    """
    value = parse_json(body, limit=limit)
    level = [value]
    while level:  # parse_json bounds the depth
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                for name, held in each.items():
                    if name not in _FIELDS and name.casefold() in _FOLDED:
                        raise ValueError(f"an image's document with the field {shown(name, 40)!r} in another case")
                    if name not in _NAMED_BY_OTHERS:
                        below.append(held)
            elif isinstance(each, list):
                below += each
        level = below
    return value
