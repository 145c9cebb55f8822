"""The headline cell as a recipe of HPC Container Maker: the same base, versions, sources and compiled parts.

`hpccm --recipe benchmarks/headline.hpccm.py` prints its Dockerfile. bench_start.py times that next to envbuild's commands.
The names `Stage0`, `baseimage` and so on come from hpccm, which runs this file.
"""
# ruff: noqa: F821 - hpccm defines these names
# mypy: ignore-errors

PYTORCH = "https://download.pytorch.org/whl/cu126"
ARCHIVES = "https://developer.download.nvidia.com/compute/cuda/redist/cuda_nvcc/linux-x86_64"

Stage0 += comment("cuda 12.6, torch 2.8.0, Transformer Engine 2.6.0, apex 25.08, flash-attention 3 for sm_90")
Stage0 += baseimage(image="docker.io/nvidia/cuda:12.6.3-cudnn-devel-ubuntu24.04", _as="builder")
Stage0 += apt_get(
    ospackages=["ca-certificates", "ccache", "g++", "gcc", "git", "libc6-dev", "make", "python3.12", "python3.12-dev"]
)
Stage0 += python(python2=False, devel=True)
Stage0 += shell(commands=["python3 -m venv /opt/venv"])
Stage0 += environment(variables={"PATH": "/opt/venv/bin:$PATH", "VIRTUAL_ENV": "/opt/venv"})
Stage0 += pip(
    pip="/opt/venv/bin/pip",
    packages=[f"--index-url {PYTORCH}", "torch==2.8.0+cu126", "numpy"],
    upgrade=False,
)
Stage0 += pip(pip="/opt/venv/bin/pip", packages=["ninja", "packaging", "wheel", "'setuptools<82'"], upgrade=False)
Stage0 += environment(
    variables={
        "CUDA_HOME": "/usr/local/cuda",
        "NVTE_FRAMEWORK": "pytorch",
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "TORCH_CUDA_ARCH_LIST": "9.0",
        "FLASH_ATTENTION_FORCE_BUILD": "TRUE",
        "FLASH_ATTENTION_DISABLE_SM80": "TRUE",
        "NVCC_THREADS": "1",
    }
)
Stage0 += pip(
    pip="/opt/venv/bin/pip",
    packages=["--no-build-isolation", "transformer-engine==2.6.0.post1", "transformer-engine-cu12==2.6.0.post1"],
    upgrade=False,
)
Stage0 += generic_build(
    build=["/opt/venv/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /wheels ."],
    url="https://files.pythonhosted.org/packages/source/t/transformer_engine_torch/transformer_engine_torch-2.6.0.post1.tar.gz",
    directory="transformer_engine_torch-2.6.0.post1",
)
Stage0 += generic_build(
    build=[
        "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 /opt/venv/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /wheels ."
    ],
    repository="https://github.com/NVIDIA/apex.git",
    commit="e74a67bba3ee679f778670e17edc21639008ae0a",
)
for name in ("cuda_nvcc-linux-x86_64-12.6.85", "cuda_nvcc-linux-x86_64-12.8.93"):
    Stage0 += shell(commands=[f"curl -fsSL {ARCHIVES}/{name}-archive.tar.xz | tar -xJ -C /opt"])
Stage0 += generic_build(
    build=["cd hopper && /opt/venv/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /wheels ."],
    repository="https://github.com/Dao-AILab/flash-attention.git",
    commit="27f501dbe011f4371bff938fe7e09311ab3002fa",
)
Stage0 += shell(commands=["/opt/venv/bin/pip install --no-deps /wheels/*.whl", "python3 -m compileall -q /opt/venv"])

Stage1 += baseimage(image="docker.io/library/ubuntu:24.04")
Stage1 += apt_get(ospackages=["ca-certificates", "gcc", "libc6-dev", "python3.12", "python3.12-dev"])
Stage1 += copy(_from="builder", src="/opt/venv", dest="/opt/venv")
Stage1 += environment(
    variables={
        "PATH": "/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "VIRTUAL_ENV": "/opt/venv",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "NVTE_CUDA_INCLUDE_DIR": "/opt/venv/lib/python3.12/site-packages/nvidia/cuda_runtime/include",
    }
)
Stage1 += label(metadata={"org.opencontainers.image.title": "headline"})
Stage1 += workdir(directory="/workspace")
