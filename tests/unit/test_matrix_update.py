"""Reading an index without downloading wheels, and proposing what is missing in the matrix; against an index on this machine."""

import datetime as dt
import subprocess
from pathlib import Path

import pytest
from git_server import git_server
from index_server import Index, wheel
from packaging.version import Version

from envbuild.components import COMPONENTS
from envbuild.curate import update
from envbuild.curate.proposals import Proposal, append, unfilled
from envbuild.curate.wheels import distributions, member, metadata_of, python_tags, uploads
from envbuild.errors import DataError, HostError, LockError, UsageError
from envbuild.matrix.load import load_matrix
from envbuild.settings import Settings

TORCH = (
    "cuda-toolkit[cudart,nvrtc]==13.0.2; platform_system == 'Linux'",
    "nvidia-cudnn-cu13==9.19.0.56; platform_system == 'Linux'",
    "nvidia-nccl-cu13==2.28.9; platform_system == 'Linux'",
    "setuptools<82",
    "opt-einsum>=3.3; extra == 'opt-einsum'",
)
EXTENSION = {"torch/utils/cpp_extension.py": "flags = ['-std=c++20']\n"}
MANYLINUX = "manylinux_2_28_x86_64"

AXIS = """
[axis]
name = "{name}"
title = "{name}"
about = "."
scheme = "{scheme}"
use = "{use}"
"""


def torch_wheels(version, requires=TORCH):
    return [
        wheel("torch", version, f"cp{minor}-cp{minor}-{MANYLINUX}", requires, ">=3.10", EXTENSION)
        for minor in (311, 312)
    ] + [wheel("torch", version, f"cp313-cp313t-{MANYLINUX}", requires, ">=3.10", EXTENSION)]


@pytest.fixture
def matrix_folder(tmp_path):
    def write(axis, *versions, scheme="pep440", use="always", facts=""):
        blocks = [
            f'[[release]]\nversion = "{v}"\nsource = "PyPI:x=={v}"\n' + (f"facts = {facts}\n" if facts else "")
            for v in versions
        ]
        (folder / f"{axis}.toml").write_text("\n".join([AXIS.format(name=axis, scheme=scheme, use=use), *blocks]))

    folder = tmp_path / "matrices"
    folder.mkdir()
    write("cuda", "12.6", "13.0")
    write("cudnn", "9.10.2.21", use="derived")
    write("nccl", "2.27.3", use="derived")
    write("torch", "2.8.0+cu126", "2.10.0+cu128", facts='{ index = "pypi" }')
    write("te", "2.6.0", facts='{ pypi = "2.6.0.post1" }')
    write("apex", "25.08", facts='{ build = "config-settings" }')
    write("nvcc", "13.0.2", use="derived", facts='{ archs = ["75", "90"], pypi = "13.0.2" }')
    write("flash-attn", "2.8.3", facts='{ pypi = "2.8.3" }')
    write("megatron", "0.19.0", facts='{ pypi = "0.19.0" }')
    write("deepspeed", "0.19.7")
    return folder


@pytest.fixture
def index():
    index = Index()
    index.add("torch", "1.0.0", *torch_wheels("1.0.0"))
    index.add("torch", "2.8.0", *torch_wheels("2.8.0"))
    index.add("torch", "2.11.0", *torch_wheels("2.11.0"), day="2026-03-23")
    index.add("torch", "2.12.0rc1", *torch_wheels("2.12.0rc1"))
    return index


def settings(url):
    return Settings(index_url=url, cache_dir=Path("/nowhere"))


@pytest.mark.parametrize("html", [False, True])
@pytest.mark.parametrize("sidecars", [False, True])
def test_metadata_comes_from_next_to_a_wheel_or_from_within(index, html, sidecars):
    index.html, index.sidecars = html, sidecars
    with index.served() as url:
        found = distributions(settings(url), "torch")
        assert [str(v) for v in found] == ["1.0.0", "2.8.0", "2.11.0"]
        newest = found[Version("2.11.0")]
        assert python_tags(newest) == {"3.11", "3.12"}
        assert newest.date == (None if html else dt.date(2026, 3, 23))
        metadata = metadata_of(settings(url), newest.wheels[0])
        assert metadata.pin("nvidia-cudnn-cu") == "9.19.0.56"
        assert metadata.pin("cuda-toolkit") == "13.0.2"
        assert metadata.requires_python == ">=3.10"
        assert "opt-einsum" not in {requirement.name for requirement in metadata.requires}
        assert "c++20" in member(settings(url), newest.wheels[0], "cpp_extension.py")
    assert index.bytes_sent < 300_000  # of wheels of 300 kB each


