"""A report as JUnit XML."""

import json
import re
from pathlib import Path

from envbuild.evidence.report import SmokeReport


def write_junit(report: SmokeReport, path: Path) -> None:
    """Write the report as JUnit XML; what kept a run from passing, where no test says it, is the error of a case `run`."""
    from xml.etree import ElementTree as ET

    counts = report.counts
    broken = report.verdict in {"hung", "host"} or (report.verdict != "passed" and not counts["failed"])
    suite = ET.Element(
        "testsuite",
        name=f"envbuild smoke {report.cell_id}",
        tests=str(len(report.tests)),
        failures=str(counts["failed"]),
        skipped=str(counts["skipped"]),
        errors=str(int(broken)),
        time=str(report.seconds),
    )
    for test in report.tests:
        case = ET.SubElement(suite, "testcase", classname=test.level, name=test.id, time=str(test.seconds))
        if test.figures:
            properties = ET.SubElement(case, "properties")
            for name, figure in test.figures.items():
                ET.SubElement(properties, "property", name=name, value=json.dumps(figure))
        if test.outcome != "passed":
            node = ET.SubElement(case, "failure" if test.outcome == "failed" else "skipped")
            node.set("message", _printable(test.reason.partition("\n")[0]))
            node.text = _printable(test.reason)
    if broken:
        case = ET.SubElement(suite, "testcase", classname="run", name="run", time=str(report.seconds))
        ET.SubElement(case, "error", message=_printable(report.reason))
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = ET.ElementTree(suite)
    ET.indent(tree)
    tree.write(path, encoding="utf-8", xml_declaration=True)


def _printable(text: str) -> str:
    # XML 1.0 has no way to write the other control characters, and compilers colour their output with them.
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "", text)
