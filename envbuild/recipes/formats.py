"""Findings for other programs: annotations of a GitHub workflow, and SARIF."""

from collections.abc import Sequence
from typing import Any

from envbuild import __version__
from envbuild.matrix.load import Matrix
from envbuild.recipes.batch import Checked


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_annotations(done: Sequence[Checked]) -> str:
    """Return findings as GitHub's workflow commands, one a line."""
    lines = [
        f"::error file={_property(each.name)},line={f.line},title={_property(f.rule)}::{_data(f'{f.why} To do: {f.todo}')}"
        for each in done
        for f in each.report.findings
    ]
    lines += [
        f"::warning file={_property(each.name)},line={line},title=not understood::{_data(text)}"
        for each in done
        for line, text in each.report.not_understood
    ]
    return "".join(f"{line}\n" for line in lines)


def as_sarif(matrix: Matrix, done: Sequence[Checked]) -> dict[str, Any]:
    """Return findings as SARIF 2.1.0."""
    results = [
        {
            "ruleId": f.rule,
            "level": "error",
            "message": {"text": f"{f.why} To do: {f.todo} Source: {f.source}"},
            "locations": [_location(each.name, f.line)],
            "relatedLocations": [_location(each.name, line) for line in f.lines if line != f.line],
        }
        for each in done
        for f in each.report.findings
    ]
    missed = [
        {
            "level": "note",
            "message": {"text": f"not understood, line {line}: {text}"},
            "locations": [_location(each.name, line)],
        }
        for each in done
        for line, text in each.report.not_understood
    ]
    rules = sorted({str(result["ruleId"]) for result in results})
    run = {
        "tool": {
            "driver": {
                "name": "envbuild",
                "version": __version__,
                "rules": [{"id": rule} for rule in rules],
                "properties": {"matrix": matrix.digest},
            }
        },
        "results": results,
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": missed}],
    }
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _location(name: str, line: int) -> dict[str, Any]:
    return {"physicalLocation": {"artifactLocation": {"uri": name}, "region": {"startLine": line}}}
