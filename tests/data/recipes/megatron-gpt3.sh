#!/bin/bash
# A single-node guide in the style of many: every line was right once, and no two were right together.
# nvcc 11.x
# CUDA 12.4 or newer, driver 550.54.14
# Python 3.10
set -e
apt-get update && apt-get install -y build-essential cmake ninja-build
export PATH=/usr/local/cuda-11.8/bin:$PATH
export LD_LIBRARY_PATH=/usr/local/cuda-11.8/lib64:$LD_LIBRARY_PATH
python3.10 -m venv env && source env/bin/activate
pip install torch torchvision
git clone https://github.com/NVIDIA/apex
cd apex
pip install -v --no-build-isolation --config-settings "--build-option=--cpp_ext" --config-settings "--build-option=--cuda_ext" ./
cd ..
pip install "transformer_engine[pytorch]>=2.0"
git clone https://github.com/NVIDIA/Megatron-LM.git
cd Megatron-LM
torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 12 --hidden-size 512
