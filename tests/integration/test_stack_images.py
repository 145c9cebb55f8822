"""The stacks' own images, from the lock to five steps of training, with what is out of reach here replaced.

Their own cells and Dockerfiles. `--build-context` puts roots of Ubuntu as it was released in the place of nvidia/cuda and NGC,
Debian's CUDA as /usr/local/cuda in them: 11.8 under llm-jp and alcf, 12.4 that states 12.6 under megatron-gpt3 and llama3-70b; under gpt2-3d
Python 3.8 and a torch. The torches are PyPI's of the same release (2.0.1 for CUDA 11.7, 2.8.0 for 12.8, 1.8.0 for 10.2), which state the
cell's build instead; no GPU runs them here. llama3-70b's flash-attention 3 compiles the kernels of two head dimensions alone, with
Debian's nvcc 12.4 and PyPI's ptxas 12.8.93 in the archives that its setup.py looks for, and its Open MPI is Debian's 5.0.7, which states 5.0.5.
alcf's flash-attention 2 compiles for the stack's own GPU alone, and its ambivalent is PyPI's 0.3.0.

Needs the sources of apex and the repositories, from GitHub or under the setting `sources`.
"""

import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

import pytest
from root_support import build_image, debian_tar, ubuntu_root

from envbuild.settings import load_settings

pytestmark = [pytest.mark.full, pytest.mark.timeout(10800), pytest.mark.usefixtures("room")]

# What NVIDIA's images hold besides their own packages.
HELD = ("build-essential", "curl", "gnupg2")

# Debian spreads the toolkit over /usr; NVIDIA's images have one tree. As a package, since the audit weighs what no package accounts for.
CUDA = r"""FROM scratch AS debian
ADD rootfs.tar /
RUN sed -i 's/ main$/ main contrib non-free/' /etc/apt/sources.list && apt-get -q update \
 && DEBIAN_FRONTEND=noninteractive apt-get -qy --no-install-recommends install nvidia-cuda-toolkit
COPY --chmod=755 collect /collect
ARG STATED
RUN /collect $STATED
FROM scratch
COPY --from=debian /cuda.deb /
"""
COLLECT = r"""#!/bin/sh
set -eu
stated=$1
tree=/package/usr/local/cuda own=/usr/lib/nvidia-cuda-toolkit libraries=/usr/lib/x86_64-linux-gnu
mkdir -p $tree/bin $tree/include $tree/lib64/stubs $tree/nvvm /package/DEBIAN
names=$(dpkg-query -W -f '${Package} ${source:Package}\n' | awk '$2 ~ /^(nvidia-cuda-toolkit|libcudacxx|cub|libthrust|cccl)$/ {print $1}')
dpkg -L $names | sort -u | while read -r file; do
    if [ -d "$file" ]; then continue; fi
    case $file in
    /usr/include/*)
        place=$tree/include/${file#/usr/include/}
        mkdir -p "${place%/*}"
        cp -P "$file" "$place"
        ;;
    $libraries/stubs/*) cp -L "$file" $tree/lib64/stubs/ ;;
    $libraries/libcudart_static.a | $libraries/libcudadevrt.a) cp "$file" $tree/lib64/ ;;
    $libraries/lib*.so*) cp -P "$file" $tree/lib64/ ;;
    esac
done
for program in ptxas fatbinary cudafe++ bin2c nvlink cuobjdump nvdisasm nvprune; do cp -L /usr/bin/$program $tree/bin/; done
cp -r $own/bin/nvcc $own/bin/cicc $own/bin/crt $tree/bin/
cp -r $own/libdevice $tree/nvvm/
cat >$tree/bin/nvcc.profile <<'PROFILE'
TOP              = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH            += $(_HERE_):
INCLUDES        += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES       =+ $(_SPACE_) "-L$(TOP)/lib64/stubs" "-L$(TOP)/lib64"
PROFILE
# A compiler that is not the cell's says that it is, since apex asks; it compiles as it always does.
its=$($own/bin/nvcc --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
if [ "$its" != "$stated" ]; then
    mv $tree/bin/nvcc $tree/bin/nvcc-$its
    cat >$tree/bin/nvcc <<NVCC
#!/bin/sh
case \$* in
-V | --version) exec /usr/local/cuda/bin/nvcc-$its --version | sed 's/\\(release \|cuda_\)$its/\\1$stated/' ;;
esac
exec /usr/local/cuda/bin/nvcc-$its "\$@"
NVCC
    chmod 755 $tree/bin/nvcc
fi
cat >/package/DEBIAN/control <<CONTROL
Package: cuda-toolkit
Version: $stated
Architecture: amd64
Maintainer: nobody
Installed-Size: $(du -s -k $tree | cut -f1)
Description: Debian's CUDA packages as one tree
CONTROL
dpkg-deb -Z none --build /package /cuda.deb
"""


