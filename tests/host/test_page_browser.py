"""The matrix page in a real browser, at three widths: filters, addresses, links, the panel, accessibility, hostile text."""

import dataclasses
import itertools
import json
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from browser import AXE, Browser, needs_chromium
from small_page import few_releases, small_page

from envbuild.curate import page_html
from envbuild.curate.page_html import render_page
from envbuild.curate.page_published import PublishedImage
from envbuild.matrix.cell import Pin
from envbuild.matrix.load import load_matrix
from envbuild.matrix.spec import matches, names_of
from envbuild.solver.enumerate import enumerate_cells

pytestmark = needs_chromium

ASSETS = Path(page_html.__file__).with_name("page_assets")
WIDTHS = (390, 820, 1440)
HOSTILE = "</script><img src=x onerror='window.hacked=1'><!--<script>window.hacked=2</script>"


@pytest.fixture(scope="module")
def matrix():
    return few_releases()


@pytest.fixture(scope="module")
def page(matrix):
    built = small_page(matrix)
    proven = next(cell for cell in built.cells if cell["standing"])
    image = PublishedImage(
        id=proven["id"],
        cell={axis: proven[axis] for axis in ("cuda", "torch", "te")},
        image="sha256:" + "ab" * 32,
        platform="linux/amd64",
        size=5 << 30,
        registry="registry.example.org/team/megatron",
    )
    return dataclasses.replace(built, published=(image,))


@pytest.fixture(scope="module")
def address(page, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "index.html"
    path.write_text(render_page(page), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture(params=WIDTHS)
def wide(request, browser):
    browser.size(request.param)
    yield browser
    assert browser.problems() == []


@pytest.fixture
def tab(browser):
    browser.size(1440)
    yield browser
    assert browser.problems() == []


def possible(browser):
    """Return the combinations that the page shows as possible with its filters, of every table."""
    return {tuple(each) for each in browser.js(
        "[...document.querySelectorAll('.grid button')].filter(b => b.place.listed && !['no', 'out'].includes(b.place.shown))"
        ".map(b => [b.place.cuda, b.place.torch, b.place.te])"
    )}  # fmt: skip


def soon(browser, expression, wanted=True, seconds=10.0):
    """Return whether the expression comes to `wanted`; the page may need a moment for it."""
    end = time.monotonic() + seconds
    while browser.js(expression) != wanted:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def in_view(browser, selector):
    """Return whether all of the first element that matches comes into the window and nothing covers its middle."""
    return soon(
        browser,
        f"(() => {{ const at = document.querySelector({json.dumps(selector)}); if (!at) return false;"
        " const b = at.getBoundingClientRect();"
        " const top = document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2);"
        " return b.width > 0 && b.top >= 0 && b.left >= 0 && b.bottom <= innerHeight && b.right <= innerWidth && at.contains(top); })()",
    )


def text_of(browser, selector):
    browser.wait_for(selector)
    return browser.js(f"document.querySelector({json.dumps(selector)}).innerText")


def test_two_clicks_from_the_question_to_a_copied_command(wide, address):
    wide.open(address)
    wide.click("#ask")
    wide.type("--cuda 12.6 --te 2.6")
    assert "Yes: 2 combinations fit." in text_of(wide, "#answer")
    assert possible(wide) == {("12.6", "2.8.0+cu126", "2.6.0"), ("12.6", "2.7.1+cu126", "2.6.0")}
    wide.click("#answer .copy")
    assert soon(wide, "document.querySelector('#answer .copy').innerText", "Copied")
    assert soon(wide, "navigator.clipboard.readText()", "envbuild image --cuda 12.6 --te 2.6")


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        ("--cuda 12.6 --te 2.6", "--cuda 12.6 --te 2.6"),
        ('"--cuda 12.6 --te 2.6"', "--cuda 12.6 --te 2.6"),
        ("“--cuda 12.6 --te 2.6”", "--cuda 12.6 --te 2.6"),
        ("--cuda '12.6' --te=\"2.6\"", "--cuda 12.6 --te 2.6"),
        ("CUDA 12.6 and TE 2.6?", "--cuda 12.6 --te 2.6"),
        ("cu126 te2.6", "--cuda 12.6 --te 2.6"),
        ("Transformer Engine 2.6 on H100, CUDA 12.6", "--te 2.6 --gpu H100 --cuda 12.6"),
        ("envbuild image --te '>=2.6,<2.8' --cuda 12.6", "--te '>=2.6,<2.8' --cuda 12.6"),
        ("--cuda 12.6 --te 2.6 --apex 25.08", "--cuda 12.6 --te 2.6 --apex 25.08"),
    ],
)
def test_what_people_type(tab, address, typed, command):
    tab.open(address)
    tab.click("#ask")
    tab.type(typed)
    assert text_of(tab, "#answer .command code").replace("\n", " ").split() == f"envbuild image {command}".split()
    assert {(cuda, te) for cuda, _, te in possible(tab)} == {("12.6", "2.6.0")}


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("-t 2.6", "There is no flag -t. Similar: --torch, --te, --toolchain."),
        ("--tee 2.6", "There is no flag --tee. Similar: --te."),
        ("--xyzzy 1", "There is no flag --xyzzy. This page filters by --cuda, --torch, --te, --gpu, --python, --driver."),
        ("--te", "--te needs a value, for example --te 2.6."),
        ("2.6", "2.6: of what? Write --cuda 2.6 or --te 2.6, for example."),
        ("hello", "“hello” is not understood."),
        ("--te 9.9", "No release of te on this page matches “9.9”"),
        ("--driver new", "“new” is not a driver version."),
        ("--gpu h1000", "No release of gpu on this page matches “h1000”; similar: h100"),
        ("--gpu gh200", "gh200 has an Arm host"),
        ("--apex 25.08", "--apex: the tables do not filter by this; the command does."),
        ("--cuda 13.0 --te 1.9", "No combination fits."),
        ("--cuda 13.0 --te 1.9", "begins with 2.9"),
        ("<img src=x onerror=window.hacked=1>", "“<img” is not understood."),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_answered(tab, address, typed, line):
    tab.open(address)
    tab.click("#ask")
    tab.type(typed)
    assert line in text_of(tab, "#answer")
    assert in_view(tab, "#answer")
    assert tab.js("window.hacked") is None


