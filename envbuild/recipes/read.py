"""Reading a recipe: of which kind it is, and what it states line by line."""

import re
from pathlib import Path

from envbuild.errors import DataError
from envbuild.matrix.load import Matrix
from envbuild.recipes import axes, comments, conda, dockerfile, git, pyproject, requirements, shell
from envbuild.recipes.files import read_text
from envbuild.recipes.model import Kind, Recipe
from envbuild.recipes.reader import Reader

KINDS: dict[Kind, str] = {
    "dockerfile": "a Dockerfile",
    "requirements": "a requirements file",
    "shell": "a shell script",
    "toml": "a TOML of axes",
    "conda": "an environment of conda",
    "pyproject": "a pyproject.toml",
}
_SCRIPTS = {".sh", ".bash", ".sbatch", ".slurm", ".pbs", ".lsf"}
_SHEBANG = re.compile(r"#!\s*\S*[/ ](?:ba|da|z|k)?sh\b")
# ARG alone may stand before it
_FROM = re.compile(
    r"\A(?:[ \t]*(?:(?:\#|ARG[ \t]).*)?\n)*[ \t]*FROM[ \t]+(?:--\S+[ \t]+)*\S+(?:[ \t]+AS[ \t]+\S+)?[ \t]*$",
    re.MULTILINE | re.IGNORECASE,
)
_COMMAND = re.compile(
    r"^[ \t]*(?:sudo[ \t]+)?(?:pip3?|python3?|uv|conda|mamba|micromamba|git|apt-get|apt|dnf|yum|module|ml|export|source|cat|cd|"
    r"docker|bash|sh|make|set|wget|curl|mkdir|srun|mpirun|torchrun)[ \t]",
    re.MULTILINE,
)


def kind_of(path: Path, text: str) -> Kind | None:
    """Return the kind of a recipe, by its name and its first lines, or None where it is none that is known."""
    name, suffix = path.name.lower(), path.suffix.lower()
    if name == "pyproject.toml":
        return "pyproject"
    if suffix == ".toml":
        return "toml"
    if suffix in _SCRIPTS or _SHEBANG.match(text):
        return "shell"
    if name.startswith(("dockerfile", "containerfile")) or suffix in {".dockerfile", ".containerfile"}:
        return "dockerfile"
    if suffix in {".yml", ".yaml"}:
        return "conda" if conda.is_environment(text, str(path)) else None
    if suffix == ".in" or (suffix == ".txt" and ("requirements" in name or requirements.is_one(text))):
        return "requirements"
    if suffix not in {"", ".txt"} or text.startswith("#!"):
        return None
    if _FROM.search(text):
        return "dockerfile"
    if str(path) == "-" and requirements.is_one(text):
        return "requirements"
    return "shell" if _COMMAND.search(text) else None


def is_recipe(path: Path) -> bool:
    """Return whether the name of a file in a folder is that of a recipe. An environment of conda is known by its text."""
    name, suffix = path.name.lower(), path.suffix.lower()
    if name.startswith(("dockerfile", "containerfile")):
        return suffix not in {".md", ".dockerignore", ".j2", ".py"} and not name.endswith(".dockerignore")
    if suffix in {".yml", ".yaml"}:
        return "env" in name and "docker" not in name and _is_conda(path)
    requirements_file = suffix == ".txt" and ("requirements" in name or path.parent.name == "requirements")
    return name == "pyproject.toml" or suffix in {*_SCRIPTS, ".dockerfile", ".containerfile"} or requirements_file


def _is_conda(path: Path) -> bool:
    try:
        return conda.is_environment(read_text(path), str(path))
    except DataError:
        return False


def read_recipe(matrix: Matrix, path: Path, kind: Kind | None = None) -> Recipe:
    """Read the recipe at `path`, or standard input where that is `-`.

    Args:
        matrix: knows the axes.
        path: of the recipe.
        kind: what it is; by default its name and its first lines say so.

    Raises:
        DataError: it cannot be read, is no text, too large, or of a kind that is not known.

    """
    text = read_text(path).replace("\r\n", "\n")
    kind = kind or kind_of(path, text)
    if kind is None:
        raise DataError(
            "the kind of the recipe is not known",
            where=str(path),
            hint="name it: --as " + ", --as ".join(KINDS),
        )
    recipe = Recipe(kind=kind, lines=text.removesuffix("\n").split("\n"))
    try:
        _read(matrix, recipe, path, text)
    except DataError as error:
        raise DataError(error.what, where=error.where or str(path), hint=error.hint) from error
    return recipe


def _read(matrix: Matrix, recipe: Recipe, path: Path, text: str) -> None:
    reader = Reader(matrix, recipe)
    if recipe.kind == "toml":
        axes.read(matrix, recipe, path, text)
    elif recipe.kind == "pyproject":
        pyproject.read(recipe, path, text)
    elif recipe.kind == "conda":
        conda.read_environment(recipe, text, str(path))
    elif recipe.kind == "requirements":
        requirements.read(recipe)
    elif recipe.kind == "dockerfile":
        dockerfile.read(reader, text)
    else:
        shell.read_shell(reader, text)
    comments.finish(recipe)
    git.finish(reader)
