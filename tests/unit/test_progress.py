"""BuildKit's stream: stages, times, and the lines of a failure that matter."""

import base64
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.engine.details import Details
from envbuild.engine.failures import no_answer
from envbuild.engine.progress import Watch

RECORDED = Path(__file__).parents[1] / "data" / "buildkit"
"""Streams of BuildKit 0.25: a build of the image for CPUs; a build in which one stage fails and ends another."""


def vertex(digest, name, **more):
    return json.dumps({"vertexes": [{"digest": digest, "name": name, **more}]})


def log(digest, text, stream=1):
    data = base64.b64encode(text.encode()).decode()
    return json.dumps({"logs": [{"vertex": digest, "stream": stream, "data": data}]})


def watch():
    seen = []
    return Watch(log=io.StringIO(), on_change=lambda stage, what: seen.append((stage, what))), seen


def test_a_stage_is_timed_and_reported():
    w, seen = watch()
    w.feed(vertex("a", "[build-te 1/1] RUN x", started="2026-01-01T00:00:00.123456789Z"))
    w.feed(
        vertex(
            "a",
            "[build-te 1/1] RUN x",
            started="2026-01-01T00:00:00.123456789Z",
            completed="2026-01-01T00:00:09.123456789Z",
        )
    )
    (stage,) = w.times()
    assert (stage.name, stage.executed, round(stage.seconds)) == ("build-te", 1, 9)
    assert seen == [("build-te", "started"), ("build-te", "done")]


def test_a_cached_step_is_no_execution():
    w, seen = watch()
    w.feed(
        vertex("a", "[torch 3/3] RUN x", started="2026-01-01T00:00:00Z", completed="2026-01-01T00:00:00Z", cached=True)
    )
    assert [(s.executed, s.cached) for s in w.times()] == [(0, 1)]
    assert seen[-1] == ("torch", "cached")


class Kept(Details):
    """Keeps what a view would show."""

    def __init__(self):
        self.lines, self.amounts = [], []

    def line(self, stage, text):
        self.lines.append((stage, text))

    def amount(self, stage, amount):
        self.amounts.append((stage, amount.done, amount.total, amount.unit))


def replayed(name):
    """Feed a stream that BuildKit wrote; return the watch, the changes and the details."""
    changes, kept = [], Kept()
    w = Watch(log=io.StringIO(), on_change=lambda stage, what: changes.append((stage, what)), details=kept)
    for line in (RECORDED / name).read_text().splitlines():
        w.feed(line)
    return w, changes, kept


def test_a_stage_ends_with_its_last_step_and_once():
    """`lists` has seven steps, of which the first came from the cache and the others ran."""
    w, changes, _ = replayed("cpu.jsonl")
    w.ended(well=True)
    ends = [change for change in changes if change[1] != "started"]
    assert len({stage for stage, _ in ends}) == len(ends)
    assert ends.index(("lists", "done")) > 0
    assert [what for stage, what in changes if stage == "torch"] == ["started", "done"]
    assert ("runtime", "cached") in ends
    assert ends[-1] == ("export", "done")
    assert changes.index(("torch", "started")) < changes.index(("torch", "done")) < changes.index(("env", "started"))


def test_what_is_copied_to_the_builder_is_counted_in_bytes_and_is_no_stage():
    w, changes, kept = replayed("cpu.jsonl")
    copied = [done for stage, done, _, unit in kept.amounts if (stage, unit) == ("contexts", "bytes")]
    assert copied == sorted(copied)
    assert copied[-1] > 450_000_000
    assert [what for stage, what in changes if stage == "contexts"] == ["started", "done"]
    assert "contexts" not in w.stages


def test_the_export_says_which_step_it_is_at():
    _, _, kept = replayed("cpu.jsonl")
    lines = [text.partition(" sha256")[0] for stage, text in kept.lines if stage == "export"]
    assert lines[:2] == ["exporting layers", "rewriting layers"]
    assert lines[-1] == "sending tarball"


