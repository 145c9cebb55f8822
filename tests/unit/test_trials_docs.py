"""The table of trials in the docs is the one that the records give."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from envbuild.cli.matrix_try import list_trials
from envbuild.curate.trials.pairs import shares
from envbuild.errors import UsageError
from envbuild.evidence.trials import History, committed_trials, counted, cuda_counted
from envbuild.matrix.load import load_matrix

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "trials.md"


def test_the_table_of_the_docs_counts_what_is_recorded():
    rows = [
        f"| {' | '.join((*key, str(sum(counts.values())), *map(str, counts.values())))} |"
        for key, counts in counted(committed_trials()).items()
    ]
    shown = re.findall(r"^\| [a-z](?:[^|\n]*\|){6} \d+ \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert shown == rows


def test_the_table_of_cu_files_of_the_docs_counts_what_is_recorded():
    rows = [
        f"| {' | '.join((*key, *(f'{number:,}' for number in c)))}"
        for key, c in cuda_counted(committed_trials()).items()
    ]
    shown = re.findall(r"^(\| [a-z].*\d) \| (?:nvcc|clang)[^|]* \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert shown == rows


def test_nearly_every_pair_that_is_in_a_cell_was_tried():
    # after `envbuild matrix update` adds a release: `envbuild matrix try`
    found = list(shares(load_matrix(), History(committed_trials())))
    assert {(each.component, each.other) for each in found} >= {("te", "torch"), ("apex", "torch"), ("megatron", "te")}
    held, tried = sum(each.held for each in found), sum(each.tried for each in found)
    assert tried >= 0.95 * held, f"{tried} of {held}"
    assert [each for each in found if each.failed] == []


def test_the_command_counts_them_as_a_table_and_as_json():
    table = CliRunner().invoke(list_trials, ["--cu-files"], standalone_mode=False)
    answer = CliRunner().invoke(list_trials, ["--cu-files", "--json"], standalone_mode=False)
    assert table.exit_code == answer.exit_code == 0
    rows = [line.split() for line in table.output.splitlines()[1:]]
    found = [[*map(str, each.values())] for each in json.loads(answer.output)["sources"]]
    assert [[cell.replace(",", "") for cell in row] for row in rows] == found
    assert len(found) > 5
    with pytest.raises(UsageError, match="another table"):
        CliRunner().invoke(list_trials, ["--cu-files", "--held"], standalone_mode=False, catch_exceptions=False)
