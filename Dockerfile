# The training scripts and everything they need, for a TPU VM or for the CPU backend.
#
# Build:   docker build -t tpu-examples .
# Run:     docker run --rm --privileged --net=host --shm-size=16G --ulimit memlock=-1 tpu-examples
#
# No HEALTHCHECK: a chip belongs to one process, and a probe that touches it would end the training.
ARG BASE_IMAGE=debian:bookworm-slim
FROM ${BASE_IMAGE}

# An index with PyTorch's CPU-only wheels leaves out several GB of CUDA packages, which no TPU uses. Its torch
# 2.9.0+cpu counts as newer than 2.9.0, so the pins in requirements.txt choose it by themselves.
ARG TORCH_INDEX_URL
# Where pip finds its settings during the build, for networks with a mirror or certificates of their own.
ARG PIP_CONFIG_FILE

ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /workspace
COPY requirements.txt ./

# One layer, so that what is removed here was never part of the image. Debian bookworm's python3 is 3.11, and does
# without libpython3.11.so, which torch_xla is linked against.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates libpython3.11 python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && pip install --no-cache-dir ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} -r requirements.txt \
    && useradd --create-home --uid 1000 trainer \
    && chown trainer:trainer /workspace

COPY --chown=trainer:trainer . .

# Enough for the CPU backend and for TPU images whose device nodes are open to everybody. Where they are not, the
# doctor says so: add `--user root` to the run line.
USER trainer
CMD ["python", "setup_tpu.py"]
