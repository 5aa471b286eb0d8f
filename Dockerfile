# Everything of the service, for heads and workers alike, and the client with its examples.
#
#   docker build --target cpu --tag interpose:cpu .
#   docker build --target gpu --tag interpose:gpu .
#
# PIP_ARGS: further arguments for pip, --extra-index-url=… for a mirror.

ARG PYTHON=3.11

# What both kinds need at run time. KubeRay's probes call bash and wget; the engine compiles small programs while it runs.
FROM python:${PYTHON}-slim-bookworm AS runtime
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 procps wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home interpose \
    # A login shell, which KubeRay may start, sets PATH anew.
    && echo 'export PATH=/opt/venv/bin:$PATH' > /etc/profile.d/interpose.sh
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    VLLM_NO_USAGE_STATS=1
WORKDIR /opt/interpose
# On every node that is up, whatever runs on it: the head, a worker.
HEALTHCHECK --interval=10s --timeout=8s --start-period=60s --retries=6 \
    CMD ["wget", "--quiet", "--tries=1", "--timeout=5", "--output-document=-", "http://localhost:52365/api/local_raylet_healthz"]
CMD ["interpose", "--help"]

# The libraries, in a layer that only pyproject.toml makes anew: the project itself is an empty package here.
FROM runtime AS build
RUN python -m venv /opt/venv
COPY pyproject.toml README.md LICENSE ./
RUN mkdir interpose && touch interpose/__init__.py

FROM build AS build-cpu
ARG PIP_ARGS="--extra-index-url=https://download.pytorch.org/whl/cpu"
RUN pip install --no-cache-dir ${PIP_ARGS} '.[cpu]'
COPY . .
RUN pip install --no-cache-dir --no-deps --editable . && python -m compileall -q .
# A model to try: small, random, the same in every build.
RUN interpose demo-model /models/tiny-llama

FROM build AS build-gpu
ARG PIP_ARGS=""
RUN pip install --no-cache-dir ${PIP_ARGS} '.[gpu]'
COPY . .
RUN pip install --no-cache-dir --no-deps --editable . && python -m compileall -q .

FROM runtime AS gpu
# The driver's libraries are mounted by NVIDIA's container runtime.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-gpu /opt/venv /opt/venv
COPY --from=build-gpu /opt/interpose /opt/interpose
USER 1000:1000

FROM runtime AS cpu
COPY --from=build-cpu /opt/venv /opt/venv
COPY --from=build-cpu /opt/interpose /opt/interpose
COPY --from=build-cpu /models /models
USER 1000:1000
