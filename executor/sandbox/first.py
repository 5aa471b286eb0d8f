"""The first lines of the zygote: libraries must start no threads as they are loaded.

A process that forks must have one thread. Numpy, torch and what they bring start a pool of threads for as many cores as a
machine has, unless their settings say otherwise before they are loaded. So this module sets them, and loads nothing itself.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

FAILED = b"-"
MOST_REASON = 500  # bytes of what the worker is told of a zygote that cannot go on

# One thread for each pool of threads, and no processes that compile beside.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GOTO_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "BLIS_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_WARM_POOL": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "VLLM_TARGET_DEVICE": "cpu",
    # Allocators start no threads: those of C, of Rust and of Arrow, where they are jemalloc.
    "MALLOC_CONF": "background_thread:false",
    "_RJEM_MALLOC_CONF": "background_thread:false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "VLLM_NO_USAGE_STATS": "1",
    "OTEL_SDK_DISABLED": "true",
    "USER": "nobody",  # libraries ask for a name, also where the user has none
}
_LIBRARIES = "LD_LIBRARY_PATH"
# Without these some machines find no library of Python's or CUDA's, or no home directory.
_INHERITED = (_LIBRARIES, "HOME")
# The driver of GPUs starts a thread when it is asked how many there are, as autograd does. Empty files with its names stand
# here. The loader takes them first and fails, as on a machine without the driver.
_ABSENT = Path(__file__).parent / "absent"


def environment() -> dict[str, str]:
    """Return the environment that the zygote starts with."""
    made = ENVIRONMENT | {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return made | {_LIBRARIES: ":".join(filter(None, (str(_ABSENT), made.get(_LIBRARIES))))}


def begin(descriptor: int) -> None:
    """Load the zygote, and serve a worker until its line closes.

    Args:
        descriptor: of the line.
    """
    os.environ.update(ENVIRONMENT)
    with socket.socket(fileno=descriptor) as line:
        try:
            from executor.sandbox.zygote import serve

            serve(line)
        except (EOFError, ConnectionError):  # the worker is gone
            return
        except BaseException as error:
            line.sendall(FAILED + f"{type(error).__name__}: {error}".encode()[:MOST_REASON])
            raise
