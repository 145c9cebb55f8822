FROM nvidia/cuda:12.6.3-cudnn-devel-ubuntu24.04
# driver 570.172.08
ARG TE_TAG=v2.6
RUN apt-get update && apt-get install -y python3.12-dev python3-pip git openssh-server
ENV CUDA_HOME=/usr/local/cuda \
    CUDACXX=/usr/local/cuda/bin/nvcc \
    CUDNN_INCLUDE_DIR=/usr/include \
    NVTE_CUDA_INCLUDE_PATH=/usr/local/cuda/include \
    NVTE_CUDA_ARCHS=90 \
    CUDA_DEVICE_MAX_CONNECTIONS=1
RUN pip install torch --index-url https://download.pytorch.org/whl/cu126
RUN git clone --branch ${TE_TAG} --recursive https://github.com/NVIDIA/TransformerEngine.git \
    && cd TransformerEngine && pip install --no-build-isolation .
RUN git clone https://github.com/NVIDIA/apex && cd apex && git checkout 25.08 \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation .
RUN git clone https://github.com/Dao-AILab/flash-attention.git && cd flash-attention \
    && git checkout af314d400663fe895199b0586a9f1f718b1d7b79 \
    && cd hopper && python3 setup.py install
RUN pip install aibooster flash-attn-3 mpi4py
RUN ssh-keygen -A
RUN git clone -b core_v0.12.3 https://github.com/NVIDIA/Megatron-LM.git
CMD mpirun -np 16 --cpus-per-rank 15 python pretrain_gpt.py