def test_the_address_holds_every_filter(tab, address):
    tab.open(address)
    tab.click("#ask")
    tab.type("--cuda 12.6 --te '>=2.6' --torch 2.8 --gpu h100 --driver 560.35.05 --python 3.12 --os debian12")
    before, query = possible(tab), tab.js("location.search")
    assert before == {("12.6", "2.8.0+cu126", "2.6.0"), ("12.6", "2.8.0+cu126", "2.12.0")}
    tab.js("document.querySelector('a[href=\"#rules\"]').click()")
    assert tab.js("[location.search, location.hash]") == [query, "#rules"]
    tab.open(address + query)
    assert possible(tab) == before
    assert tab.js("Object.fromEntries(new FormData(document.querySelector('.filters')))") == {
        "ask": "--cuda 12.6 --te '>=2.6' --torch 2.8 --gpu h100 --driver 560.35.05 --python 3.12 --os debian12",
        "cuda": "12.6",
        "te": ">=2.6",
        "torch": "2.8",
        "gpu": tab.js("String([...document.querySelector('[name=gpu]').options].find(o => o.text.startsWith('sm_90')).value)"),
        "driver": "560.35.05",
        "python": tab.js("String([...document.querySelector('[name=python]').options].find(o => o.text === '3.12').value)"),
    }  # fmt: skip
    tab.click("[name=reset]")
    assert tab.js("location.search") == ""


def test_the_fields_filter_as_the_typed_flags_do(tab, address):
    tab.open(address)
    for field, value in (("te", "2.6"), ("torch", "2.8"), ("driver", "470.1")):
        tab.js(f"document.querySelector('[name={field}]').focus()")
        tab.type(value)
    # in the table of 12.6, which alone has them; 470 starts it with cuda-compat, on data-center GPUs
    assert possible(tab) == {("12.6", "2.8.0+cu126", "2.6.0")}
    assert tab.js("[...document.querySelectorAll('.grid')].filter(g => !g.hidden).map(g => g.dataset.cuda)") == ["12.6"]
    assert tab.js("document.querySelector('#ask').value") == "--te 2.6 --torch 2.8 --driver 470.1"
    tab.js("document.querySelector('.grid:not([hidden]) tbody tr:not([hidden]) td:not([hidden]) button').click()")
    assert "with the package cuda-compat alone" in text_of(tab, "#panel")


