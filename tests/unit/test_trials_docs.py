"""The table of trials in the docs is the one that the records give."""

import re
from pathlib import Path

from envbuild.evidence.trials import committed_trials, counted

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "trials.md"


def test_the_table_of_the_docs_counts_what_is_recorded():
    rows = [
        f"| {' | '.join((*key, str(sum(counts.values())), *map(str, counts.values())))} |"
        for key, counts in counted(committed_trials()).items()
    ]
    shown = re.findall(r"^\| [a-z].*\d \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert shown == rows