def test_a_failed_stage_is_failed_and_the_one_that_it_stopped_is_not():
    w, changes, kept = replayed("failed.jsonl")
    w.ended(well=False)
    assert [what for stage, what in changes if stage == "build-apex"] == ["started", "failed"]
    assert [what for stage, what in changes if stage == "build-te"] == ["started", "stopped"]
    assert w.failure()[0] == "build-apex"
    assert ("build-te", 13, 58, "steps") in kept.amounts
    assert kept.lines[-1] == ("build-te", "[13/58] Building CXX object te/x13.o")


def test_stages_of_an_interrupted_build_are_stopped():
    w, seen = watch()
    w.feed(vertex("a", "[torch 1/2] RUN x", started="2026-01-01T00:00:00Z"))
    w.ended(well=False)
    assert seen == [("torch", "started"), ("torch", "stopped")]


def test_the_export_of_a_wheel_is_not_the_export_of_the_image():
    w, seen = watch()
    w.exports = False
    w.feed(vertex("a", "exporting to client directory", started="2026-01-01T00:00:00Z"))
    w.feed(vertex("a", "exporting to client directory", completed="2026-01-01T00:00:01Z"))
    assert seen == []


def test_internal_steps_are_no_stages():
    w, _ = watch()
    w.feed(
        vertex(
            "a", "[internal] load build definition", started="2026-01-01T00:00:00Z", completed="2026-01-01T00:00:01Z"
        )
    )
    assert w.times() == []


@pytest.mark.parametrize(
    ("stage", "line", "unreached"),
    [
        ("runtime", "envbuild: no package lists from http://m.example/debian/InRelease  Unable to connect to m.example:80:", True),
        ("runtime", "envbuild: no package lists from http://m.example/debian/InRelease  503  Service Unavailable", True),
        ("runtime", "envbuild: no package lists from http://m.example/debian/InRelease  404  Not Found", False),
        ("torch", "  cause: error sending request for url (https://pypi.org/simple/torch/)", True),
        ("torch", "  cause: HTTP status server error (503 Service Unavailable) for url (https://pypi.org/simple/torch/)", True),
        ("torch", "  cause: HTTP status client error (429 Too Many Requests) for url (https://pypi.org/simple/torch/)", True),
        ("torch", "  cause: Failed to download distribution due to network timeout. Try increasing UV_HTTP_TIMEOUT", True),
        ("torch", "  cause: request or response body error", True),
        ("torch", "  cause: HTTP status client error (404 Not Found) for url (https://pypi.org/simple/torch/)", False),
        ("src-apex", "fatal: unable to access 'https://github.com/': The requested URL returned error: 503", True),
        ("base", "failed to resolve source metadata for docker.io/library/debian:12: dial tcp: lookup docker.io: no such host", True),
        ("build-te", "Could not resolve dependency", False),
        ("runtime", "E: Version '1' for 'zlib1g' was not found", False),
    ],
)  # fmt: skip
def test_a_stage_that_could_not_reach_a_host_differs_from_one_that_failed(stage, line, unreached):
    assert no_answer(stage, ["something before", line]) is unreached


def test_a_failure_names_the_stage_and_the_first_error_of_its_output():
    w, _ = watch()
    w.feed(vertex("a", "[build-apex 1/1] RUN x", started="2026-01-01T00:00:00Z"))
    w.feed(log("a", "compiling 1\ncsrc/x.cu(3): fatal error: cuda_profiler_api.h: No such file or directory\n"))
    w.feed(log("a", "\n".join(f"noise {i}" for i in range(50))))
    w.feed(
        vertex(
            "a",
            "[build-apex 1/1] RUN x",
            started="2026-01-01T00:00:00Z",
            completed="2026-01-01T00:00:01Z",
            error="exit code: 1",
        )
    )
    stage, lines = w.failure()
    assert stage == "build-apex"
    assert "cuda_profiler_api.h" in lines[0]
    assert lines[-1] == "noise 49"
    assert "[build-apex] compiling 1" in w.log.getvalue()


