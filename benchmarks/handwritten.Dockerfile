# The CUDA 13.0 cell as people write it by hand: one stage, the same pins, the same root. What bench_build.py compares with.
FROM scratch
ADD rootfs.tar /
ARG OS_PACKAGES TORCH_REQUIREMENTS TOOLS TOOLCHAIN ENV_REQUIREMENTS MAX_JOBS
ENV PATH=/opt/venv/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -qy --no-install-recommends install ${OS_PACKAGES}
COPY uv /usr/local/bin/uv
RUN --mount=type=secret,id=ca,target=/run/ca.crt export SSL_CERT_FILE=/run/ca.crt UV_LINK_MODE=copy \
 && uv venv --python /usr/bin/python3.11 /opt/venv \
 && uv pip install --python /opt/venv/bin/python --no-deps ${TORCH_REQUIREMENTS} \
 && uv pip install --python /opt/venv/bin/python --no-deps ${TOOLS} ${TOOLCHAIN} \
 && uv pip install --python /opt/venv/bin/python --no-deps ${ENV_REQUIREMENTS}
RUN ln -s /opt/venv/lib/python3.11/site-packages/nvidia/cu13 /usr/local/cuda && ln -s lib /usr/local/cuda/lib64 \
 && ln -sf libcudart.so.13 /usr/local/cuda/lib/libcudart.so
COPY te /src/te
COPY apex /src/apex
ENV CUDA_HOME=/usr/local/cuda NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE TORCH_CUDA_ARCH_LIST=9.0 APEX_CPP_EXT=1 APEX_CUDA_EXT=1 \
    CPLUS_INCLUDE_PATH=/opt/venv/lib/python3.11/site-packages/nvidia/cudnn/include:/opt/venv/lib/python3.11/site-packages/nvidia/nccl/include
RUN MAX_JOBS=${MAX_JOBS} uv pip install --python /opt/venv/bin/python --offline --no-build-isolation --no-deps /src/te
RUN MAX_JOBS=${MAX_JOBS} APEX_PARALLEL_BUILD=${MAX_JOBS} uv pip install --python /opt/venv/bin/python --offline --no-build-isolation --no-deps /src/apex
