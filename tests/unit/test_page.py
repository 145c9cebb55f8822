"""The browsable matrix: its data, its links, and that the file stands alone."""

import dataclasses
import html.parser
import json
import re
from datetime import UTC, datetime

import pytest
from small_page import few_releases, record, small_page

from envbuild.curate.links import source_url
from envbuild.curate.page import build_page
from envbuild.curate.page_html import page_data, page_path, render_page, write_page
from envbuild.errors import HostError
from envbuild.evidence.standing import evidence_for, summary
from envbuild.evidence.trials import Ledger, Trial
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.solver.enumerate import enumerate_cells
from envbuild.solver.solve import solve


@pytest.fixture(scope="module")
def matrix():
    return few_releases()


@pytest.fixture(scope="module")
def page(matrix):
    return small_page(matrix)


def test_a_combination_says_which_of_its_pairs_were_tried(matrix):
    tried = Trial(
        date=datetime(2026, 11, 23, tzinfo=UTC).date(),
        kind="names",
        pair={"te": "2.12.0", "torch": "2.11.0"},
        verdict="passed",
        command="envbuild matrix try te=2.12.0 torch=2.11.0 --kind names",
        inputs="ab" * 32,
    )
    cells = build_page(matrix, trials=Ledger([tried])).cells
    (cell,) = [c for c in cells if (c["torch"], c["te"]) == ("2.11.0+cu130", "2.12.0")]
    assert ["te 2.12.0 with torch 2.11.0+cu130: tried: names passed", "tried", "passed"] in cell["pairs"]
    assert {known for _, known, _ in cell["pairs"]} <= {"tried", "stated", "neither"}
    assert all(c["te"] == "none" or len(c["pairs"]) >= 1 for c in cells)


def entries(page):
    return {
        (grid.cuda, torch, te): n
        for grid in page.grids
        for te, row in zip(grid.te, grid.entries, strict=True)
        for torch, n in zip(grid.torch, row, strict=True)
    }


def test_every_combination_has_the_verdict_of_the_solver(matrix, page):
    exists = {(c["cuda"], c["torch"], c["te"]) for c in enumerate_cells(matrix, ["cuda", "torch", "te"])}
    found = entries(page)
    assert {place for place, n in found.items() if n >= 0 and place[2] != "none"} == exists
    assert ("12.6", "2.8.0+cu126", "2.6.0") in exists
    assert found["13.0", "2.11.0+cu130", "1.9.0"] < 0
    assert found["cpu", "2.13.0+cpu", "none"] >= 0
    # what comes with an NGC image alone has no row and no column
    assert not any("a0" in torch or te == "ngc" for _, torch, te in found)
    assert [grid.cuda for grid in page.grids] == ["13.0", "12.6", "cpu"]
    for (cuda, torch, te), n in found.items():
        if n >= 0:
            pins = {"cuda": cuda, "torch": torch, "te": te}
            request = Request(pins=tuple(Pin(axis=a, spec=s, origin="-") for a, s in pins.items()))
            assert page.cells[n]["id"] == solve(matrix, request).cell.id


def test_a_refusal_names_its_rule_and_source(page):
    reason = page.reasons[-1 - entries(page)["13.0", "2.11.0+cu130", "1.9.0"]]
    assert [step["rule"] for step in reason] == ["te-core-cu13"]
    assert reason[0]["source"] == "PyPI:transformer-engine-cu13==2.9.0"
    assert "begins with 2.9" in reason[0]["text"]


def test_gpu_and_python_are_exact_together(matrix, page):
    python = {version: n for n, version in enumerate(page.pythons)}
    for cell in page.cells:
        if cell["te"] == "none":
            continue
        pins = [Pin(axis=a, spec=cell[a], origin="-") for a in ("cuda", "torch", "te")]
        expected = {(c["gpu"], c["python"]) for c in enumerate_cells(matrix, ["gpu", "python"], pins)}
        shown = {
            (page.gpus[gpu].version, version)
            for gpu, mask in cell["on"].items()
            for version, n in python.items()
            if mask >> n & 1
        }
        assert shown == expected
        assert {page.gpus[n].version for n in cell["no_gpu"]} == {g.version for g in page.gpus} - {g for g, _ in shown}


def test_evidence_is_next_to_what_it_proves(matrix, page):
    proven = page.cells[entries(page)["13.0", "2.11.0+cu130", "2.12.0"]]
    assert proven["standing"] == [
        {
            "status": "verified",
            "claim": "run-on-this-gpu",
            "cell": "cu130-py311-torch2.11.0-te2.12.0-x",
            "where": "H200, driver 580",
            "gpu": "sm_90",
            "image": "sha256:aa",
            "date": "2026-11-17T09:00:00Z",
            "why": "",
            "record": "sha256:0123",
        }
    ]
    assert page.cells[entries(page)["12.6", "2.8.0+cu126", "2.6.0"]]["standing"] == []
    older = build_page(matrix, records=[record()], suite="sha256:33")
    standing = older.cells[entries(older)["13.0", "2.11.0+cu130", "2.12.0"]]["standing"]
    assert (standing[0]["status"], standing[0]["why"]) == ("stale", "the smoke suite has changed since")