def test_a_line_that_is_no_event_is_kept():
    w, _ = watch()
    w.feed("ERROR: no such builder\n")
    assert w.failure() == ("", ["ERROR: no such builder"])


def test_a_line_that_comes_in_pieces_is_one_line():
    """apt writes a message's `E`, its colon and its text one by one, and the other stream's output comes between."""
    w, _ = watch()
    w.feed(vertex("a", "[runtime 1/1] RUN x", started="2026-01-01T00:00:00Z"))
    for piece, stream in (
        ("Working 10%\r", 1),
        ("E", 2),
        ("Reading", 1),
        (": Unable to", 2),
        (" lists...\n", 1),
        (" locate gcc\n", 2),
    ):
        w.feed(log("a", piece, stream))
    w.feed(log("a", "envbuild: and", 2))
    last = json.loads(log("a", " the last", 2))
    end = json.loads(vertex("a", "[runtime 1/1] RUN x", completed="2026-01-01T00:00:01Z", error="exit code: 100"))
    w.feed(json.dumps(end | last))  # in one event
    assert w.failure() == (
        "runtime",
        ["envbuild: and the last", "Working 10%", "Reading lists...", "E: Unable to locate gcc"],
    )
    assert (
        "[runtime] E: Unable to locate gcc\n[runtime] envbuild: and the last\n[runtime] ERROR exit code: 100\n"
        in w.log.getvalue()
    )


def test_output_that_never_ends_a_line_is_kept_in_parts():
    w, _ = watch()
    w.feed(vertex("a", "[torch 1/1] RUN x", started="2026-01-01T00:00:00Z"))
    for _ in range(200):
        w.feed(log("a", "#" * 100))
    assert w.log.getvalue().count("#") > 10_000


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "1",
        "null",
        '"text"',
        "[" * 100_000,
        '{"a":' * 50_000,
        "9" * 5000,
        '{"vertexes": 1, "logs": {"a": 1}}',
        '{"vertexes": [1, null, [], {}, {"digest": 5}, {"digest": ["a"], "name": {}}]}',
        '{"vertexes": [{"digest": "a", "name": ["x"], "started": 5, "completed": {}, "error": [1]}]}',
        '{"logs": [1, {}, {"vertex": []}, {"vertex": "a", "stream": {}, "data": "%%%"}, {"vertex": "a", "data": 5}]}',
        '{"vertexes": [{"digest": "a", "name": "[te 1/1] x", "started": "never", "completed": "later"}]}',
        '{"vertexes": [{"digest": "a", "name": "[te 1/1] x", "started": "2026-01-01", "completed": "2026-01-01T00:00:00Z"}]}',
        "\x00\x1b]0;title\x07",
        "\ud800",
    ],
    ids=lambda line: line[:20],
)
def test_a_line_of_any_kind_is_survived(line):
    w, _ = watch()
    w.feed(line + "\n")
    w.feed(vertex("b", "[torch 1/1] RUN x", started="2026-01-01T00:00:00Z"))
    w.feed(vertex("b", "[torch 1/1] RUN x", completed="2026-01-01T00:00:02Z"))
    assert any(stage.name == "torch" and stage.executed == 1 for stage in w.times())
    w.failure()


KEYS = ["vertexes", "logs", "digest", "name", "started", "completed", "cached", "error", "vertex", "stream", "data"]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["a", "[te 1/1] x", "x" * 9000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(), inner, max_size=5),
    max_leaves=10,
)


@given(st.lists(st.fixed_dictionaries({"vertexes": JSON | st.lists(JSON), "logs": JSON | st.lists(JSON)}) | JSON))
def test_events_of_any_shape_are_survived(events):
    w, _ = watch()
    for event in events:
        w.feed(json.dumps(event))
    w.failure()
    assert all(c.isprintable() or c in "\n\t" for c in w.log.getvalue())