DRIVERS = (
    "450.80.02",
    "460.1",
    "470.256.02",
    "525.60.12",
    "525.60.13",
    "530",
    "535.54.03",
    "570.86.15",
    "580.65.06",
    "590.44.01",
)


def test_drivers_are_judged_as_the_solver_judges_them(tab, address, matrix, page):
    tab.open(address)
    tables = {(cell["cuda"], cell["torch"], cell["te"]) for cell in page.cells}
    for driver, gpu in itertools.product(DRIVERS, (None, "sm_90", "sm_70")):
        pins = [Pin(axis="driver", spec=driver, origin="-")]
        pins += [Pin(axis="gpu", spec=gpu, origin="-")] if gpu else []
        found = {(c["cuda"], c["torch"], c["te"]) for c in enumerate_cells(matrix, ["cuda", "torch", "te"], pins)}
        tab.js(f"ask = document.getElementById('ask'), ask.value = '--driver {driver}{f' --gpu {gpu}' if gpu else ''}',"
               "ask.dispatchEvent(new Event('input', {bubbles: true}))")  # fmt: skip
        shown = {each for each in possible(tab) if each[2] != "none" and each[0] != "cpu"}
        assert shown == found & tables, (driver, gpu)


SPECS = ("2", "2.1", "2.6", "2.6.0", "==2.6", "==2.6.*", "!=2.6.*", ">=2.6,<2.8", ">2.6", "<2.6", "<=2.6", "~=2.6", "~=2.6.0", "2.6 || 2.8",
         ">1.9,!=2.6.0", "any", "2.6.0.post1", ">=12", "12.6", "3.1", "3.10", "<3.12", "cpu", "nonsense", ">=", "==", "2.8.0+cu126", "v2.6")  # fmt: skip


def test_specs_are_read_as_the_command_line_reads_them(tab, tmp_path):
    script = (ASSETS / "flags.js").read_text(encoding="utf-8")
    (tmp_path / "x.html").write_text("<!doctype html><title>x</title>")
    tab.open((tmp_path / "x.html").as_uri())
    whole = load_matrix()
    for axis in ("te", "torch", "cuda", "python"):
        releases = whole.releases[axis]
        names = [[*names_of(r), *([r.commit] if r.commit else [])] for r in releases]
        commits = [r.commit[:9] for r in releases if r.commit][:3]
        asked = json.dumps([axis, [*SPECS, *commits], names])
        found = tab.js(
            f"(() => {{ {script}; const [axis, specs, releases] = {asked};"
            " return specs.map(spec => releases.filter(names => releaseMatches(axis, spec, names)).map(names => names[0])); })()"
        )
        for spec, those in zip([*SPECS, *commits], found, strict=True):
            # `v2.6` is another spelling, which the command line reads where the text as it is matches nothing
            wanted = [r.version for r in releases if matches(whole.axes[axis], spec.removeprefix("v"), r)]
            assert those == wanted, (axis, spec)


@pytest.mark.parametrize("rows", ["1.6rem", "16rem"])
def test_a_link_shows_its_cell_and_its_panel(wide, address, page, rows):
    proven = next(cell for cell in page.cells if cell["standing"])
    wide.open(address)
    # as in a table of few rows, and of many
    wide.js(f"document.head.insertAdjacentHTML('beforeend', '<style>.grid tbody tr {{ height: {rows} }}</style>')")
    wide.js(f"location.hash = '#cell={proven['id']}'")
    assert in_view(wide, "#panel h3")
    assert in_view(wide, "button[aria-pressed=true]")
    assert in_view(wide, "#panel .copy")
    assert text_of(wide, "#panel h3") == "CUDA 13.0, torch 2.11.0, TE 2.12.0"
    panel = text_of(wide, "#panel")
    assert "Ran on" in panel
    assert "H200, environment on a host" not in panel
    assert "H200, image: passed" in panel
    assert f"docker pull registry.example.org/team/megatron@sha256:{'ab' * 32}" in panel.replace("\n", " ")


