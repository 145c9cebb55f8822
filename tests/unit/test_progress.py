"""BuildKit's stream: stages, times, and the lines of a failure that matter."""

import base64
import io
import json

from envbuild.engine.progress import Watch


def vertex(digest, name, **more):
    return json.dumps({"vertexes": [{"digest": digest, "name": name, **more}]})


def log(digest, text, stream=1):
    data = base64.b64encode(text.encode()).decode()
    return json.dumps({"logs": [{"vertex": digest, "stream": stream, "data": data}]})


def watch():
    seen = []
    return Watch(log=io.StringIO(), on_change=lambda stage, what: seen.append((stage, what))), seen


def test_a_stage_is_timed_and_told():
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
        vertex("a", "[torch 2/3] RUN x", started="2026-01-01T00:00:00Z", completed="2026-01-01T00:00:00Z", cached=True)
    )
    assert [(s.executed, s.cached) for s in w.times()] == [(0, 1)]
    assert seen[-1] == ("torch", "cached")


def test_internal_steps_are_no_stages():
    w, _ = watch()
    w.feed(
        vertex(
            "a", "[internal] load build definition", started="2026-01-01T00:00:00Z", completed="2026-01-01T00:00:01Z"
        )
    )
    assert w.times() == []


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