@pytest.mark.parametrize(
    ("changes", "status", "why"),
    [
        ({"level": "import"}, "verified", "level import alone"),
        ({"adopted": {"torch": "2.11.0"}}, "never", "torch adopted from the host"),
        (
            {"gpus": ({"name": "NVIDIA B200", "sm": "100", "memory_gib": 180.0, "count": 1},)},
            "never",
            "sm_100 (here sm_90); compiled for sm_90",
        ),
        (
            {"verdict": "failed", "reason": "test_x\nmore", "suite": "sha256:0"},
            "failed",
            "the smoke suite has changed since; test_x",
        ),
    ],
)
def test_a_run_that_proves_less_says_so(changes, status, why):
    standing = evidence_for([record(**changes)], cell_id=record().cell_id, suite="sha256:22")
    shown = summary(standing, record().cell_id, {"gpu": "sm_90", "python": "3.11", "os": "debian12"})
    assert (shown["status"], shown["why"]) == (status, why)


class _Outside(html.parser.HTMLParser):
    """Collects what a browser would fetch, and what can be linked to."""

    def __init__(self):
        super().__init__()
        self.fetched, self.links, self.ids = [], set(), set()

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids.add(found.get("id"))
        if tag == "a":
            self.links.add(found["href"])
        self.fetched += [v for k, v in attributes if k == "src" or (k == "href" and tag == "link")]


def test_the_file_stands_alone_and_is_the_same_every_time(page, tmp_path):
    text = render_page(page)
    assert text == render_page(page)
    outside = _Outside()
    outside.feed(text)
    assert outside.fetched == ["data:,"]
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest", text)
    links = {link for link in outside.links if not link.startswith("#cell=")}  # those are the script's
    missing = {link for link in links if link.startswith("#") and link[1:] not in outside.ids}
    assert not missing
    assert "evidence-sha256:0123" in outside.ids
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert len(data["cells"]) == len(page.cells)
    rules = data["shared"][data["cells"][0][data["fields"].index("rules")]]
    assert data["rules"][rules[0]][0] in text
    path = page_path(tmp_path / "new" / "folder")
    write_page(text, path)
    assert path.read_text(encoding="utf-8") == text
    assert len(text.encode()) < 2 * 2**20


def test_text_of_the_data_cannot_end_the_script(page):
    broken = dataclasses.replace(page, reasons=(({"text": "</script><b>", "rule": "x", "source": "run:x"},),))
    assert "</script><b>" not in render_page(broken)
    assert page_data(broken)["reasons"][0][0]["source"] == [("run:x", None)]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="the page cannot be written") as caught:
        page_path(tmp_path / "file" / "page")
    assert caught.value.where == str(tmp_path / "file" / "page")


@pytest.mark.parametrize(
    ("source", "url"),
    [
        ("https://example.org/page", "https://example.org/page"),
        ("NVIDIA/apex@25.08:setup.py", "https://github.com/NVIDIA/apex/blob/25.08/setup.py"),
        ("NVIDIA/apex@22.03", "https://github.com/NVIDIA/apex/tree/22.03"),
        ("NVIDIA/TransformerEngine#763", "https://github.com/NVIDIA/TransformerEngine/issues/763"),
        ("PyPI:flash-attn==2.8.3.post2:setup.py", "https://pypi.org/project/flash-attn/2.8.3.post2/"),
        ("Debian:bookworm/gcc", "https://packages.debian.org/bookworm/gcc"),
        ("Ubuntu:noble/python3", "https://packages.ubuntu.com/noble/python3"),
        ("NGC:pytorch:25.03-py3", "https://catalog.ngc.nvidia.com/orgs/nvidia/containers/pytorch/tags"),
        ("image:nvidia/cuda:12.6.3-base", "https://hub.docker.com/r/nvidia/cuda/tags?name=12.6.3-base"),
        ("evidence:sha256:0123", "#evidence-sha256:0123"),
        ("run:nvcc --version", None),
        ("trial:0123456789abcdef", None),
    ],
)
def test_a_source_leads_to_its_page(source, url):
    assert source_url(source) == url


def test_every_source_of_the_matrix_has_an_address_or_was_run_here():
    matrix = load_matrix()
    sources = {r.source for releases in matrix.releases.values() for r in releases} | {r.source for r in matrix.rules}
    assert not {s for s in sources if source_url(s) is None and not s.startswith(("run:", "trial:"))}
