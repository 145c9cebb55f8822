"""What a command shows while it works: lines, JSON, and the live view at any width."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from envbuild.cli import work as module
from envbuild.cli.live import lines_of
from envbuild.cli.work import Running, State, Work
from envbuild.engine.details import Amount

PARTS = [
    ("base", "base system", 30.0),
    ("torch", "torch 2.8.0+cu126", 60.0),
    ("wheel-te", "te 2.6.0", None),
    ("image", "image", 1.0),
]


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def working(mode, **more):
    clock = Clock()
    work = Work(mode, clock=clock, **more)
    work.parts(PARTS)
    return work, clock


def test_lines_count_the_parts_and_say_how_each_ended(capsys):
    work, clock = working("plain")
    work.change("base", "started")
    clock.now += 31
    work.change("base", "done")
    work.change("recipe", "cached")
    work.change("torch", "cached")
    work.change("build-te", "started")
    clock.now += 5
    work.change("build-te", "failed")
    assert capsys.readouterr().err.splitlines() == [
        "  base system: started",
        "  1 of 4  base system: done (31 s)",
        "  2 of 4  torch 2.8.0+cu126: from cache",
        "  te 2.6.0: started",
        "  te 2.6.0: failed (5 s)",
    ]


def test_a_part_in_which_there_was_nothing_to_do_counts_when_the_export_begins(capsys):
    work, _ = working("plain")
    work.parts([*PARTS, ("export", "export", 1.0), ("load", "load into the engine", 1.0)])
    for stage in ("base", "torch", "image", "export", "load"):  # the stage of te has no step
        for what in ("started", "done"):
            work.change(stage, what)
    counted = [line.split("  ")[1] for line in capsys.readouterr().err.splitlines() if line.endswith("done (0 s)")]
    assert counted == ["1 of 6", "2 of 6", "3 of 6", "5 of 6", "6 of 6"]


def test_a_wheel_is_done_when_it_is_there_and_not_when_it_is_compiled(capsys):
    work, _ = working("plain")
    for stage, what in (("build-te", "started"), ("build-te", "done"), ("wheel-te", "started"), ("wheel-te", "done")):
        work.change(stage, what)
    assert capsys.readouterr().err.splitlines() == ["  te 2.6.0: started", "  1 of 4  te 2.6.0: done (0 s)"]


def test_an_mpi_is_done_when_it_is_compiled_and_copied(capsys):
    work, _ = working("plain")
    work.parts([*PARTS, ("mpi", "openmpi 5.0.5", None)])
    for stage, what in (("build-mpi", "started"), ("build-mpi", "done"), ("mpi", "started"), ("mpi", "done")):
        work.change(stage, what)
    assert capsys.readouterr().err.splitlines() == ["  openmpi 5.0.5: started", "  1 of 5  openmpi 5.0.5: done (0 s)"]


def test_what_a_later_run_of_the_builder_finds_again_is_not_counted_again(capsys):
    work, _ = working("plain")
    for what in ("started", "done", "started", "cached", "done"):
        work.change("base", what)
    assert capsys.readouterr().err.count("1 of 4") == 1


def test_silence_is_broken_within_half_a_minute(capsys):
    work, clock = working("plain")
    work.note("pinning every input")
    for _ in range(120):
        clock.now += 1
        work._view.tick(work._state, clock.now)
    assert capsys.readouterr().err.splitlines() == [
        "pinning every input",
        *(f"  pinning every input: {passed} so far" for passed in ("25 s", "50 s", "1:15", "1:40")),
    ]
    assert module.SILENCE_S <= 29


def test_what_breaks_the_silence_is_the_running_stage(capsys):
    work, clock = working("plain")
    work.change("torch", "started")
    work.change("build-te", "started")
    work.line("build-te", "[23/58] Building CXX object x.o")
    work.amount("build-te", Amount(done=23, total=58, unit="steps"))
    capsys.readouterr()
    clock.now += 26
    work._view.tick(work._state, clock.now)
    assert capsys.readouterr().err == (
        "  torch 2.8.0+cu126: 26 s so far, about 35 s left; "
        "te 2.6.0: 26 s so far, [23/58]: [23/58] Building CXX object x.o\n"
    )


@pytest.mark.parametrize(
    "mark", ["      ^~~~~", "      |      ^~~~~", "   42 |   int unused;", "    |", "=======", "", "          ^"]
)
def test_a_compilers_mark_is_not_what_a_stage_is_at(capsys, mark):
    work, clock = working("plain", verbose=True)
    work.change("build-te", "started")
    work.line("build-te", "a.cpp:42:7: warning: unused variable 'unused'")
    work.line("build-te", mark)
    assert capsys.readouterr().err.splitlines()[-1] == f"  [wheel-te] {mark}"  # a verbose run prints it all the same
    clock.now += 26
    work._view.tick(work._state, clock.now)
    assert capsys.readouterr().err.endswith(": a.cpp:42:7: warning: unused variable 'unused'\n")


@pytest.mark.parametrize("line", ["[2/58] x", "Downloading torch (178.0MiB)", "99%", "  |███ 12 MB", "Übersetze"])
def test_a_line_with_a_word_or_a_number_says_something(line):
    work, _ = working("quiet")
    work.change("build-te", "started")
    work.line("build-te", line)
    assert work._state.running["wheel-te"].line == line


def test_json_is_an_object_a_line(capsys, tmp_path):
    work, clock = working("json", verbose=True)
    work.note("line one\nhttps://me:secret@index.example.org")
    work.log(tmp_path / "x.log")
    work.change("build-te", "started")
    clock.now += 2
    work.line("build-te", "[1/2] x")
    work.amount("build-te", Amount(done=1, total=2, unit="steps"))
    work.amount("build-te", Amount(done=2, total=2, unit="steps"))  # in the same second
    work.change("build-te", "failed")
    clock.now += 30
    work._view.tick(work._state, clock.now)
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [event["event"] for event in events] == ["note", "log", "stage", "line", "amount", "stage", "working"]
    assert "secret" not in events[0]["text"]
    assert events[5] == {
        "event": "stage", "at": 2.0, "stage": "wheel-te", "title": "te 2.6.0", "state": "failed", "seconds": 2.0,
        "done": 0, "total": 4,
    }  # fmt: skip


def test_quiet_prints_nothing(capsys):
    work, _ = working("quiet")
    work.note("x")
    work.change("base", "started")
    work.change("base", "failed")
    work.line("base", "x")
    assert capsys.readouterr() == ("", "")


def test_verbose_prints_what_stages_print(capsys):
    work, _ = working("plain", verbose=True)
    work.change("build-te", "started")
    work.line("build-te", "hello")
    assert capsys.readouterr().err.splitlines()[-1] == "  [wheel-te] hello"


def test_an_estimate_of_the_whole_needs_one_of_every_part():
    parts = {name: (title, 10.0) for name, title, _ in PARTS}
    state = State(begun=0.0, parts=parts, running={"torch": Running(title="torch", begun=0.0)}, finished={"base"})
    assert state.left(4.0) == 6 + 10 + 10
    state.parts["image"] = ("image", None)
    assert state.left(4.0) is None


AMOUNTS = st.none() | st.builds(
    Amount, done=st.integers(1, 10**15), total=st.integers(0, 10**15), unit=st.sampled_from(["steps", "bytes", "tests"])
)
RUNNING = st.builds(
    Running,
    title=st.text(max_size=80),
    begun=st.floats(0, 10**5),
    estimate=st.none() | st.floats(0.1, 10**6),
    line=st.text(max_size=200),
    amount=AMOUNTS,
)


@given(
    running=st.dictionaries(st.text(max_size=3), RUNNING, max_size=8),
    activity=st.text(max_size=100),
    amount=AMOUNTS,
    total=st.integers(0, 30),
    width=st.integers(8, 200),
    height=st.integers(3, 40),
    wide=st.booleans(),
)
def test_no_line_of_the_view_is_as_wide_as_the_terminal(running, activity, amount, total, width, height, wide):
    """For a text of any kind: characters of two columns, of none, tabs."""
    parts = {str(number): (f"part {number}", 5.0) for number in range(total)}
    state = State(begun=0.0, activity=activity, activity_amount=amount, parts=parts, running=running)
    for line, _ in (drawn := lines_of(state, 10.0**5, width=width, height=height, unicode=wide)):
        assert cell_len(line) < width
    assert 0 < len(drawn) < height


def test_a_stage_that_ends_at_once_is_not_flashed():
    state = State(begun=0.0, running={"lists": Running(title="lists", begun=0.0, helper=True)})
    assert "lists" not in lines_of(state, 0.5, width=80, height=20)[0][0]
    assert "lists" in lines_of(state, 5.0, width=80, height=20)[0][0]


def test_the_view_says_how_far_it_is():
    running = {
        "torch": Running(title="torch 2.8.0", begun=0.0, estimate=90.0, amount=Amount(done=8, total=32, unit="bytes")),
        "te": Running(title="te", begun=50.0, line="[23/58] Building", amount=Amount(done=23, total=58, unit="steps")),
    }
    state = State(
        begun=0.0, parts={name: (title, 100.0) for name, title, _ in PARTS}, running=running, finished={"base"}
    )
    wide = [line for line, _ in lines_of(state, 60.0, width=100, height=30)]
    assert "━━━━────────────" in wide[0]
    assert wide[0].endswith("about 30 s left")
    assert wide[1].lstrip(" ⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏").startswith("te ")
    assert "[23/58]  ━━━━━━──────────  10 s" in wide[1]
    assert wide[2] == "    [23/58] Building"
    assert wide[3] == "   1 of 4, 1:00, about 4 min left"
    narrow = [line for line, _ in lines_of(state, 60.0, width=60, height=30)]
    assert "━" not in "".join(narrow)
    assert "[23/58]" in narrow[1]
