#!/bin/bash
# CUDA 11.8
pyenv install 3.11.4
git clone https://github.com/llm-jp/Megatron-DeepSpeed.git
cd Megatron-DeepSpeed
git switch hpc/fujii/deepspeed-multi-node
pip install torch==2.0.1+cu118 torchvision==0.15.2+cu118 --find-links https://download.pytorch.org/whl/torch_stable.html
pip install deepspeed wandb sentencepiece nltk
sudo apt-get install -y pdsh g++-12 openmpi-bin
git clone https://github.com/NVIDIA/apex
cd apex && git checkout 24.04.01 && pip install -v --no-build-isolation ./
cd ../megatron/data
make LIBEXT="$(/home/somebody/.pyenv/versions/3.11.4/bin/python3-config --extension-suffix)"
