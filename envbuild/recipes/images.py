"""What is in the image of a FROM."""

import re

from envbuild.recipes.model import IMAGE
from envbuild.recipes.reader import Reader


def state(reader: Reader, image: str, line: int) -> None:
    """State what `image` (without a digest) holds."""
    recipe, stage = reader.recipe, reader.stage
    name, _, tag = image.rpartition(":") if ":" in image.rsplit("/", 1)[-1] else (image, "", "")
    name = name.removeprefix("docker.io/").removeprefix("library/")
    if len(image) > 500 or "$" in name:
        return
    if name in {"nvidia/cuda", "nvcr.io/nvidia/cuda"}:
        flavor = re.search(r"-(base|runtime|devel)(?:-|$)", tag)
        stage.toolkit = flavor[1] == "devel" if flavor else None
        if os := re.search(r"ubuntu(\d+\.\d+)", tag):
            recipe.state("os", f"ubuntu{os[1]}", line, plain=not stage.toolkit)
        version = re.match(r"(\d+\.\d+)(?:\.\d+)?(?=-|$)", tag)
        stage.compat = version[1] if version else ""
        if version and stage.toolkit:
            recipe.state("nvcc", version[0], line, toolkit=True)
    elif name == "nvcr.io/nvidia/pytorch" and "$" not in tag:
        stage.toolkit = True
        recipe.state("base", "ngc-" + tag.removesuffix("-py3"), line)
    elif name in {"pytorch/pytorch", "docker.io/pytorch/pytorch"}:
        built = re.fullmatch(r"(\d+\.\d+\.\d+)-cuda(\d+\.\d+)-cudnn\d+-(runtime|devel)", tag)
        if built:
            stage.toolkit = built[3] == "devel"
            recipe.state("torch", built[1], line, installed=True, of=IMAGE)
            recipe.state("cuda", built[2], line, installed=True, of=IMAGE)
            if stage.toolkit:
                recipe.state("nvcc", built[2], line, toolkit=True)
    elif name == "python" and (version := re.match(r"\d+\.\d+", tag)):
        recipe.state("python", version[0], line, toolkit=True)
    elif name in {"ubuntu", "debian"} and tag:
        suite = tag.removesuffix("-slim")
        release = suite.split(".")[0] if name == "debian" else suite
        recipe.state("os", suite if suite.isalpha() else f"{name}{release}", line, plain=True)
