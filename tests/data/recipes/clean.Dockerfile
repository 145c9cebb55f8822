FROM nvidia/cuda:12.8.1-cudnn-devel-ubuntu24.04
# CUDA 12.8, Python 3.12, driver 570.172.08
ARG APEX=e74a67bba3ee679f778670e17edc21639008ae0a
RUN apt-get update && apt-get install -y python3.12-dev git
ENV PATH=/usr/local/cuda-12.8/bin:${PATH} \
    CUDA_HOME=/usr/local/cuda \
    NVTE_FRAMEWORK=pytorch \
    NVTE_CUDA_ARCHS=90 \
    CUDA_DEVICE_MAX_CONNECTIONS=1
RUN pip install torch==2.8.0 --index-url https://download.pytorch.org/whl/cu128
RUN pip install --no-build-isolation transformer_engine[pytorch]==2.6.0.post1 "numpy<2"
RUN pip install --no-build-isolation \
      --config-settings "--build-option=--cpp_ext" --config-settings "--build-option=--cuda_ext" \
      git+https://github.com/NVIDIA/apex.git@${APEX}
RUN git clone https://github.com/Dao-AILab/flash-attention.git && cd flash-attention \
    && git checkout 27f501dbe011f4371bff938fe7e09311ab3002fa \
    && cd hopper && python3 setup.py install \
    && site=$(python3 -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
    && install -D flash_attn_interface.py $site/flash_attn_3/flash_attn_interface.py
RUN git clone --branch core_v0.12.3 https://github.com/NVIDIA/Megatron-LM.git /workspace/megatron-lm
WORKDIR /workspace/megatron-lm
CMD mpirun --map-by ppr:8:node:PE=15 python pretrain_gpt.py
