"""Checks a service: waits for its models, and reads and changes a value in each model.

INTERPOSE_ADDRESS=localhost:9000 python examples/smoke.py
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np

import interpose
from interpose.contract.errors import DeadlineExceeded, Unavailable

PROMPT = "The Eiffel Tower is in"
SAMPLING = {"max_tokens": 2, "temperature": 0.0}
PAUSE_SECONDS = 2.0


def wait(address: str | None, seconds: float) -> interpose.Client:
    """Return a client once the service answers and every model of it runs.

    Raises:
        TimeoutError: that takes too long; the message says how far it got.
    """
    deadline = time.monotonic() + seconds
    last = ""
    while True:
        try:
            client = interpose.connect(address, progress=False)
            states = {model.name: model.state for model in client.status().models}
            if set(states.values()) == {"RUNNING"}:
                return client
            client.close()
            seen = ", ".join(f"{name} is {state}" for name, state in states.items())
        except (Unavailable, DeadlineExceeded) as error:
            seen = str(error)
        if seen != last:
            print(seen, flush=True)
            last = seen
        if time.monotonic() > deadline:
            raise TimeoutError(f"no running model after {seconds:g} s: {last}")
        time.sleep(PAUSE_SECONDS)


def check(model: Any) -> str:
    """Run both traces on a model; return what is wrong, "" if nothing is."""
    middle = len(model.blocks) // 2
    with model.trace(PROMPT, **SAMPLING) as tracer:
        stream = model.blocks[middle].resid_post.float().save()
        logits = model.logits.output.float().save()
        result = tracer.result.save()
    with model.trace(PROMPT, **SAMPLING):
        model.blocks[middle].resid_post[:] = 0
        changed = model.logits.output.float().save()
    stream, logits, changed = (np.asarray(value) for value in (stream, logits, changed))
    print(f"residual stream after layer {middle}: {stream.shape}, logits: {logits.shape}, result: {result.text!r}")
    if len(result.token_ids) == 0 or stream.shape[0] < 2:
        return "the trace read or generated nothing"
    if not all(np.isfinite(value).all() for value in (stream, logits, changed)):
        return "values are not finite"
    return "" if np.abs(logits - changed).max() > 0 else "the change in the second trace changed nothing"


def main() -> int:
    """Return 0 if every model of the service works."""
    parser = argparse.ArgumentParser(description="Wait for a service and run two traces on each of its models.")
    parser.add_argument("--address", help="of the service (default: INTERPOSE_ADDRESS)")
    parser.add_argument("--wait", type=float, default=600.0, metavar="SECONDS", help="for the models to run")
    args = parser.parse_args()
    try:
        client = wait(args.address, args.wait)
    except TimeoutError as error:
        print(error, file=sys.stderr)
        return 1
    with client:
        failures = {name: check(client.model(name)) for name in client.models}
    for name, failure in failures.items():
        print(f"{name}: {failure or 'works'}")
    return 1 if any(failures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
