"""Count how often `envbuild check` is right, from verdicts on real recipes, and run it again on a folder of them.

Usage: judge_recipes.py [FOLDER], where FOLDER holds OWNER+NAME@COMMIT/PATH for the recipes of tests/data/recipe_verdicts.json.

A verdict is on a contradiction between versions. `right` and `wrong` are findings of `envbuild check`; `missed` is a
contradiction that it does not find. `corrected` is a finding that was wrong when it was judged, and `withdrawn` one that
was right; neither is made any longer, and they count as wrong and right. `set` is `tuned` for repositories that the check
was improved on, `before` for those that were judged first and led to corrections then, `after` for those that were judged
after these corrections, `last` for those judged after the correction that `after` led to. Of several versions of a file with the same finding, one is listed. `by_text` marks those found by
reading lines that name versions, without the check: of these it counts how many it finds.
"""

import json
import sys
from pathlib import Path

VERDICTS = Path(__file__).parent.parent / "tests" / "data" / "recipe_verdicts.json"

_NOT_MADE = {"corrected", "withdrawn"}


def count(verdicts: list[dict]) -> dict[str, int]:
    """Return how many findings there are, how many are right, and the same of the contradictions known by text."""
    findings = [each for each in verdicts if each["verdict"] != "missed"]
    known = [each for each in verdicts if each["by_text"] and each["verdict"] in {"right", "missed"}]
    return {
        "findings": len(findings),
        "right": sum(each["verdict"] in {"right", "withdrawn"} for each in findings),
        "not made": sum(each["verdict"] in _NOT_MADE for each in findings),
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
        listed = {(each["line"], each["rule"]) for each in own if each["verdict"] not in {"missed", *_NOT_MADE}}
        differences += [f"no longer found: {path}:{line} {rule}" for line, rule in sorted(listed - found)]
        differences += [f"not judged: {path}:{line} {rule}" for line, rule in sorted(found - listed)]
    return differences


def main() -> int:
    """Print the counts, and what differs in the folder that is given."""
    data = json.loads(VERDICTS.read_text())
    for name, size in data["sets"].items():
        counts = count([each for each in data["verdicts"] if each["set"] == name])
        print(f"{name}: {size['recipes']} recipes of {size['repositories']} repositories")
        print(f"  right: {counts['right']} of {counts['findings']} findings; {counts['not made']} are no longer made")
        if size["read"]:
            print(f"  found: {counts['found']} of {counts['contradictions']} contradictions found by reading")
    differences = again(Path(sys.argv[1]), data["verdicts"]) if sys.argv[1:] else []
    print(*differences, sep="\n", end="\n" if differences else "")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
