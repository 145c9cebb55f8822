"""The settings and their defaults."""

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from envbuild.settings.values import (
    BuilderName,
    ExistingFile,
    ExistingFolder,
    Hosts,
    Identity,
    Link,
    OwnPath,
    ProxyUrl,
    Registry,
    Url,
)
from envbuild.util.text import redact


class Settings(BaseModel):
    """Where this machine takes things from and how much of it a build may use. Made by `load_settings`.

    Printing it, or `redacted`, never shows a credential; the attributes do hold them, for the tools that need them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    index_url: Url = Field("https://pypi.org/simple", description="Python package index (Simple API).")
    extra_index_urls: tuple[Url, ...] = Field(
        (), description="Further package indexes, asked in addition to `index_url`."
    )
    torch_index: Url = Field(
        "https://download.pytorch.org/whl",
        description="Base of PyTorch's per-variant indexes; `/cu126`, `/cpu` and so on are appended.",
    )
    find_links: tuple[Link, ...] = Field((), description="Folders or URLs of pages that hold wheels and sdists.")
    debian_mirror: Url = Field("http://deb.debian.org/debian", description="Debian archive.")
    debian_security_mirror: Url = Field("http://deb.debian.org/debian-security", description="Debian security archive.")
    ubuntu_mirror: Url = Field("http://archive.ubuntu.com/ubuntu", description="Ubuntu archive.")
    cuda_repository: Url = Field(
        "https://developer.download.nvidia.com/compute/cuda/repos",
        description="NVIDIA's repositories of CUDA packages; `/ubuntu2204/x86_64` and `/ubuntu2204/sbsa` are appended.",
    )
    http_proxy: ProxyUrl | None = Field(None, description="Proxy for http:// addresses.")
    https_proxy: ProxyUrl | None = Field(None, description="Proxy for https:// addresses.")
    no_proxy: Hosts | None = Field(None, description="Hosts that are reached without a proxy, separated by commas.")
    ca_bundle: ExistingFile | None = Field(
        None,
        description="PEM file of the certificates to trust, given to builds as a secret and never stored in an image.",
    )
    registry: Registry | None = Field(
        None, description="Prefix that prebuilt images are pulled from and pushed to, such as `ghcr.io/acme/envbuild`."
    )
    trusted_keys: tuple[ExistingFile, ...] = Field(
        (),
        description="PEM files of the public keys that may sign the registry's catalogue; a file's name without its ending "
        "is the signer's name. With no key and no identity, no catalogue is read.",
    )
    trusted_identities: tuple[Identity, ...] = Field(
        (),
        description="Who else may sign, without a key: `NAME,ISSUER,IDENTITY`, where ISSUER is the OIDC issuer and IDENTITY "
        "the name in sigstore's certificate, such as a workflow's address. Needs `envbuild[keyless]`.",
    )
    sigstore_trust: ExistingFile | None = Field(
        None,
        description="sigstore's trusted root (`trusted_root.json`), or a client trust configuration of a site's own "
        "instance; the public instance's, which is fetched, when not set.",
    )
    trusted_signatures: int = Field(
        1, ge=1, le=50, description="How many of `trusted_keys` and `trusted_identities` must have signed."
    )
    trusted_builders: int = Field(
        0,
        ge=0,
        le=50,
        description="How many of `trusted_keys` and `trusted_identities` must have signed that they built an image of the catalogue themselves "
        "and came to its digest (`envbuild reproduce --sign`).",
    )
    trusted_documents: tuple[Literal["sbom", "provenance"], ...] = Field(
        (),
        description="What an image of the catalogue must come with in the registry, signed as `trusted_signatures` asks: "
        "`sbom`, `provenance`.",
    )
    catalog_max_age_days: int = Field(
        90, ge=1, le=3650, description="Days after which a catalogue that nobody signed again is refused."
    )
    signing_keys: tuple[ExistingFile, ...] = Field(
        (),
        description="PEM files of the private keys (PKCS #8) that sign what this machine publishes; the variable "
        "`COSIGN_PASSWORD` holds their password.",
    )
    signing_identity: str | None = Field(
        None,
        min_length=1,
        description="Name of the one of `trusted_identities` that this CI job is: it signs what is published, with the "
        "identity token that CI gives the job.",
    )
    cache_from: Registry | None = Field(
        None,
        description="Repository that a build takes finished steps of other builders from; a tag for each cell. Nobody signs "
        "them: name one that only builders you trust can write to.",
    )
    cache_to: Registry | None = Field(
        None, description="Repository that a build leaves its finished steps in, for `cache_from` elsewhere."
    )
    builder: BuilderName | None = Field(None, description="Name of the buildx builder to build with.")
    compression: Literal["zstd", "gzip"] = Field(
        "zstd",
        description="How the layers of images are compressed: `zstd`, or `gzip` for what cannot read it, such as an older "
        "enroot. The image has another digest then, and the same layers.",
    )
    engine: Literal["docker", "podman"] = Field(
        "docker",
        description="What runs, tests and pulls images: `docker` or `podman`. Images are built with Docker.",
    )
    engine_host: str | None = Field(
        None,
        min_length=1,
        description="Address of the Docker engine, such as `unix:///run/docker.sock` or `ssh://me@host`. Podman does not "
        "read it: it has `CONTAINER_HOST`.",
    )
    gpu_access: Literal["auto", "cdi", "native"] = Field(
        "auto",
        description="How containers get the GPUs: `cdi` by the CDI specification in the folders that the runtime reads, `native` by "
        "Docker's `--gpus` or Apptainer's `--nv`, `auto` by CDI where the runtime can, or else natively.",
    )
    sources: ExistingFolder | None = Field(
        None, description="Folder of source trees or archives by commit, for a site that cannot reach the upstreams."
    )
    git_protocols: tuple[Literal["https", "ssh", "file"], ...] = Field(
        (), description="What source trees may be fetched by besides https: `ssh`, `file`."
    )
    debs: ExistingFolder | None = Field(
        None,
        description="Folder of `.deb` files, for a site without a package mirror; where it has every package that a lock names and a stage or a Debian root needs, no archive is asked.",
    )
    jobs: int | None = Field(
        None,
        ge=1,
        description="Compile jobs at once; chosen from the engine's cores and memory and the package's need when not set.",
    )
    memory_gib: float | None = Field(
        None, gt=0, description="Memory in GiB that a build may use; all of it when not set."
    )
    cache_dir: OwnPath = Field(
        description="Folder of downloads, source trees and logs. Falls back to a folder under `$TMPDIR` when the home is "
        "missing or read-only."
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notices: tuple[str, ...] = PrivateAttr(default=())

    def origin(self, key: str) -> str:
        """Return where the value of `key` came from: a variable's name, a file's path, or `default`."""
        return self._origins.get(key, "default")

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know: a value that was passed over and why, a cache that had to move."""
        return self._notices

    @property
    def trusts_signers(self) -> bool:
        """Whether a key or an identity is trusted to sign."""
        return bool(self.trusted_keys or self.trusted_identities)

    @property
    def engine_is_here(self) -> bool:
        """Whether the engine runs on this host, so that it sees this host's folders."""
        return (
            self.engine == "podman"
            or self.engine_host is None
            or re.match(r"unix://|\w+://(\w+@)?(localhost|127\.|\[::1\])", self.engine_host) is not None
        )

    @property
    def engine_command(self) -> tuple[str, ...]:
        """The start of every command line of the engine: the client, and Docker's address where one is set."""
        return ("podman",) if self.engine == "podman" else self.docker_command

    @property
    def docker_command(self) -> tuple[str, ...]:
        """The start of every docker command line: the client, and the engine where one is set."""
        return ("docker", "--host", self.engine_host) if self.engine_host else ("docker",)

    def redacted(self) -> dict[str, Any]:
        """Return every setting as JSON values, URLs without their credentials."""

        def clean(value: Any) -> Any:
            if isinstance(value, list):
                return [clean(item) for item in value]
            return redact(value) if isinstance(value, str) else value

        return {key: clean(value) for key, value in self.model_dump(mode="json").items()}

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Yield what `repr` shows: the redacted view."""
        yield from self.redacted().items()


LIST_KEYS = frozenset(
    {
        "extra_index_urls",
        "find_links",
        "git_protocols",
        "signing_keys",
        "trusted_documents",
        "trusted_identities",
        "trusted_keys",
    }
)
"""Settings that hold several values; in the environment they are separated by whitespace."""