def test_short_links_and_unknown_ones(tab, address, page):
    cell = next(c for c in page.cells if (c["cuda"], c["torch"], c["te"]) == ("12.6", "2.8.0+cu126", "2.6.0"))
    title = "CUDA 12.6, torch 2.8.0, TE 2.6.0"
    unique = next(
        cell["id"][:n] for n in range(1, 99) if sum(c["id"].startswith(cell["id"][:n]) for c in page.cells) == 1
    )
    last = cell["id"].rpartition("-")[2]
    for link in (
        f"cell={unique}",
        unique,
        f"cell={last}",
        last,
        "cell=12.6/2.8.0/2.6.0",
        "cell=12.6/2.8/2.6",
        cell["id"].upper(),
    ):
        tab.open(f"{address}#{link}")
        assert text_of(tab, "#panel h3") == title, link
        assert tab.js("location.hash") == f"#cell={cell['id']}"
    # an id of another version of the matrix: its combination, and a line that says so
    tab.open(f"{address}#cell=cu126-py39-torch2.8.0-te2.6.0-apex1-sm80-00000000")
    assert text_of(tab, "#panel h3") == title
    assert "resolve to another cell today" in text_of(tab, "#answer")
    # several
    tab.open(f"{address}#cell=cu126-")
    several = [c["id"] for c in page.cells if c["id"].startswith("cu126-")]
    assert f"{len(several)} cells begin with “cu126-”; choose one:" in text_of(tab, "#answer")
    assert set(text_of(tab, "#answer ul").split()) == set(several)
    tab.click("#answer li a")
    assert "CUDA 12.6" in text_of(tab, "#panel h3")
    # nothing
    for link in (
        "cell=cu999-py1",
        "cell=",
        "cell=1/2/3",
        "cu999-py1",
        "nothing-here",
        "cell=%",
        quote(f"cell={HOSTILE}"),
        quote(HOSTILE),
    ):
        tab.open(f"{address}#{link}")
        assert in_view(tab, "#answer .note"), link
        assert tab.js("window.hacked") is None
    tab.open(f"{address}?te=2.6&frob=1&cuda=%0a<b>")
    assert "“frob”, which is no flag of a cell" in text_of(tab, "#answer")
    assert tab.js("document.querySelectorAll('#answer b').length") == 1  # the page's own


def test_every_link_to_a_cell_opens_its_panel(tab, address):
    tab.open(address)
    links = tab.js("[...document.querySelectorAll('main a[href^=\"#cell=\"]')].map(a => a.getAttribute('href'))")
    assert len(links) >= 3  # a stack's, a record's, a published image's
    for link in links:
        tab.open(address + link)
        assert tab.js("document.querySelector('#panel h3') !== null"), link


def test_a_link_with_a_filter_that_hides_its_cell(tab, address, page):
    cell = next(c for c in page.cells if (c["cuda"], c["torch"], c["te"]) == ("12.6", "2.8.0+cu126", "2.6.0"))
    tab.open(f"{address}?cuda=13.0&te=2.12&gpu=sm_90#cell={cell['id']}")
    assert in_view(tab, "button[aria-pressed=true]")
    assert tab.js("location.search") == "?cuda=12.6&gpu=sm_90"


def test_heads_stay_while_a_table_scrolls(browser, address):
    browser.size(390, 500)
    browser.open(address)
    box = "document.querySelector('.grid:not([hidden]) .scroll')"
    browser.js(f"{box}.style.maxHeight = '90px', {box}.style.maxWidth = '120px', {box}.scrollTo(400, 400)")
    moved = browser.js(
        f"(() => {{ const b = {box}, at = b.getBoundingClientRect(); const of = s => b.querySelector(s).getBoundingClientRect();"
        " return [b.scrollTop, b.scrollLeft, of('thead th[scope=col]').top - at.top, of('tbody th').left - at.left]; })()"
    )
    assert moved[0] > 0
    assert moved[1] >= 0
    assert 0 <= moved[2] < 5
    assert 0 <= moved[3] < 5


def test_the_keyboard_moves_between_what_is_shown(tab, address):
    tab.open(f"{address}?cuda=12.6")
    tab.js("document.querySelector('.grid:not([hidden]) button[tabindex=\"0\"]').focus()")
    start = tab.js("[document.activeElement.place.x, document.activeElement.place.y]")
    for kind in ("keyDown", "keyUp"):
        tab.call("Input.dispatchKeyEvent", type=kind, key="ArrowDown", code="ArrowDown", windowsVirtualKeyCode=40)
    assert tab.js("[document.activeElement.place.x, document.activeElement.place.y]") == [start[0], start[1] + 1]
    for kind in ("keyDown", "keyUp"):
        tab.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    assert tab.js("document.activeElement.getAttribute('aria-pressed')") == "true"


