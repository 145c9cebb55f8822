"""`envbuild matrix`: what it prints, as text and as JSON, and how it fails."""

import json

import pytest
from index_server import Index

from envbuild.cli import main
from envbuild.paths import data_dir


@pytest.fixture
def run(capsys):
    def call(*args):
        with pytest.raises(SystemExit) as caught:
            main(["matrix", *args])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return call


def answer(result):
    code, out, _ = result
    assert code == 0
    return json.loads(out)


def test_without_a_subcommand_it_lists_the_axes(run):
    code, out, err = run()
    assert code == 0
    assert err == ""
    assert out.splitlines()[0].split() == ["axis", "use", "releases", "what", "it", "is"]
    assert {line.split()[0] for line in out.splitlines()[1:] if line} >= {"torch", "te", "apex", "flash-attn-hopper"}
    assert answer(run("--json"))["matrix"].startswith("sha256:")
    assert answer(run("--json")) == answer(run("list", "--json"))


def test_an_axis_by_name_and_spec(run):
    code, out, _ = run("te", ">=2.6,<2.7")
    assert code == 0
    assert "2.6.0" in out
    assert "2.7.0" not in out
    releases = answer(run("gpu", "h100", "--json"))["releases"]
    assert [release["version"] for release in releases] == ["sm_90"]
    assert answer(run("--json", "gpu", "h100"))["releases"] == releases


@pytest.mark.parametrize("name", ["tourch", "packages", "stacks/alcf"])
def test_an_axis_that_does_not_exist(run, name):
    code, out, err = run(name)
    assert code == 2
    assert out == ""
    assert name in err


def test_a_spec_that_cannot_be_read(run):
    code, _, err = run("torch", "about two")
    assert code == 2
    assert "is not a version and not a PEP 440 specifier" in err


def test_rules_by_topic_and_axis(run):
    found = answer(run("rules", "--topic", "fa3-lookup", "--json"))["rules"]
    assert found
    assert {rule["topic"] for rule in found} == {"fa3-lookup"}
    assert all(rule["source"] and rule["why"] for rule in found)
    _, out, _ = run("rules", "--axis", "megatron", "--axis", "te", "--topic", "megatron-te")
    assert "mcore-te-0.14 (requires, megatron-te)" in out
    code, _, err = run("rules", "--topic", "moon-phase")
    assert code == 2
    assert "there is no topic 'moon-phase'" in err


def test_cells_are_listed_counted_and_filtered(run):
    found = answer(run("cells", "torch", "te", "--cuda", "12.6", "--te", "2.6", "--json"))
    assert found["count"] == len(found["cells"]) > 0
    assert {cell["te"] for cell in found["cells"]} == {"2.6.0"}
    assert all(cell["torch"].endswith("+cu126") for cell in found["cells"])
    _, out, _ = run("cells", "torch", "te", "--cuda", "12.6", "--te", "2.6", "--count")
    assert out.strip() == str(found["count"])


def test_check_prints_what_it_looked_at(run):
    code, out, _ = run("check")
    assert code == 0
    assert "0 errors, 0 warnings" in out


def test_check_reads_the_folder_that_is_named(run, tmp_path):
    """With the gaps of proposals that were written there, and one count of one."""
    copy = tmp_path / "matrices"
    copy.mkdir()
    for path in data_dir("matrices").glob("*.toml"):
        (copy / path.name).write_bytes(path.read_bytes())
    code, out, err = run("check", "--matrix", str(copy))
    assert (code, str(copy) in err) == (0, True)
    assert "0 errors, 0 warnings" in out
    with (copy / "te.toml").open("a") as file:
        file.write("# to fill in: commit\n")
    code, out, _ = run("check", "--matrix", str(copy))
    assert code == 2
    assert "te.toml:" in out
    assert ": 1 error, 0 warnings" in out
    assert run("check")[0] == 0
    assert run("check", "--matrix", str(tmp_path / "none"))[0] == 2


def test_schemas_are_listed_printed_and_written(run, tmp_path):
    assert set(answer(run("schema", "--json"))) == {"axis", "packages", "rules", "stack"}
    assert answer(run("schema", "rules"))["title"].startswith("Relations between axes")
    code, _, err = run("schema", "poem")
    assert code == 2
    assert "there is no schema 'poem'" in err
    assert run("schema", "--write", str(tmp_path))[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "axis.schema.json",
        "packages.schema.json",
        "rules.schema.json",
        "stack.schema.json",
    }


def test_update_of_an_axis_without_an_upstream(run):
    code, out, err = run("update", "gpu")
    assert code == 2
    assert out == ""
    assert "axes with one: apex" in err


def test_update_without_a_network_says_that_nothing_is_known(run, monkeypatch):
    monkeypatch.setenv("ENVBUILD_INDEX_URL", "http://127.0.0.1:9/simple")
    code, out, err = run("update", "deepspeed", "flash-attn")
    assert code == 8
    assert out == ""  # least of all that there is nothing new
    assert "nothing is known of new releases" in err
    assert "http://127.0.0.1:9/simple" in err


def test_update_says_who_was_asked_where_there_is_nothing_new(run, monkeypatch):
    index = Index()
    index.add("deepspeed", "0.5.1", ("deepspeed-0.5.1.tar.gz", b"x"))
    with index.served() as url:
        monkeypatch.setenv("ENVBUILD_INDEX_URL", url)
        assert run("update", "deepspeed") == (0, f"nothing new at {url}\n", "")
        found = answer(run("update", "deepspeed", "--json"))
    assert found == {"proposals": [], "asked": [url], "unreachable": []}


@pytest.mark.parametrize(("word", "near"), [("cudaa", "cuda"), ("CUDA", "cuda"), ("tourch", "torch")])
def test_a_mistyped_axis_gets_the_nearest(run, word, near):
    code, out, err = run(word)
    assert (code, out) == (2, "")
    assert f"no such axis '{word}', did you mean '{near}'?" in err
    assert "`envbuild matrix list` lists the axes" in err


def test_a_spec_that_matches_nothing_is_no_empty_table(run):
    code, out, err = run("torch", "99")
    assert (code, out) == (2, "")
    assert "no release of torch matches '99'" in err
    assert "where: envbuild matrix torch" in err


def test_a_spec_in_another_spelling(run):
    for args, version in ((("gpu", "H100"), "sm_90"), (("cuda", "CPU"), "cpu"), (("te", "2.6.*"), "2.6.0")):
        assert [each["version"] for each in answer(run(*args, "--json"))["releases"]] == [version]