def test_what_a_terminal_would_act_on_is_shown_as_its_escape():
    w, _ = watch()
    w.feed(vertex("a", "[torch 1/1] RUN x", started="2026-01-01T00:00:00Z"))
    w.feed(log("a", "\x1b[01;31m\x1b[Kred\x1b[m\x1b[K\tand \x1b]0;title\x07 \u202eback\n"))
    w.feed(vertex("a", "[torch 1/1] RUN x", completed="2026-01-01T00:00:01Z", error="exit \x1b[2J 1"))
    assert w.failure() == ("torch", ["red\tand \\x1b]0;title\\x07 \\u202eback"])
    assert "ERROR exit \\x1b[2J 1" in w.log.getvalue()
    assert "\x1b" not in w.log.getvalue()


def test_a_line_without_end_and_errors_without_number_are_bounded():
    w, _ = watch()
    w.feed("x" * 8_000_000)
    for number in range(1000):
        w.feed(f"ERROR: {number}\n")
    assert len(w.log.getvalue()) < 50_000
    assert len(w.errors) == 100


def test_a_login_that_a_step_prints_is_in_no_log():
    w, _ = watch()
    w.feed(vertex("a", "[torch 1/1] RUN x", started="2026-01-01T00:00:00Z"))
    w.feed(log("a", "error: https://me:secret@index.example.org/simple\n"))
    w.feed(vertex("a", "[torch 1/1] RUN x", completed="2026-01-01T00:00:01Z", error="http://token@proxy.example.org"))
    assert w.failure() == ("torch", ["error: https://***@index.example.org/simple"])
    assert "secret" not in w.log.getvalue()
    assert "token" not in w.log.getvalue()


STORED = 'exporter option "rewrite-timestamp" conflicts with "unpack"'


def exported(w, *, name="exporting to image", error=STORED):
    times = {"started": "2026-01-01T00:00:00Z", "completed": "2026-01-01T00:00:05Z"}
    w.feed(vertex("a", name, started=times["started"]))
    w.feed(vertex("a", name, error=error, **times))
    w.feed(f"ERROR: failed to build: failed to solve: {error}")


def test_an_image_that_is_stored_and_not_unpacked_is_no_failure():
    w, seen = watch()
    exported(w)
    assert (w.stored, w.failed, w.errors) == (True, None, [])
    assert [(s.name, s.seconds, s.executed) for s in w.times()] == [("export", 5, 1)]
    assert seen[-1] == ("export", "done")
    assert "ERROR" not in w.log.getvalue()


@pytest.mark.parametrize(
    "how", [{"error": "no space left on device"}, {"error": f"x {STORED}"}, {"name": "[env 1/1] RUN x"}]
)
def test_any_other_end_of_an_export_is_a_failure(how):
    w, _ = watch()
    exported(w, **how)
    assert not w.stored
    assert w.failed
    assert w.failure()[1]


CACHE_LINES = {
    "importing cache manifest from r:5000/c:x": (
        "r:5000/c:x: denied",
        "the build cache is not imported: r:5000/c:x: denied",
    ),
    "exporting cache to registry": (
        "error writing layer blob: \x1b[2Jx",
        "the build cache is not exported: error writing",
    ),
    "importing cache manifest from r:5000/c:y": ("failed to configure: r:5000/c:y: not found", None),
}


@pytest.mark.parametrize("name", CACHE_LINES)
def test_a_build_does_not_fail_of_a_cache_in_a_registry(name):
    error, why = CACHE_LINES[name]
    w, seen = watch()
    exported(w, name=name, error=error)
    w.errors.clear()  # the line of buildx itself, which a build that ends well does not print
    assert (w.failed, w.times(), seen) == (None, [], [])
    (*found,) = w.take_cache_errors()
    assert [text.startswith(why) for text in found] == ([True] if why else [])
    assert not any("\x1b" in text for text in found)
    assert w.take_cache_errors() == ()
    # what fails next is what the failure is about
    w.feed(vertex("b", "[env 1/1] RUN x", started="2026-01-01T00:00:00Z"))
    w.feed(vertex("b", "[env 1/1] RUN x", started="2026-01-01T00:00:00Z", error="exit code: 1"))
    assert w.failure()[0] == "env"