def run(*command: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == expect, done.stdout[-3000:] + done.stderr[-5000:]
    return done


def torch_wheel(folder: Path, requirement: str, python: str, version: str, cuda: str, platform: str = "1") -> Path:
    """PyPI's wheel of torch or torchvision, stating another version and CUDA."""
    (folder / "from").mkdir(exist_ok=True)
    options = [
        "--no-deps",
        "--only-binary=:all:",
        f"--python-version={python}",
        f"--platform=manylinux{platform}_x86_64",
    ]
    run(sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", folder / "from", requirement)
    (wheel,) = (folder / "from").iterdir()
    name, old, tags = wheel.name.split("-", 2)
    stated = {"__version__": version, "cuda": cuda}
    made = folder / f"{name}-{version}-{tags}"
    with zipfile.ZipFile(wheel) as held, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as out:
        paths = [
            path.replace(f"{name}-{old}.dist-info/", f"{name}-{version}.dist-info/", 1) for path in held.namelist()
        ]
        for item, path in zip(held.infolist(), paths, strict=True):
            data = held.read(item)
            item.filename = path
            if item.filename.endswith(".dist-info/METADATA"):
                data = data.replace(f"\nVersion: {old}\n".encode(), f"\nVersion: {version}\n".encode(), 1)
            elif item.filename == f"{name}/version.py":
                text = data.decode()
                for variable, value in stated.items():
                    text = re.sub(rf"(?m)^({variable}(: .*)?) = '.*'$", rf"\1 = {value!r}", text)
                data = text.encode()
            elif item.filename.endswith(".dist-info/RECORD"):
                data = "".join(f"{each},,\n" for each in paths if not each.endswith("/")).encode()
            out.writestr(item, data)
    wheel.unlink()
    return made


def sdist(requirement: str) -> tarfile.TarFile:
    """Open PyPI's source archive of this release; pip would run its setup.py to download it."""
    name, version = requirement.split("==")
    index = urllib.request.Request(
        f"https://pypi.org/simple/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(index) as answer:
        files = json.load(answer)["files"]
    (file,) = [f for f in files if f["filename"] == f"{name.replace('-', '_')}-{version}.tar.gz"]
    with urllib.request.urlopen(urllib.parse.urljoin(index.full_url, file["url"])) as answer:
        data = answer.read()
    assert hashlib.sha256(data).hexdigest() == file["hashes"]["sha256"]
    return tarfile.open(fileobj=io.BytesIO(data))


def locked(stack: str, folder: Path, *replaced: str) -> Path:
    """Lock the stack where only its base images and the sources named are out of reach; a machine where more is missing skips."""
    command = [sys.executable, "-m", "envbuild", "lock", "--stack", stack, "--out", folder / "lock"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    missing = [line.strip() for line in done.stderr.splitlines() if line.startswith("  - ")]
    known = ("- digest of ", *(f"- source tree of {name} " for name in replaced))
    others = [line for line in missing if not line.startswith(known)]
    if others:
        pytest.skip("; ".join(others))
    assert done.returncode in {0, 8}, done.stderr
    return folder / "lock"


def cuda_image(folder: Path, suite: str, stated: str, ubuntu: str) -> str:
    """Make an image of `ubuntu` with the CUDA of a Debian suite, which states another version where it must; return its tag."""
    debian, made = folder / "debian", folder / "cuda"
    debian.mkdir()
    debian_tar(suite, debian, epoch=0)
    (debian / "Dockerfile").write_text(CUDA)
    (debian / "collect").write_text(COLLECT)
    options = ["--quiet", f"--build-arg=STATED={stated}", f"--output=type=local,dest={made}"]
    run("docker", "buildx", "build", *options, debian)
    (debian / "rootfs.tar").unlink()
    with ubuntu_root(ubuntu, folder / "root", HELD) as root:
        (made / "Dockerfile").write_text(f"FROM {root}\nRUN --mount=type=bind,target=/in dpkg -i /in/cuda.deb\n")
        base = build_image(made, f"envbuild-test:{ubuntu}-cuda{stated}")
    (made / "cuda.deb").unlink()
    return base


def open_mpi(folder: Path) -> Path:
    """Make a folder with Debian's source of Open MPI 5.0.7, which states 5.0.5."""
    folder.mkdir()
    url = "http://deb.debian.org/debian/pool/main/o/openmpi/openmpi_5.0.7.orig.tar.xz"
    with urllib.request.urlopen(url) as answer:
        held = io.BytesIO(answer.read())
    with tarfile.open(fileobj=held) as source, tarfile.open(folder / "openmpi-5.0.5.tar.gz", "w:gz") as made:
        for member in source:
            content = source.extractfile(member) if member.isreg() else None
            if content is not None and member.name.count("/") == 1 and member.name.endswith("/VERSION"):
                text = content.read().replace(b"\nrelease=7\n", b"\nrelease=5\n")
                assert b"\nrelease=5\n" in text
                content = io.BytesIO(text)
            made.addfile(member, content)
    return folder


def small_fa3(lock: Path, folder: Path) -> Path:
    """Make flash-attention's tree of the lock, whose setup.py leaves out all but BF16 at head dimensions 64 and 128."""
    (source,) = [s for s in json.loads((lock / "lock.json").read_text())["sources"] if s["name"] == "flash-attn-hopper"]
    (cutlass,) = [s for s in source["submodules"] if s["path"] == "csrc/cutlass"]
    objects = load_settings().cache_dir / "git" / "objects.git"
    parts = ((source["commit"], "", ("hopper", "README.md")), (cutlass["commit"], cutlass["path"], ("include",)))
    for commit, place, inside in parts:
        packed = subprocess.run(
            ["git", f"--git-dir={objects}", "archive", commit, *inside], check=True, capture_output=True
        )
        (folder / place).mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
            tar.extractall(folder / place, filter="data")
    setup = folder / "hopper" / "setup.py"
    text = setup.read_text()
    for feature in ("APPENDKV", "CLUSTER", "FP16", "FP8", "HDIM192", "HDIM256", "HDIM96", "LOCAL", "PACKGQA", "PAGEDKV", "SOFTCAP", "SPLIT", "VARLEN"):  # fmt: skip
        asks = f'os.getenv("FLASH_ATTENTION_DISABLE_{feature}", "FALSE")'
        assert asks in text
        text = text.replace(asks, asks.replace("FALSE", "TRUE"))
    setup.write_text(text)
    return folder


def fa2_for_sm80(folder: Path) -> Path:
    """Make a folder with PyPI's source of flash-attention 2.0.9, which compiles for sm_80 and not for sm_90 besides."""
    folder.mkdir()
    hopper = """    if bare_metal_version >= Version("11.8"):
        cc_flag.append("-gencode")
        cc_flag.append("arch=compute_90,code=sm_90")
"""
    with sdist("flash-attn==2.0.9") as source, tarfile.open(folder / "flash_attn-2.0.9.tar.gz", "w:gz") as made:
        for member in source:
            content = source.extractfile(member) if member.isreg() else None
            if content is not None and member.name == "flash_attn-2.0.9/setup.py":
                text = content.read().decode()
                assert hopper in text
                changed = text.replace(hopper, "").encode()
                member.size, content = len(changed), io.BytesIO(changed)
            made.addfile(member, content)
    return folder


def fetched_by_fa3(devel: str, folder: Path) -> dict[str, Path]:
    """Make what FA3's setup.py would download: nvcc with what is next to it, and ptxas with the compiler behind nvcc."""
    toolkit, wheel = folder / "toolkit", folder / "wheel"
    toolkit.mkdir(parents=True)
    packed = subprocess.run(
        ["docker", "run", "--rm", devel, "tar", "-c", "-C", "/usr/local/cuda", "bin"], check=True, capture_output=True
    )
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
        tar.extractall(toolkit, filter="fully_trusted")
    (own,) = toolkit.glob("bin/nvcc-*")
    own.replace(toolkit / "bin" / "nvcc")  # past the wrapper that states another version
    profile = toolkit / "bin" / "nvcc.profile"
    here = "TOP              = $(_HERE_)/..\n"
    assert here in profile.read_text()
    profile.write_text(
        profile.read_text().replace(
            here, "TOP              = /usr/local/cuda\nCICC_PATH        = $(_HERE_)/../nvvm/bin\n"
        )
    )
    options = ["--quiet", "--no-deps", "--dest", wheel, "nvidia-cuda-nvcc-cu12==12.8.93"]
    run(sys.executable, "-m", "pip", "download", *options)
    (file,) = wheel.iterdir()
    with zipfile.ZipFile(file) as held:
        ptxas = held.read("nvidia/cuda_nvcc/bin/ptxas")
    made = {name: folder / name for name in ("nvcc", "ptxas")}
    for name, version in (("nvcc", "12.6.85"), ("ptxas", "12.8.93")):
        made[name].mkdir()
        top = f"cuda_nvcc-linux-x86_64-{version}-archive"
        with tarfile.open(made[name] / f"{top}.tar.xz", "w:xz", preset=0) as tar:
            if name == "nvcc":
                for each in sorted((toolkit / "bin").iterdir()):
                    if each.name not in {"cicc", "ptxas"}:
                        tar.add(each, f"{top}/bin/{each.name}")
                continue
            entry = tarfile.TarInfo(f"{top}/bin/ptxas")
            entry.size, entry.mode = len(ptxas), 0o755
            tar.addfile(entry, io.BytesIO(ptxas))
            tar.add(toolkit / "bin" / "cicc", f"{top}/nvvm/bin/cicc")
    return made


def image(stack: str, lock: Path, base: str, *flags: str, devel: str = "") -> str:
    """Build the stack's image on `base`, what it compiles on `devel`; return its tag."""
    tag = f"envbuild-test:{stack}"
    stages = {"base": base, "devel": devel or base}
    contexts = [f"--build-context={stage}=docker-image://{root}" for stage, root in stages.items()]
    command = [sys.executable, "-m", "envbuild", "image", "--stack", stack, "--lock", lock, *contexts, "--tag", tag]
    answer = json.loads(run(*command, "--json", *flags).stdout)
    assert answer["audit"]["defects"] == 0
    assert f"the image of this lock: base was replaced by docker-image://{base}" in answer["not_proven"]
    return tag


def compiled(tag: str, component: str) -> dict[str, str | list[str]]:
    """Return the image's record of a component that was compiled for it."""
    return json.loads(run("docker", "run", "--rm", tag, "cat", f"/opt/envbuild/built/{component}.json").stdout)


def trains(file: str, name: str) -> None:
    """Run the training test of this name; the environment names its image."""
    run(sys.executable, "-m", "pytest", "-q", Path(__file__).with_name(file), "-k", name)


def test_llm_jp_compiles_apex_and_trains_under_deepspeed_0_10(engine, tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    torch_wheel(wheels, "torch==2.0.1", "3.10", "2.0.1+cu118", "11.8")
    torch_wheel(wheels, "torchvision==0.15.2", "3.10", "0.15.2+cu118", "11.8")
    monkeypatch.setenv("ENVBUILD_FIND_LINKS", str(wheels))
    lock = locked("llm-jp", tmp_path)
    tag = image("llm-jp", lock, cuda_image(tmp_path, "bookworm", "11.8", "jammy"))
    apex = compiled(tag, "apex")
    assert "cuda_11.8" in apex["nvcc"]
    assert {"amp_C", "fused_layer_norm_cuda", "scaled_upper_triang_masked_softmax_cuda"} <= set(apex["extensions"])
    monkeypatch.setenv("IMAGE_LLM_JP", tag)
    trains("test_pretrain_deepspeed.py", "llm_jp")


def test_alcf_compiles_apex_and_flash_attention_2_and_trains(engine, tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    torch_wheel(wheels, "torch==2.0.1", "3.10", "2.0.1+cu118", "11.8")
    monkeypatch.setenv("ENVBUILD_FIND_LINKS", str(wheels))
    lock = locked("alcf", tmp_path, "ambivalent")
    with sdist("ambivalent==0.3.0") as source:
        source.extractall(tmp_path / "ambivalent", filter="data")
    inputs = {"ambivalent": tmp_path / "ambivalent" / "ambivalent-0.3.0", "flash-attn": fa2_for_sm80(tmp_path / "fa2")}
    contexts = [f"--build-context=src-{name}={folder}" for name, folder in inputs.items()]
    tag = image("alcf", lock, cuda_image(tmp_path, "bookworm", "11.8", "jammy"), *contexts)
    assert "amp_C" in compiled(tag, "apex")["extensions"]
    flash = compiled(tag, "flash-attn")
    assert "cuda_11.8" in flash["nvcc"]
    assert flash["extensions"] == ["flash_attn_2_cuda"]
    monkeypatch.setenv("IMAGE_ALCF", tag)
    trains("test_pretrain_deepspeed.py", "alcf")


def test_gpt2_3d_trains_under_deepspeed_0_5_1_on_python_3_8(engine, tmp_path, monkeypatch):
    lock = locked("gpt2-3d", tmp_path)
    base = tmp_path / "base"
    base.mkdir()
    wheel = torch_wheel(base, "torch==1.8.0", "3.8", "1.8.0a0+1606899", "11.1")
    # apex is the base's own, too; what no GPU runs needs no kernel
    (base / "apex").mkdir()
    (base / "apex" / "__init__.py").write_text("from . import optimizers\n")
    (base / "apex" / "optimizers.py").write_text("class FusedAdam:\n    pass\n")  # DeepSpeed asks for its name
    (base / "apex-0.1.egg-info").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n")
    site = "/usr/local/lib/python3.8/dist-packages"
    with ubuntu_root("focal", tmp_path / "root", (*HELD, "git", "python3-dev", "python3-pip", "openmpi-bin")) as root:
        (base / "Dockerfile").write_text(
            f"FROM {root}\nRUN --mount=type=bind,target=/in --mount=type=secret,id=ca,target=/ca "
            f"PIP_CERT=$([ ! -e /ca ] || echo /ca) python3 -m pip install --no-cache-dir /in/{wheel.name} numpy==1.19.2\n"
            f"COPY apex {site}/apex\nCOPY apex-0.1.egg-info {site}/\n"
        )
        bundle = load_settings().ca_bundle
        built = build_image(base, "envbuild-test:focal-torch1.8", *([f"--secret=id=ca,src={bundle}"] if bundle else []))
    wheel.unlink()
    tag = image("gpt2-3d", lock, built, "--no-smoke")
    smoke = [sys.executable, "-m", "envbuild", "smoke", tag, "--device", "cpu", "--json"]
    printed = json.loads(run(*smoke, expect=7).stdout)
    # the suite runs on torch 1.8 and Python 3.8, and misses what this base does not have
    assert {test["id"] for test in printed["tests"] if test["outcome"] == "failed"} == {
        "test_import.py::test_import_component[apex]",
        "test_import.py::test_import_apex_extensions",
    }
    monkeypatch.setenv("IMAGE_GPT2_3D", tag)
    trains("test_pretrain_deepspeed.py", "gpt2_3d")


def test_megatron_gpt3_compiles_apex_and_transformer_engine_and_trains(engine, tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    torch_wheel(wheels, "torch==2.8.0", "3.10", "2.8.0+cu126", "12.6", platform="_2_28")
    monkeypatch.setenv("ENVBUILD_FIND_LINKS", str(wheels))
    lock = locked("megatron-gpt3", tmp_path)
    devel = cuda_image(tmp_path, "trixie", "12.6", "jammy")
    with ubuntu_root("jammy", tmp_path / "plain", ()) as base:
        tag = image("megatron-gpt3", lock, base, devel=devel)
    assert "fused_weight_gradient_mlp_cuda" in compiled(tag, "apex")["extensions"]
    assert compiled(tag, "te")["extensions"] == ["transformer_engine_torch"]
    monkeypatch.setenv("IMAGE_MEGATRON_GPT3", tag)
    trains("test_pretrain_gpt.py", "megatron_gpt3")


def test_llama3_70b_compiles_flash_attention_3_and_open_mpi_and_trains_with_sgd(engine, tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, stated, own in (("torch", "2.8.0", "2.8.0"), ("torchvision", "0.23.0", "0.23.0"), ("torchaudio", "2.8.0", "2.8.0")):  # fmt: skip
        torch_wheel(wheels, f"{name}=={own}", "3.12", f"{stated}+cu126", "12.6", platform="_2_28")
    monkeypatch.setenv("ENVBUILD_FIND_LINKS", str(wheels))
    lock = locked("llama3-70b", tmp_path)
    devel = cuda_image(tmp_path, "trixie", "12.6", "noble")
    inputs = {"mpi": open_mpi(tmp_path / "mpi"), "flash-attn-hopper": small_fa3(lock, tmp_path / "fa3")}
    fetched = fetched_by_fa3(devel, tmp_path / "fetched")
    inputs |= {f"flash-attn-hopper-{name}": folder for name, folder in fetched.items()}
    contexts = [f"--build-context=src-{name}={folder}" for name, folder in inputs.items()]
    with ubuntu_root("noble", tmp_path / "plain", ()) as base:
        tag = image("llama3-70b", lock, base, *contexts, devel=devel)
    assert "fused_rotary_positional_embedding" in compiled(tag, "apex")["extensions"]
    assert compiled(tag, "te")["extensions"] == ["transformer_engine_torch"]
    fa3 = compiled(tag, "flash-attn-hopper")
    assert fa3["extensions"] == ["flash_attn_3_cuda"]
    assert "cuda_12.8" in fa3["ptxas"]  # the archives' own, not the toolkit's
    monkeypatch.setenv("IMAGE_LLAMA3_70B", tag)
    trains("test_pretrain_gpt.py", "llama3_70b")
