"""The man pages: one for each command, without a warning of groff, installed with the package, checked for being stale."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts import write_reference  # noqa: E402
from scripts.man_pages import roff  # noqa: E402

PAGES = sorted((ROOT / "man").glob("*.1"))


def test_every_command_has_its_page():
    names = {f"envbuild-{name}.1" for section in write_reference.SECTIONS.values() for name in section}
    assert names | {"envbuild.1", "envbuild-cache-prune.1"} <= {page.name for page in PAGES}
    assert (
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
            "shared-data"
        ]["man"]
        == "share/man/man1"
    )


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_has_nothing_to_warn_of():
    done = subprocess.run(
        ["groff", "-man", "-ww", "-z", "-Tutf8", "-Kutf8", *PAGES], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_text_is_text_to_roff():
    assert roff(".TH x\n'so /etc/passwd\na\\fBb --flag") == "\\&.TH x\n\\&'so /etc/passwd\na\\efBb \\-\\-flag"


def test_a_stale_page_is_named_and_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(write_reference, "MAN", tmp_path)
    for page in PAGES:
        shutil.copy(page, tmp_path)
    assert write_reference.write_man(check=True) == []
    (tmp_path / "envbuild-run.1").write_text("old")
    (tmp_path / "envbuild-gone.1").write_text("old")
    assert write_reference.write_man(check=True) == ["man/envbuild-gone.1", "man/envbuild-run.1"]
    assert (tmp_path / "envbuild-run.1").read_text() == "old"
    write_reference.write_man(check=False)
    assert write_reference.write_man(check=True) == []
    assert not (tmp_path / "envbuild-gone.1").exists()
