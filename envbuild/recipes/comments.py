"""Comments that list versions and say nothing else: `# CUDA 12.4 or newer, Python 3.10`."""

import re

from envbuild.recipes.model import COMMENT, Recipe

_ITEM = re.compile(
    r"(?P<what>CUDA(?: Toolkit)?|nvcc|(?:NVIDIA )?driver|Python|PyTorch|torch|Transformer Engine|TE|DeepSpeed|gcc|cuDNN)"
    r"(?:\s*(?P<op>>=)\s*|[ =:]+)v?(?P<version>\d+(?:\.\d+)*)(?P<open>\.x)?(?P<least> or (?:newer|later|higher|above)|\+)?",
    re.IGNORECASE,
)
_WORDED = {
    "cuda": "cuda",
    "cuda toolkit": "nvcc",
    "nvcc": "nvcc",
    "driver": "driver",
    "nvidia driver": "driver",
    "python": "python",
    "pytorch": "torch",
    "torch": "torch",
    "transformer engine": "te",
    "te": "te",
    "deepspeed": "deepspeed",
    "gcc": "gcc",
    "cudnn": "cudnn",
}
_BEFORE = re.compile(
    r"^(?:needs|requires|requirements|assumes|tested (?:on|with)|prerequisites|host)\b:?\s*", re.IGNORECASE
)
_LONGEST = 500


def read(recipe: Recipe, text: str, line: int) -> None:
    """Read the comment `text`, which begins with its sign."""
    if len(text) > _LONGEST:
        return
    stated = _BEFORE.sub("", text.lstrip("#").lstrip().rstrip(". \t\n"))
    items = [item.strip().removeprefix("with ") for item in re.split(r"[,;]|\band\b", stated) if item.strip()]
    found = [_ITEM.fullmatch(item) for item in items]
    for match in found if items and all(found) else ():
        if match:
            axis = _WORDED[match["what"].lower()]
            version = match["version"]
            if axis in {"cuda", "python"}:  # the matrix has them by major.minor
                version = ".".join(version.split(".")[:2])
            recipe.state(axis, f">={version}" if match["least"] or match["op"] else version, line, of=COMMENT)


def finish(recipe: Recipe) -> None:
    """Drop what comments state in two ways, once all is read: they head parts, each of which is for one of the two."""
    for axis in sorted(set(_WORDED.values())):
        found = [s for s in recipe.statements if s.of == COMMENT and s.axis == axis]
        if len({s.spec for s in found}) > 1:
            for each in found:
                recipe.drop(each)
