"""Count how often `envbuild check` is right, from verdicts on real recipes, and run it again on a folder of them.

Usage: judge_recipes.py [FOLDER], where FOLDER holds OWNER+NAME@COMMIT/PATH for the recipes of tests/data/recipe_verdicts.json.

A verdict is on a contradiction between versions. `right` and `wrong` are findings of `envbuild check`; `missed` is a
contradiction that it does not find. `corrected` is a finding that was wrong when it was judged, and is no longer made: it
counts as wrong. `held_out` marks repositories that the check was not improved on before they were judged; of several
versions of a file with the same finding, one is listed. `by_text` marks those found by reading lines that name versions, without the check:
of these it counts how many it finds.
"""

import json
import sys
from pathlib import Path

VERDICTS = Path(__file__).parent.parent / "tests" / "data" / "recipe_verdicts.json"


def count(verdicts: list[dict]) -> dict[str, int]:
    """Return how many findings there are, how many are right, and the same of the contradictions known by text."""
    findings = [each for each in verdicts if each["verdict"] != "missed"]
    known = [each for each in verdicts if each["by_text"] and each["verdict"] in {"right", "missed"}]
    return {
        "findings": len(findings),
        "right": sum(each["verdict"] == "right" for each in findings),
        "corrected": sum(each["verdict"] == "corrected" for each in findings),
        "contradictions": len(known),
        "found": sum(each["verdict"] == "right" for each in known),
    }


def again(folder: Path, verdicts: list[dict]) -> list[str]:
    """Return the differences between the verdicts and what the check finds in `folder` today."""
    from envbuild.matrix.load import load_matrix
    from envbuild.recipes.catalog import findings_catalog
    from envbuild.recipes.check import check_recipe
    from envbuild.recipes.read import read_recipe

    between_versions = {"recipe-stated-twice", "recipe-path-other-cuda", "recipe-driver-below-cuda"}
    others = set(findings_catalog()) - between_versions
    matrix, differences = load_matrix(), []
    places = {(each["repository"], each["commit"], each["path"]) for each in verdicts}
    for repository, commit, name in sorted(places):
        path = folder / f"{repository.replace('/', '+')}@{commit}" / name
        if not path.exists():
            differences.append(f"not there: {path}")
            continue
        report = check_recipe(matrix, read_recipe(matrix, path))
        found = {(f.line, f.rule) for f in report.findings if f.rule not in others}
        own = [
            each
            for each in verdicts
            if (each["repository"], each["commit"], each["path"]) == (repository, commit, name)
        ]
        listed = {(each["line"], each["rule"]) for each in own if each["verdict"] not in {"missed", "corrected"}}
        differences += [f"no longer found: {path}:{line} {rule}" for line, rule in sorted(listed - found)]
        differences += [f"not judged: {path}:{line} {rule}" for line, rule in sorted(found - listed)]
    return differences


def main() -> int:
    """Print the counts, and what differs in the folder that is given."""
    data = json.loads(VERDICTS.read_text())
    for held_out, size in ((False, data), (True, data["held_out"])):
        counts = count([each for each in data["verdicts"] if each["held_out"] is held_out])
        set_of = "held out" if held_out else "improved on"
        print(f"{set_of}: {size['recipes']} recipes of {size['repositories']} repositories")
        print(f"  right: {counts['right']} of {counts['findings']} findings; {counts['corrected']} are no longer made")
        print(
            f"  found: {counts['found']} of {counts['contradictions']} contradictions that are known without the check"
        )
    differences = again(Path(sys.argv[1]), data["verdicts"]) if sys.argv[1:] else []
    print(*differences, sep="\n", end="\n" if differences else "")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