def test_nothing_is_wider_than_the_screen(wide, address, page):
    cell = next(c for c in page.cells if c["standing"])
    for link in ("", "?cuda=12.6&te=2.6", f"#cell={cell['id']}", "?cuda=13.0&te=1.9"):
        wide.open(address + link)
        assert wide.js("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), link


def test_a_published_image_is_pulled_by_its_digest(wide, address):
    wide.open(address)
    wide.click("#published .copy")
    wide.js("document.querySelector('#published .copy').scrollIntoView({block: 'center', behavior: 'instant'})")
    assert in_view(wide, "#published .copy")
    wanted = f"docker pull registry.example.org/team/megatron@sha256:{'ab' * 32}"
    assert soon(wide, "navigator.clipboard.readText()", wanted)


def test_hostile_text_in_the_data_is_text(tab, page, matrix, tmp_path):
    """Every text of the data that people write: what a browser makes of it is text, and no script of it runs."""
    cell = next(n for n, c in enumerate(page.cells) if c["standing"])
    bad = {**page.cells[cell], "id": page.cells[cell]["id"] + HOSTILE, "pairs": [[HOSTILE, "tried", "passed"]]}
    bad["standing"] = [{**each, "where": HOSTILE, "why": HOSTILE, "cell": HOSTILE} for each in bad["standing"]]
    bad["versions"] = {**bad["versions"], "apex": HOSTILE}
    rules = tuple(
        rule.model_copy(update={"why": HOSTILE}) if hasattr(rule, "model_copy") else rule for rule in matrix.rules
    )
    hostile = dataclasses.replace(
        page,
        matrix=dataclasses.replace(matrix, rules=rules),
        cells=tuple(bad if n == cell else each for n, each in enumerate(page.cells)),
        reasons=tuple(({"text": HOSTILE, "rule": HOSTILE, "source": "run:" + HOSTILE},) for _ in page.reasons),
        proof=tuple({**each, "board": HOSTILE, "by": HOSTILE, "why": HOSTILE} for each in page.proof),
        images=tuple({**each, "base": HOSTILE} for each in page.images),
    )
    path = tmp_path / "index.html"
    path.write_text(render_page(hostile), encoding="utf-8")
    tab.open(path.as_uri())
    for place in ("13.0/2.11.0/2.12.0", "13.0/2.11.0/1.9.0"):
        tab.js(f"location.hash = '#cell={place}'")
        assert soon(tab, f"document.querySelector('#panel').textContent.includes({json.dumps(HOSTILE)})")
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
    assert tab.js("document.querySelectorAll('img, #panel script, .grids script').length") == 0
    assert tab.js("window.hacked") is None
    # and where text became HTML after all, the page's policy would not run it
    tab.js("document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=\"window.hacked=3\">')")
    tab.js("new Promise(done => setTimeout(done, 200))")
    assert tab.js("window.hacked") is None
    assert all("Content Security Policy" in problem for problem in tab.problems())
    tab.events.clear()


@pytest.mark.skipif(not AXE, reason="TEST_AXE names no folder of axe-core (npm install axe-core)")
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing(wide, address, page, dark):
    script = (Path(str(AXE)) / "axe.min.js").read_text(encoding="utf-8")
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    wide.call("Emulation.setEmulatedMedia", features=[scheme])
    cell = next(c for c in page.cells if c["standing"])
    for link in ("", "?cuda=12.6&te=2.6&frob=1", f"#cell={cell['id']}", "#cell=13.0/2.11.0/1.9.0", "#cell=cu126-"):
        wide.open(address + link)
        wide.js(script + ";0")
        found = wide.js("axe.run(document, {resultTypes: ['violations']}).then(r => r.violations.map(v =>"
                        " [v.id, v.nodes.length, v.nodes[0].html.slice(0, 200), v.nodes[0].failureSummary.slice(0, 300)]))")  # fmt: skip
        assert found == [], link
