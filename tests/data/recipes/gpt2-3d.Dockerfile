FROM nvcr.io/nvidia/pytorch:20.12-py3
RUN pip install deepspeed==0.19.8
RUN git clone https://github.com/microsoft/DeepSpeedExamples.git
COPY hostfile /job/hostfile
COPY id_rsa /root/.ssh/id_rsa
ENV TORCH_CUDA_ARCH_LIST=9.0
# nvidia-docker2 is installed on the hosts:
#   docker run --gpus all --network host -p 2222:22 image
RUN echo "run: docker run --gpus all --network host -p 2222:22 image" > /README
CMD python -m torch.distributed.launch --nproc_per_node 8 pretrain_gpt2.py
