"""Where a source can be read: the address behind `owner/repo@ref:path`, `PyPI:name==version` and the other forms."""

import re
from urllib.parse import quote

_GITHUB = re.compile(r"^(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<ref>[^\s:]+)(?::(?P<path>\S+))?|#(?P<thread>\d+))$")
_PYPI = re.compile(r"^PyPI:(?P<name>[^=\s]+)(?:==(?P<version>[^:\s]+))?(?::\S+)?$")


def source_url(source: str) -> str | None:
    """Return the address at which `source` (as `model.Source` allows it) can be read; None for what has none.

    A run and a trial have no address. Evidence is linked within the page that shows it, as `#evidence-ID`.
    """
    if source.startswith(("https://", "http://")):
        return source
    kind, _, rest = source.partition(":")
    if kind == "evidence":
        return f"#evidence-{rest}"
    if kind in {"Debian", "Ubuntu"}:
        return f"https://packages.{kind.lower()}.{'org' if kind == 'Debian' else 'com'}/{quote(rest)}"
    if kind == "NGC":
        return f"https://catalog.ngc.nvidia.com/orgs/nvidia/containers/{quote(rest.partition(':')[0])}/tags"
    if kind == "image":
        return _image(rest)
    if match := _PYPI.match(source):
        version = match["version"]
        return f"https://pypi.org/project/{match['name']}/" + (f"{quote(version)}/" if version else "")
    match = _GITHUB.match(source)
    if match is None:
        return None
    if match["thread"]:
        return f"https://github.com/{match['repo']}/issues/{match['thread']}"  # leads on to a pull request, too
    where = f"https://github.com/{match['repo']}"
    return (
        f"{where}/blob/{quote(match['ref'])}/{quote(match['path'])}"
        if match["path"]
        else f"{where}/tree/{quote(match['ref'])}"
    )


def _image(reference: str) -> str | None:
    name, _, tag = reference.removeprefix("docker.io/").partition(":")
    if name.startswith("nvcr.io/"):
        return (
            f"https://catalog.ngc.nvidia.com/orgs/{name.removeprefix('nvcr.io/').replace('/', '/containers/', 1)}/tags"
        )
    if name.count("/") != 1:
        return None
    place = f"_/{name.removeprefix('library/')}" if name.startswith("library/") else f"r/{name}"
    return f"https://hub.docker.com/{place}" + (f"/tags?name={quote(tag)}" if tag else "")
