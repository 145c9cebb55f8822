"""An SBOM in CycloneDX 1.6, made by CycloneDX's own library: the inputs of a lock, and which files of an image each of them has.

A component is a locked input. Its files are `evidence.occurrences`, where the standard puts the places at which a component
was found. Inputs that take part in the build alone have the scope `excluded`. Files that belong to no input are components
of type `file` with the property `io.envbuild.input` = `none`.

The same lock and image give the same bytes: the date is the lock's, the serial number follows from the digests.
"""

import datetime as dt
import json
import re
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from envbuild import __version__
from envbuild.components import AXIS_OF_DISTRIBUTION, CHOICES
from envbuild.lock.model import Lock
from envbuild.supply.inventory import Input
from envbuild.supply.owners import Owned

if TYPE_CHECKING:
    from cyclonedx.model.component import Component
    from packageurl import PackageURL

MEDIA_TYPE = "application/vnd.cyclonedx+json"
IMAGE, LOCK, KIND, TREE = "io.envbuild.image", "io.envbuild.lock", "io.envbuild.input", "io.envbuild.git-tree"
"""Names of properties; those of the image and the lock are on the SBOM's own subject."""

_DISTRIBUTIONS = {"transformer-engine": "transformer-engine-torch"}
"""The compiled one of two distributions of an axis."""


def sbom(lock: Lock, inputs: tuple[Input, ...], *, image: str | None = None, owned: Owned | None = None) -> bytes:
    """Return the SBOM of a lock, or of an image of it.

    Args:
        lock: what the image is made of.
        inputs: of the lock.
        image: the digest of the image's manifest.
        owned: whose its files are.

    """
    from cyclonedx.model import Property
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.model.tool import ToolRepository
    from cyclonedx.output.json import JsonV1Dot6

    cell = lock.as_cell
    properties = [Property(name=LOCK, value=lock.digest)]
    if image is not None:
        properties.append(Property(name=IMAGE, value=image))
    subject = Component(
        type=ComponentType.CONTAINER,
        name=cell.id,
        version=image or lock.digest,
        bom_ref="image",
        properties=properties,
    )
    components = {each.ref: _component(each, lock) for each in inputs}
    bom = Bom(
        components=components.values(),
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"{lock.digest} {image or ''} {__version__}"),
        metadata=BomMetaData(
            component=subject,
            timestamp=dt.datetime.fromtimestamp(lock.epoch, dt.UTC),
            tools=ToolRepository(
                components=[
                    Component(type=ComponentType.APPLICATION, name="envbuild", version=__version__, bom_ref="tool")
                ]
            ),
        ),
    )
    bom.register_dependency(subject, [components[each.ref] for each in inputs if each.in_image])
    for each in inputs:
        bom.register_dependency(components[each.ref], [components[ref] for ref in each.made_from if ref in components])
    value = json.loads(JsonV1Dot6(bom).output_as_string())
    _add_files(value, owned)
    return (json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")) + "\n").encode()


def _add_files(value: dict[str, Any], owned: Owned | None) -> None:
    """Add the files of each component, and those of none. The library would take minutes over those of a large image."""
    for path in dict.fromkeys(owned.unowned if owned else ()):
        ref = f"none:{path}"
        value["components"].append(
            {
                "type": "file",
                "name": path,
                "bom-ref": ref,
                "scope": "required",
                "properties": [{"name": KIND, "value": "none"}],
            }
        )
        value["dependencies"].append({"ref": ref})
    for component in value["components"]:
        files = owned.files.get(component["bom-ref"], ()) if owned else ()
        if files:
            component["evidence"] = {"occurrences": [{"location": path} for path in files]}
    value["components"].sort(key=lambda each: str(each["bom-ref"]))
    value["dependencies"].sort(key=lambda each: str(each["ref"]))
    for dependency in value["dependencies"]:
        dependency.get("dependsOn", []).sort()


def _component(each: Input, lock: Lock) -> "Component":
    from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
    from cyclonedx.model.component import Component, ComponentScope, ComponentType

    kinds = {
        "base-image": ComponentType.CONTAINER,
        "file": ComponentType.FILE,
        "envbuild": ComponentType.APPLICATION,
    }
    properties = [Property(name=KIND, value=each.kind)]
    if each.tree:
        properties.append(Property(name=TREE, value=each.tree))
    if each.kind == "compiled-wheel":
        of_it = [axis for axis, component in CHOICES.items() if component == each.name and axis in lock.cell]
        properties += [Property(name=f"io.envbuild.{axis}", value=lock.cell[axis]) for axis in of_it]
    one = each.sha256 if len(each.sha256) == 1 else ()
    properties += [Property(name="io.envbuild.sha256.any", value=sha256) for sha256 in each.sha256 if not one]
    references = []
    if "://" in each.uri and "[" not in each.uri:  # the library writes a host in brackets as what is no address
        kind = ExternalReferenceType.VCS if each.kind == "source" else ExternalReferenceType.DISTRIBUTION
        references.append(ExternalReference(type=kind, url=XsUri(each.uri)))
    return Component(
        type=kinds.get(each.kind, ComponentType.LIBRARY),
        name=each.name,
        version=each.version,
        bom_ref=each.ref,
        purl=_purl(each, lock),
        scope=ComponentScope.REQUIRED if each.in_image else ComponentScope.EXCLUDED,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256) for sha256 in one],
        external_references=references,
        properties=properties,
    )


def _purl(each: Input, lock: Lock) -> "PackageURL | None":
    """Return the package URL by which scanners of vulnerabilities know an input."""
    from packageurl import PackageURL

    if each.kind == "os-package":
        match = re.fullmatch(r"([a-z]+)([\d.]+)", lock.cell["os"])
        system, release = match.groups() if match else (lock.cell["os"], "")
        distro = f"{system}-{release}".rstrip("-")
        return PackageURL("deb", system, each.name, each.version, {"arch": each.arch, "distro": distro})
    if each.kind == "wheel":
        return PackageURL("pypi", None, each.name, each.version)
    if each.kind == "compiled-wheel":
        names = [name for name, axis in AXIS_OF_DISTRIBUTION.items() if axis == each.name]
        name = _DISTRIBUTIONS.get(names[0], names[0]) if names else each.name
        return PackageURL("pypi" if names else "generic", None, name, each.version)
    if each.kind == "source":
        owner, name = _of_github(each.uri)
        if owner and name:
            return PackageURL("github", owner, name, each.commit)
        return PackageURL("generic", None, each.name, each.commit, {"vcs_url": f"git+{each.uri}@{each.commit}"})
    if each.kind == "base-image":
        return PackageURL("oci", None, each.name.rpartition("/")[2].partition(":")[0], each.version)
    if each.kind == "file":
        return PackageURL("generic", None, each.name, each.version, {"download_url": each.uri})
    return None


def _of_github(url: str) -> tuple[str, str]:
    """Return the owner and the name of a repository on GitHub; of any other address, empty ones."""
    try:
        address = urlsplit(url)
    except ValueError:  # a lock may name [::::]
        return "", ""
    if address.hostname != "github.com":
        return "", ""
    owner, _, name = address.path.strip("/").removesuffix(".git").partition("/")
    return owner, name.strip("/")