def test_an_index_without_ranges_is_reported(index):
    index.sidecars = index.ranges = False
    with index.served() as url:
        newest = distributions(settings(url), "torch")[Version("2.11.0")]
        with pytest.raises(LockError, match="does not answer range requests"):
            metadata_of(settings(url), newest.wheels[0])


def test_days_and_yanks_come_from_the_json_api(index):
    index.add("torch", "2.9.0", *torch_wheels("2.9.0"), day="2025-10-15", yanked=True)
    with index.served() as url:
        days = uploads(settings(url), "torch")
    assert days[Version("2.9.0")].yanked
    assert days[Version("2.11.0")].day == dt.date(2026, 3, 23)


def propose(folder, url, *axes):
    return update.propose(load_matrix(folder), axes, settings(url))


@pytest.mark.parametrize("html", [False, True])
def test_a_new_torch_is_proposed_from_its_metadata(index, matrix_folder, html):
    index.html = html
    with index.served() as url:
        (proposal,) = propose(matrix_folder, url, "torch").found
    text = proposal.toml()
    assert proposal.version == "2.11.0+cu130"
    for line in (
        'version = "2.11.0+cu130"',
        "date = 2026-03-23",
        'needs = { cuda = "13.0" }',
        'fixes = { cudnn = "9.19.0.56", nccl = "2.28.9" }',
        'facts = { index = "pypi", toolkit = "13.0.2", manylinux = "manylinux_2_28", cxx_standard = 20 }',
        "# to fill in: facts.archs",
        "# metadata: wheels for Python 3.11, 3.12",
        "# metadata: requires setuptools<82",
    ):
        assert line in text, text


def test_cudnn_and_nccl_follow_from_new_torch_builds(index, matrix_folder):
    with index.served() as url:
        found = propose(matrix_folder, url, "cudnn", "nccl").found
    assert [(p.axis, p.version) for p in found] == [("cudnn", "9.19.0.56"), ("nccl", "2.28.9")]


def test_what_is_listed_yanked_or_rebuilt_is_not_news(index, matrix_folder):
    index.add("torch", "2.12.0", *torch_wheels("2.12.0"), yanked=True)
    none = "py3-none-any"
    for version in ("2.6.0", "2.6.0.post1", "2.7.0"):
        index.add("transformer-engine", version, wheel("transformer-engine", version, none, (), ">=3.8"))
    for core in ("cu12", "cu13"):
        name = f"transformer-engine-{core}"
        index.add(name, "2.7.0", wheel(name, "2.7.0", f"py3-none-{MANYLINUX}"))
    with index.served() as url:
        found = propose(matrix_folder, url, "torch", "te").found
    assert [(p.axis, p.version) for p in found] == [("torch", "2.11.0+cu130"), ("te", "2.7.0")]
    assert found[1].release["facts"]["core"] == {"12": "transformer-engine-cu12", "13": "transformer-engine-cu13"}


def test_the_rest_of_the_axes(index, matrix_folder):
    none = "py3-none-any"
    index.add("flash-attn", "2.8.4", ("flash_attn-2.8.4.tar.gz", b"x"))
    index.add("flash-attn", "2.5.5", ("flash_attn-2.5.5.tar.gz", b"x"))
    index.add("megatron-core", "0.19.2", wheel("megatron-core", "0.19.2", none, ["torch>=2.6.0"], ">=3.12"))
    index.add("deepspeed", "0.19.8", ("deepspeed-0.19.8.tar.gz", b"x"))
    index.add("cuda-toolkit", "12.9.2", wheel("cuda-toolkit", "12.9.2", none))
    index.add("cuda-toolkit", "13.0.3", wheel("cuda-toolkit", "13.0.3", none))
    index.add("nvidia-cuda-nvcc", "13.0.88", wheel("nvidia-cuda-nvcc", "13.0.88", f"py3-none-{MANYLINUX}"))
    with index.served() as url:
        found = propose(matrix_folder, url, "flash-attn", "megatron", "deepspeed", "nvcc").found
    by_axis = {p.axis: p for p in found}
    assert {axis: p.version for axis, p in by_axis.items()} == {
        "flash-attn": "2.8.4",
        "megatron": "0.19.2",
        "deepspeed": "0.19.8",
        "nvcc": "13.0.3",
    }
    assert "Requires-Python >=3.12" in by_axis["megatron"].remarks
    assert "requires torch>=2.6.0" in by_axis["megatron"].remarks
    assert 'archs = ["75", "90"]' in by_axis["nvcc"].toml()
    assert any("copied from 13.0.2" in text for text in by_axis["nvcc"].to_fill_in)


