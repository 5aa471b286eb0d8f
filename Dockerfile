# Everything of the service, for heads and workers alike, and the client with its examples. BuildKit builds it, Docker's
# builder since 23; before that DOCKER_BUILDKIT=1 asks for it.
#
#   docker build --target cpu --tag interpose:cpu .
#   docker build --target gpu --tag interpose:gpu .
#
# PIP_ARGS: further arguments for pip, --extra-index-url=… for a mirror. Where a package index needs more than that, the
# secrets `pip.conf` (pip's configuration, which may name credentials) and `ca.pem` (certificates, at /run/secrets/ca.pem)
# are there while pip installs, and nothing of them is in the image.

ARG PYTHON=3.11

# What both kinds need at run time. KubeRay's probes call bash and wget.
FROM python:${PYTHON}-slim-bookworm AS runtime
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 procps wget \
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

# With a compiler: an engine on GPUs compiles small programs while it runs.
FROM runtime AS compiling
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# The libraries, in a layer that only pyproject.toml makes anew: the project itself is an empty package here.
FROM compiling AS build
RUN python -m venv /opt/venv
COPY pyproject.toml ./
RUN mkdir interpose && touch interpose/__init__.py README.md LICENSE

FROM build AS build-cpu
ARG PIP_ARGS="--extra-index-url=https://download.pytorch.org/whl/cpu"
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    pip install --no-cache-dir --no-compile ${PIP_ARGS} '.[cpu]'
# What no engine on CPUs uses stays behind: kernels for GPUs, pictures, sound and video, what compiles and what tests,
# Ray's Java and its reinforcement learning, the symbols of debuggers.
RUN pip uninstall --quiet --yes triton torchvision torchaudio torchcodec opencv-python-headless py-spy \
    && cd /opt/venv \
    && rm -rf lib/libomptarget* lib/libsycl* lib/libpi_level* lib/libur_* include share \
    && cd lib/python3*/site-packages \
    && find torch/bin -type f ! -name torch_shm_manager -delete \
    && rm -rf torch/include torch/share torch/test ray/jars ray/rllib ray/dashboard/client \
    && find . -type d -name tests ! -path './numpy/*' -prune -exec rm -rf {} + \
    && find . -name '*.a' -delete \
    && strip --strip-unneeded vllm/*.so torch/lib/*.so llvmlite/binding/*.so ray/_raylet.so ray/core/src/ray/*/raylet ray/core/src/ray/*/gcs_server
COPY . .
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    pip install --no-cache-dir --no-deps --editable . \
    && python -m compileall -q . \
    && pip uninstall --quiet --yes pip
# Bytecode of what a service imports: of all libraries it would be a fifth of the image.
RUN python -c 'import executor.engine.engine, executor.cluster.executor, executor.plugin.worker_cpu, serve_app.app, vllm.v1.engine.core, \
    vllm.model_executor.models.llama, ray.scripts.scripts, ray.serve._private.controller, ray.serve._private.proxy, \
    ray.dashboard.agent, ray._private.runtime_env.agent.main, ray._private.workers.default_worker'
# A model to try: small, random, the same in every build.
RUN interpose demo-model /models/tiny-llama && chmod -R a+rX /models

FROM build AS build-gpu
ARG PIP_ARGS=""
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    pip install --no-cache-dir ${PIP_ARGS} '.[gpu]'
COPY . .
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    pip install --no-cache-dir --no-deps --editable . && python -m compileall -q .

FROM compiling AS gpu
# The driver's libraries are mounted by NVIDIA's container runtime.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-gpu /opt/venv /opt/venv
COPY --from=build-gpu /opt/interpose /opt/interpose
USER 1000:1000

FROM runtime AS cpu
# No compiler is here: vLLM's engines are eager then, whatever they are asked for, and its compiled functions run as they are.
ENV TORCH_COMPILE_DISABLE=1
COPY --from=build-cpu /opt/venv /opt/venv
COPY --from=build-cpu /opt/interpose /opt/interpose
COPY --from=build-cpu /models /models
USER 1000:1000
