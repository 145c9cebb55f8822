"""What stands in for the bases and the torches of stacks that are out of reach: Ubuntu's roots, Debian's CUDA, PyPI's wheels."""

import base64
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from root_support import build_image, debian_tar, ubuntu_root

from envbuild.settings import load_settings

# What NVIDIA's images hold besides their own packages.
HELD = ("build-essential", "curl", "gnupg2")

DEFECTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gpt2-3d": {"GPU code": ("torch/lib/libtorch_cuda.so has no GPU code that sm_80 runs",)},
    "llm-jp": {
        "GPU code": (
            "torch/lib/libtorch_cuda.so has no GPU code that sm_90 runs",
            "torch/lib/libtorch_cuda_linalg.so has no GPU code that sm_90 runs",
        )
    },
}
"""Stack -> check -> what the audit must find of the torch that stands in: PyPI's 1.8.0 ends at sm_70, its 2.0.1 at sm_86.

A stack that is not here has a stand-in with code for its GPU: 2.0.1 for sm_80 (alcf), 2.8.0 for sm_90 (llama3-70b, megatron-gpt3).
"""
AUDIT = 6
"""The exit code of `envbuild image` where the audit found a defect."""

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
        record, lines = "", []
        for item, path in zip(held.infolist(), paths, strict=True):
            data = held.read(item)
            item.filename = path
            if path.endswith(".dist-info/RECORD"):
                record = path
                continue
            if path.endswith(".dist-info/METADATA"):
                data = data.replace(f"\nVersion: {old}\n".encode(), f"\nVersion: {version}\n".encode(), 1)
            elif path == f"{name}/version.py":
                text = data.decode()
                for variable, value in stated.items():
                    text = re.sub(rf"(?m)^({variable}(: .*)?) = '.*'$", rf"\1 = {value!r}", text)
                data = text.encode()
            if not path.endswith("/"):
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
                lines.append(f"{path},sha256={digest},{len(data)}\n")
            out.writestr(item, data)
        assert record
        out.writestr(record, "".join([*lines, f"{record},,\n"]))
    wheel.unlink()
    return made


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


def gpt2_base(folder: Path) -> str:
    """Make an image of focal with Python 3.8, PyPI's torch 1.8.0 as NGC's, and an apex without kernels; return its tag."""
    base = folder / "base"
    base.mkdir()
    wheel = torch_wheel(base, "torch==1.8.0", "3.8", "1.8.0a0+1606899", "11.1")
    # apex is the base's own, too; what no GPU runs needs no kernel
    (base / "apex").mkdir()
    (base / "apex" / "__init__.py").write_text("from . import optimizers\n")
    (base / "apex" / "optimizers.py").write_text("class FusedAdam:\n    pass\n")  # DeepSpeed asks for its name
    (base / "apex-0.1.egg-info").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.1\n")
    site = "/usr/local/lib/python3.8/dist-packages"
    with ubuntu_root("focal", folder / "root", (*HELD, "git", "python3-dev", "python3-pip", "openmpi-bin")) as root:
        (base / "Dockerfile").write_text(
            f"FROM {root}\nRUN --mount=type=bind,target=/in --mount=type=secret,id=ca,target=/ca "
            f"PIP_CERT=$([ ! -e /ca ] || echo /ca) python3 -m pip install --no-cache-dir /in/{wheel.name} numpy==1.19.2\n"
            f"COPY apex {site}/apex\nCOPY apex-0.1.egg-info {site}/\n"
        )
        bundle = load_settings().ca_bundle
        built = build_image(base, "envbuild-test:focal-torch1.8", *([f"--secret=id=ca,src={bundle}"] if bundle else []))
    wheel.unlink()
    return built


def defects_of(audit: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return what an audit found, by check, without the folder of the packages and without what the file has instead."""
    failed = {each["name"]: each["text"] for each in audit["checks"] if each["verdict"] == "failed"}
    return {name: tuple(_stable(finding) for finding in text.split("; ")) for name, text in failed.items()}


def _stable(finding: str) -> str:
    return re.sub(r"^/\S*/(?:site|dist)-packages/", "", finding).partition(": ")[0]


def image(stack: str, lock: Path, base: str, *flags: str, devel: str = "") -> str:
    """Build the stack's image on `base`, what it compiles on `devel`; return its tag.

    The audit must find the defects of the stand-in and no other one. `envbuild image` runs no smoke tests after a
    defect: they run here, on the processor.
    """
    tag = f"envbuild-test:{stack}"
    stages = {"base": base, "devel": devel or base}
    contexts = [f"--build-context={stage}=docker-image://{root}" for stage, root in stages.items()]
    command = [sys.executable, "-m", "envbuild", "image", "--stack", stack, "--lock", lock, *contexts, "--tag", tag]
    expected = DEFECTS.get(stack, {})
    answer = json.loads(run(*command, "--json", *flags, expect=AUDIT if expected else 0).stdout)
    found = defects_of(answer["audit"])
    assert found == expected, f"the audit finds {found}"
    assert f"the image of this lock: base was replaced by docker-image://{base}" in answer["not_proven"]
    if expected and "--no-smoke" not in flags:
        run(sys.executable, "-m", "envbuild", "smoke", tag, "--device", "cpu")
    return tag