def test_proposals_are_appended_below_what_is_there(index, matrix_folder):
    before = (matrix_folder / "torch.toml").read_text()
    with index.served() as url:
        found = propose(matrix_folder, url, "torch", "cudnn", "nccl").found
    append(matrix_folder, found)
    after = (matrix_folder / "torch.toml").read_text()
    assert after.startswith(before.rstrip("\n"))
    other = matrix_folder.rename(matrix_folder.parent / "completed")
    assert load_matrix(other).has("torch", "2.11.0+cu130")
    assert load_matrix(other).has("cudnn", "9.19.0.56")


def test_what_a_proposal_left_to_fill_in_is_an_error_until_it_is_removed(matrix_folder):
    assert list(unfilled(matrix_folder)) == []
    path = matrix_folder / "te.toml"
    whole = path.read_text()
    gap = Proposal(axis="te", version="9.9.9", release={"version": "9.9.9"}, to_fill_in=("the commit of the tag",))
    append(matrix_folder, [gap])
    (found,) = unfilled(matrix_folder)
    line = path.read_text().splitlines().index("# to fill in: the commit of the tag") + 1
    assert (found.level, found.where) == ("error", f"te.toml:{line}")
    assert "the commit of the tag" in found.text
    path.write_text(whole)
    assert list(unfilled(matrix_folder)) == []


def test_an_appended_proposal_is_not_appended_again(index, matrix_folder):
    with index.served() as url:
        found = propose(matrix_folder, url, "torch").found
    append(matrix_folder, found)
    kept = (matrix_folder / "torch.toml").read_text()
    with pytest.raises(DataError, match="listed already"):
        append(matrix_folder, found)
    assert (matrix_folder / "torch.toml").read_text() == kept


@pytest.mark.parametrize("axis", [axis for axis, c in COMPONENTS.items() if c.upstream.distribution])
def test_every_component_on_an_index_can_be_asked(axis):
    assert axis in update._AXES


def test_a_component_is_asked_by_what_it_says_of_its_upstream_and_may_keep_rules_above(index, matrix_folder):
    path = matrix_folder / "grouped-gemm.toml"
    rule = '[[rule]]\nid = "r"\nkind = "requires"\ntopic = "t"\nwhen = { grouped-gemm = "any" }\nwith = ["cuda"]\nwhy = "w"\nsource = "PyPI:x==1"\n'
    release = '[[release]]\nversion = "1.1.4"\nsource = "PyPI:x==1"\n'
    path.write_text(f"{AXIS.format(name='grouped-gemm', scheme='pep440', use='asked')}\n{rule}\n{release}")
    for version in ("1.1.2", "1.1.5"):
        index.add("nv-grouped-gemm", version, (f"nv_grouped_gemm-{version}.tar.gz", b"x"), day="2026-10-01")
    with index.served() as url:
        (found,) = propose(matrix_folder, url, "grouped-gemm").found
    assert found.release["source"] == "PyPI:nv-grouped-gemm==1.1.5"
    assert found.to_fill_in == COMPONENTS["grouped-gemm"].upstream.to_fill_in
    append(matrix_folder, [found])
    grown = load_matrix(matrix_folder.rename(matrix_folder.parent / "grown"))
    assert [r.version for r in grown.releases["grouped-gemm"]] == ["1.1.4", "1.1.5"]
    assert [r.id for r in grown.rules] == ["r"]


def test_a_matrix_without_a_components_axis_is_asked_for_the_rest(index, matrix_folder):
    for path in matrix_folder.glob("*.toml"):
        if path.stem not in {"cuda", "deepspeed"}:
            path.unlink()
    index.add("deepspeed", "0.19.8", ("deepspeed-0.19.8.tar.gz", b"x"))
    with index.served() as url:
        assert [p.version for p in propose(matrix_folder, url).found] == ["0.19.8"]


