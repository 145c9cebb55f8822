"""SECURITY.md names what is there."""

import re
from pathlib import Path

from envbuild.util.bounded import DATA_LIMIT

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()


def test_every_module_that_is_named_exists():
    named = set(re.findall(r"`(envbuild/[\w/]+\.py)`", TEXT))
    assert len(named) > 10
    assert sorted(path for path in named if not (ROOT / path).is_file()) == []


def test_every_row_of_the_table_leads_to_a_section():
    rows = re.findall(r"\[\d\]\(#([\w-]+)\) \|$", TEXT, re.MULTILINE)
    heads = {
        re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    }
    assert len(rows) >= 13
    assert set(rows) <= heads


def test_the_figures_are_those_of_the_code():
    import sys

    sys.path.insert(0, str(ROOT))
    from tests.fuzz.drive import GROWTH_MIB, SLOWEST_S

    assert f"at most {DATA_LIMIT >> 20} MiB" in TEXT
    assert f"at most {SLOWEST_S:g} s" in TEXT
    assert f"{GROWTH_MIB} MiB of growth" in TEXT


def test_its_lines_fit():
    assert max(map(len, TEXT.splitlines())) <= 120
