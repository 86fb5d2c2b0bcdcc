# An image with fedssl and fedkernels; it has not been built by the project yet.
#
#   CPU:   docker build -t fedssl .
#   CUDA:  docker build -t fedssl:cuda --build-arg BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 \
#              --build-arg TORCH=https://download.pytorch.org/whl/cu128 .
#
#   docker run --rm --shm-size=2g --user "$(id -u):$(id -g)" -v "$PWD":/work fedssl pretrain photos --minutes 30
#   docker run --rm --shm-size=2g --gpus all -v "$PWD":/work fedssl:cuda doctor
#
# The CUDA image keeps nvcc, which compiles the kernels when the image is built. CUDA and torch must be of one version.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}
ARG TORCH=https://download.pytorch.org/whl/cpu
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PATH=/opt/fedssl/bin:$PATH

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && { command -v python3 || apt-get install -y --no-install-recommends python3 python3-venv python3-dev; } \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/fedssl
RUN pip install torch torchvision --index-url "${TORCH}"
COPY . /src
RUN pip install "/src[flower,export]" && rm -rf /src

RUN useradd fedssl
USER fedssl
# For any --user: only who owns the mounted folder can write its results, and that number has no name and home here.
ENV HOME=/tmp USER=fedssl
WORKDIR /work
ENTRYPOINT ["fedssl"]
CMD ["--help"]
