"""What the name of a wheel states: `flash_attn-2.7.3+cu12torch2.6cxx11abiTRUE-cp310-cp310-linux_x86_64.whl` four versions."""

import re

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from envbuild.components import AXIS_OF_DISTRIBUTION
from envbuild.recipes.model import Recipe

_LONGEST = 400
_CUDA = re.compile(r"cu(?:da)?(\d{2})(\d)?(?!\d)")
_TORCH = re.compile(r"(?:torch|pt)v?(\d+\.\d+(?:\.\d+)?)")


def state(recipe: Recipe, place: str, line: int, *, marker: str = "") -> None:
    """State what the wheel at the URL or path `place` was built of.

    A wheel of an extension runs with every CUDA of the major that its label names; torch's own label is its very CUDA.
    """
    name = place.rstrip("/").rpartition("/")[2].replace("%2B", "+").replace("%2b", "+")
    if len(name) > _LONGEST or "$" in name:
        recipe.effort.skip(line, name)
        return
    try:
        project, version, _, tags = parse_wheel_filename(name)
    except InvalidWheelFilename:
        recipe.effort.skip(line, name)
        return
    axis = AXIS_OF_DISTRIBUTION.get(project)
    label = version.local or ""
    if axis is None and not _TORCH.search(label):
        return
    if axis:
        recipe.state(axis, str(version) if axis == "torch" else version.public, line, marker=marker, installed=True)
    pythons = {tag.interpreter for tag in tags if re.fullmatch(r"cp3\d+", tag.interpreter) and tag.abi != "abi3"}
    if len(pythons) == 1:
        recipe.state("python", f"3.{pythons.pop()[3:]}", line, marker=marker, installed=True, of=project)
    if axis == "torch":
        return
    if torch := _TORCH.search(label):
        recipe.state("torch", ".".join(torch[1].split(".")[:2]), line, marker=marker, installed=True, of=project)
    if cuda := _CUDA.search(label):
        major = int(cuda[1])
        spec = f"{major}.{cuda[2]}" if cuda[2] and major < 12 else f">={major},<{major + 1}"
        recipe.state("cuda", spec, line, marker=marker, installed=True, of=project)