def test_a_person_who_keeps_rules_below_is_not_overwritten(index, matrix_folder):
    path = matrix_folder / "torch.toml"
    with index.served() as url:
        found = propose(matrix_folder, url, "torch").found
    kept = path.read_text() + "\n[[rule]]\n"
    path.write_text(kept)
    with pytest.raises(DataError, match="cannot be appended"):
        append(matrix_folder, found)
    assert path.read_text() == kept


def test_tags_are_read_and_a_git_host_out_of_reach_is_remarked(matrix_folder, monkeypatch, tmp_path):
    upstream = tmp_path / "apex"
    git = ("git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(upstream))
    subprocess.run(["git", "init", "-q", str(upstream)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    subprocess.run([*git, "tag", "-a", "-m", "x", "25.10"], check=True)
    subprocess.run([*git, "tag", "25.08"], check=True)
    subprocess.run([*git, "tag", "v1"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()

    with git_server(tmp_path, tmp_path / "private") as served:
        asking = Settings(
            index_url="http://127.0.0.1:9/simple",
            cache_dir=tmp_path,
            ca_bundle=served.certificate,
            no_proxy="127.0.0.1",
        )
        monkeypatch.setattr(update, "APEX_REPOSITORY", f"{served.url}/apex/.git")
        proposals = update.propose(load_matrix(matrix_folder), ("apex",), asking)
        assert [(p.version, p.release["commit"]) for p in proposals.found] == [("25.10", commit)]
        assert (proposals.asked, proposals.unreachable) == ((f"{served.url}/apex/.git",), ())
        for away in (f"{served.url}/nowhere/.git", str(upstream)):  # a folder is no upstream
            monkeypatch.setattr(update, "APEX_REPOSITORY", away)
            with pytest.raises(HostError, match="nothing is known of new releases") as error:
                update.propose(load_matrix(matrix_folder), ("apex",), asking)
            assert away in str(error.value)


def test_an_axis_without_an_upstream(matrix_folder):
    with pytest.raises(UsageError, match="no upstream to ask"):
        propose(matrix_folder, "http://127.0.0.1:9/simple", "cuda")


WHL = "https://download.pytorch.org/whl"
CU12 = (
    "nvidia-cuda-runtime-cu12==12.6.77; platform_system == 'Linux'",
    "nvidia-cudnn-cu12==9.10.2.21; platform_system == 'Linux'",
    "nvidia-nccl-cu12==2.29.3; platform_system == 'Linux'",
)


@pytest.fixture
def with_variants(matrix_folder, index):
    """A matrix that names three indexes of PyTorch, and those indexes with a torch that it does not list."""
    facts = {
        "2.8.0+cpu": f"{WHL}/cpu",
        "2.8.0+cu126": f"{WHL}/cu126",
        "2.10.0+cu128": "pypi",
        "2.10.0+cu130": f"{WHL}/cu130",
    }
    blocks = [
        f'[[release]]\nversion = "{v}"\nsource = "PyPI:x=={v}"\nfacts = {{ index = "{i}" }}\n' for v, i in facts.items()
    ]
    image = '[[release]]\nversion = "1.5.0a0+8f84ded"\nsource = "NGC:x:20.03"\nfacts = { index = "base" }\n'
    text = AXIS.format(name="torch", scheme="pep440", use="always")
    (matrix_folder / "torch.toml").write_text("\n".join([text, image, *blocks]))
    cuda = AXIS.format(name="cuda", scheme="pep440", use="always")
    releases = (f'[[release]]\nversion = "{v}"\nsource = "PyPI:x=={v}"\n' for v in ("12.6", "13.0", "13.2", "13.4"))
    (matrix_folder / "cuda.toml").write_text("\n".join([cuda, *releases]))
    for label, requires in (("cu126", CU12), ("cpu", ()), ("cu130", TORCH), ("cu132", TORCH)):
        for version in ("1.4.0", "2.8.0", "2.11.0"):
            local = f"{version}+{label}"
            index.add("torch", local, *torch_wheels(local, requires), at=label)
    index.add("torch", "2.11.0+cu126.with.pypi.cudnn", *torch_wheels("2.11.0+cu126.with.pypi.cudnn"), at="cu126")
    return matrix_folder


def ask(folder, url, *axes, torch_index=None):
    root = url.removesuffix("/simple")
    asking = Settings(index_url=url, torch_index=torch_index or f"{root}/whl", cache_dir=Path("/nowhere"))
    return update.propose(load_matrix(folder), axes, asking)


@pytest.mark.parametrize("html", [False, True])
def test_every_variants_index_is_asked_for_torch(index, with_variants, html):
    """Those that the matrix names, and CUDA 13.2's, which it lists and names no torch of; CUDA 13.4 has none."""
    index.html = html
    with index.served() as url:
        proposals = ask(with_variants, url, "torch")
    assert {p.version for p in proposals.found} == {
        "2.11.0+cu126", "2.11.0+cpu", "2.8.0+cu130", "2.11.0+cu130", "2.8.0+cu132", "2.11.0+cu132",
    }  # fmt: skip
    assert {path for path in index.asked if path.startswith("/whl/")} == {
        f"/whl/{label}/torch/" for label in ("cpu", "cu126", "cu130", "cu132", "cu134")
    }
    root = url.removesuffix("/simple")
    assert set(proposals.asked) == {url, *(f"{root}/whl/{x}" for x in ("cpu", "cu126", "cu130", "cu132", "cu134"))}
    text = next(p for p in proposals.found if p.version == "2.11.0+cu126").toml()
    for line in (
        'version = "2.11.0+cu126"',
        f'source = "{WHL}/cu126/torch/"',
        "date = 2026-",
        'needs = { cuda = "12.6" }',
        'fixes = { cudnn = "9.10.2.21", nccl = "2.29.3" }',
        f'facts = {{ index = "{WHL}/cu126", manylinux = "manylinux_2_28", cxx_standard = 20 }}',
    ):
        assert line in text, text
    cpu = next(p for p in proposals.found if p.version == "2.11.0+cpu")
    assert cpu.release["needs"] == {"cuda": "cpu"}
    assert cpu.to_fill_in == ()


def test_cudnn_and_nccl_follow_from_variants_too(index, with_variants):
    with index.served() as url:
        found = ask(with_variants, url, "cudnn", "nccl").found
    assert {(p.axis, p.version) for p in found} == {("cudnn", "9.19.0.56"), ("nccl", "2.28.9"), ("nccl", "2.29.3")}


def test_an_index_that_does_not_answer_is_listed_and_the_others_are_asked(index, with_variants):
    with index.served() as url:
        index.add("deepspeed", "0.19.8", ("deepspeed-0.19.8.tar.gz", b"x"))
        proposals = ask(with_variants, url, "torch", "deepspeed", torch_index="http://127.0.0.1:9/whl")
    assert [p.version for p in proposals.found] == ["2.11.0+cu130", "0.19.8"]  # PyPI's own
    assert proposals.asked == (url,)
    assert set(proposals.unreachable) == {
        f"http://127.0.0.1:9/whl/{label}" for label in ("cpu", "cu126", "cu130", "cu132", "cu134")
    }


def test_an_axis_of_betas_alone_is_asked_for_betas(index, matrix_folder):
    text = AXIS.format(name="flash-attn-4", scheme="pep440", use="asked")
    release = '[[release]]\nversion = "4.0.0b11"\nsource = "PyPI:flash-attn-4==4.0.0b11"\n'
    (matrix_folder / "flash-attn-4.toml").write_text(f"{text}\n{release}")
    for version in ("4.0.0b8", "4.0.0b11", "4.0.0b37"):
        index.add("flash-attn-4", version, wheel("flash-attn-4", version, "py3-none-any"))
    with index.served() as url:
        assert [p.version for p in propose(matrix_folder, url, "flash-attn-4", "torch").found] == [
            "4.0.0b37",
            "2.11.0+cu130",  # and no 2.12.0rc1
        ]


def test_offline_it_says_that_nobody_was_asked(matrix_folder):
    nowhere = "http://127.0.0.1:9/simple"
    with pytest.raises(HostError, match="nothing is known of new releases") as error:
        propose(matrix_folder, nowhere, "torch", "flash-attn", "deepspeed")
    assert str(error.value).count("http://127.0.0.1:9/simple") == 1  # and it is not tried again for each axis


def test_an_index_out_of_reach(matrix_folder):
    with pytest.raises(HostError, match="no upstream can be reached"):
        propose(matrix_folder, "http://127.0.0.1:9/simple", "torch")
