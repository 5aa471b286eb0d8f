"""How many tokens tenants of the weights 1, 2 and 4 get under overload.

Each of the three keeps more traces waiting than may run. The service has two ingress replicas and one worker. The figures are
the tokens of each tenant, and what each has had for its weight against the mean of the three.
"""

from __future__ import annotations

import statistics
import threading
import time
from contextlib import ExitStack

import interpose
from benchmarks.models import prompts
from benchmarks.served import Service

SECONDS = 40.0
WARM_SECONDS = 8.0
PROMPT_TOKENS = 16
SEATS = 14
WEIGHTS = {"one": 1.0, "two": 2.0, "four": 4.0}
BACKLOG = {"one": 6, "two": 10, "four": 20}  # threads of each tenant, each with one trace after another
TRACE_TOKENS = 96


def run(*, seconds: float | None = None) -> dict[str, dict[str, float]]:
    """Return the tokens of each tenant, and what they are of its part.

    Args:
        seconds: in which tokens are counted.
    """
    seconds = seconds or SECONDS
    service = Service(
        1,
        2,
        {"enforce_eager": True, "max_model_len": 512},
        tenants=[{"name": name, "api_key": _key(name), "quotas": {"weight": w}} for name, w in WEIGHTS.items()],
        settings={"ingress_replicas": 2},
        model={"max_running_traces": SEATS, "sandbox": "off"},
    )
    with ExitStack() as stack:
        stack.callback(service.close)
        address = service.address()
        counted = _Counted()
        stop = threading.Event()
        threads = []
        for name in WEIGHTS:
            for _ in range(BACKLOG[name]):
                client = stack.enter_context(interpose.connect(address, api_key=_key(name), progress=False))
                threads.append(threading.Thread(target=counted.run, args=(name, client.model(), stop), daemon=True))
        for thread in threads:
            thread.start()
        time.sleep(WARM_SECONDS)  # until all tenants have their backlog
        counted.tokens = dict.fromkeys(WEIGHTS, 0)
        time.sleep(seconds)
        tokens = dict(counted.tokens)
        stop.set()
        for thread in threads:
            thread.join()
    mean = statistics.mean(tokens[name] / weight for name, weight in WEIGHTS.items())
    return {
        f"weight {weight:g}": {"tokens": float(tokens[name]), "of its part": tokens[name] / weight / mean}
        for name, weight in WEIGHTS.items()
    }


class _Counted:
    """Counts the tokens of each tenant's traces."""

    def __init__(self) -> None:
        self.tokens = dict.fromkeys(WEIGHTS, 0)
        self._lock = threading.Lock()

    def run(self, tenant: str, model: interpose.Model, stop: threading.Event) -> None:
        """Run one trace after the other."""
        for prompt in prompts(PROMPT_TOKENS):
            if stop.is_set():
                return
            with model.trace(prompt, max_tokens=TRACE_TOKENS, ignore_eos=True):
                hidden = model.model.layers[1].output[0][-1].save()
            assert hidden is not None
            with self._lock:
                self.tokens[tenant] += PROMPT_TOKENS + TRACE_TOKENS


def _key(tenant: str) -> str:
    return f"{tenant}-weights-key"
