"""What apt prints: stanzas of packages, the URLs of an installation, and complaints."""

import re
from collections.abc import Iterable
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from envbuild.errors import LockError
from envbuild.lock.model import OsPackage
from envbuild.settings import redact
from envbuild.util.names import shown

UNREACHABLE = re.compile(
    r"Could not resolve|Could not connect|Unable to connect|Temporary failure|timed out|Connection"
    # apt's line for an answer: `E: Failed to fetch URL  503  Service Unavailable`
    r"|Failed to fetch \S+\s+(?:5\d\d|401|407|408|429)\s",
    re.IGNORECASE,
)
"""How apt says that an archive does not answer, cannot serve now, or asks for a login that it was not given."""

# What apt and mmdebstrap add to the reason, and what follows from it.
_NOISE = re.compile(
    r"Some index files failed|is not signed|setup failed|command failed|mmdebstrap failed|Unmet dependencies|Unable to correct"
)


def split_stanzas(text: str) -> list[dict[str, str]]:
    """Return the fields of each stanza; a field that goes on over several lines keeps its first."""
    return [
        dict(line.split(": ", 1) for line in stanza.splitlines() if line[:1] not in {" ", ""} and ": " in line)
        for stanza in text.split("\n\n")
        if stanza.strip()
    ]


def _by_name(package: OsPackage) -> tuple[str, str, str]:
    return package.name, package.arch, package.version


def _os_package(**fields: str | None) -> OsPackage:
    """Return a package as the archive describes it.

    Raises:
        LockError: a field is missing, or is not what it should be.

    """
    try:
        return OsPackage.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise LockError(
            f"the archive describes {shown(str(fields.get('name')), 80)} in an unknown way: "
            f"{first['loc'][0] if first['loc'] else 'package'}: {first['msg']}"
        ) from None


def parse_stanzas(text: str) -> tuple[OsPackage, ...]:
    # A package that two suites hold is shown twice.
    found = {
        _os_package(
            name=stanza.get("Package"),
            version=stanza.get("Version"),
            arch=stanza.get("Architecture"),
            sha256=stanza.get("SHA256"),
            filename=stanza.get("Filename"),
        )
        for stanza in split_stanzas(text)
    }
    return tuple(sorted(found, key=_by_name))


def parse_uris(printed: str) -> tuple[OsPackage, ...]:
    """Return the packages that `apt-get --print-uris` names, by name.

    Raises:
        LockError: one has no SHA-256, or is described in no known way.

    """
    found = []
    for line in printed.splitlines():
        # 'http://host/debian/pool/main/z/zlib/zlib1g_1%3a1.2.13_amd64.deb' zlib1g_1%3a1.2.13_amd64.deb 86692 SHA256:…
        match = re.fullmatch(r"'([^']+)' ([^_\s]+)_([^_\s]+)_([^_\s]+)\.deb \d+ SHA256:([0-9a-f]{64})", line)
        if match:
            url, name, version, arch, sha256 = match.groups()
            found.append(
                _os_package(
                    name=name,
                    version=unquote(version),
                    arch=arch,
                    sha256=sha256,
                    filename="pool/" + unquote(url).partition("/pool/")[2],
                )
            )
        elif line.startswith("'"):
            raise LockError("the archive gives no SHA-256 for a package", where=shown(redact(line)))
    return tuple(sorted(found, key=_by_name))


def complaint_of(output: str) -> str:
    """Return apt's own words on what is wrong, in one line; of several, the first that gives the reason."""
    lines = [line.strip() for line in output.splitlines()]
    errors = [line[3:] for line in lines if line.startswith("E: ")]
    reasons = [line for line in errors if not _NOISE.search(line)]
    reasons = (
        reasons
        or [line for line in lines if re.search(r" : (Pre-)?[DCB]\w+: ", line)]
        or errors
        or lines
        or ["it printed nothing"]
    )
    return shown(redact(" ".join(reasons[0].split())), 500)


def hosts_named(mirrors: Iterable[str], output: str) -> str:
    """Return the mirrors' hosts that `output` complains about; all of them when it names none."""
    hosts = sorted({urlsplit(url).hostname or url for url in mirrors})
    failed = "\n".join(line for line in output.splitlines() if line.startswith(("E:", "W:", "Err:")))
    return ", ".join([host for host in hosts if host in failed] or hosts)
