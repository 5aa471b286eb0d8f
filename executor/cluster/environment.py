"""Chooses the environment variables of workers.

Some come from the engine's environment, the others from the node's. The tenants' keys are not among them. The engine's
process may hold keys and Ray's token, and a block runs in a worker.
"""

from __future__ import annotations

import os

# Beside vLLM's own list: its variables, and those of the libraries that it talks through.
_NAMES = frozenset({"OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "TRITON_F32_DEFAULT"})
# Where the service's settings come from the environment, so do the keys: Serve may build the application on any node. The other
# is a client's, which may run in the same environment.
_KEYS = ("INTERPOSE_TENANTS", "INTERPOSE_API_KEY")
# What workers need to load a model, and nothing afterwards.
_TO_LOAD = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY"})
# On vLLM's list too, but a secret that only its own HTTP server needs.
_NEVER = frozenset({"VLLM_API_KEY"})


def forwarded() -> dict[str, str]:
    """Return what workers get of this process's environment, the engine's.

    It is vLLM's allow-list, which `VLLM_RAY_EXTRA_ENV_VARS_TO_COPY` and `VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY` extend, the
    platform's variables and a few of numeric libraries; without those that belong to one worker or one node.
    """
    from vllm.platforms import current_platform
    from vllm.ray.ray_env import get_env_vars_to_copy
    from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS

    names = get_env_vars_to_copy(
        exclude_vars=WORKER_SPECIFIC_ENV_VARS | _NEVER,
        additional_vars=_NAMES | set(current_platform.additional_env_vars),
        destination="workers",
    )
    return {name: os.environ[name] for name in sorted(names & os.environ.keys())}


def hide_keys() -> set[str]:
    """Take the tenants' keys out of this process's environment; return the variables' names.

    Every process below it inherits the environment.
    """
    names = {name for name in os.environ if name.upper().startswith(_KEYS)}
    for name in names:
        del os.environ[name]
    return names


def hide_credentials() -> None:
    """Take what only loading the model has needed out of this process's environment."""
    for name in _TO_LOAD:
        os.environ.pop(name, None)
