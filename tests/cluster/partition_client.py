"""The client of `test_partition`, on a host of its own: compares with transformers, then tells how it fares.

It prints one JSON object in a line for each thing that happens, and runs until its standard input ends.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

import interpose
from interpose.contract.errors import DeadlineExceeded, InterposeError, Unauthenticated, Unavailable
from tests.cluster.cluster import check
from tests.cluster.matrix import shown
from tests.cluster.overlay import pod_is_ready, run_smoke_job


def tell(what: str, **facts: Any) -> None:
    """Print what happened, with the time."""
    print(json.dumps({"what": what, "at": time.time(), **facts}), flush=True)


def wait(address: str, key: str) -> None:
    """Wait until the engine runs. The nodes are ready before, as soon as somebody can answer."""
    while True:
        try:
            with interpose.connect(address, key, progress=False) as client:
                assert pod_is_ready(address)
                if client.status().models[0].state == "RUNNING":
                    return
        except (Unavailable, DeadlineExceeded, grpc.RpcError):
            pass
        time.sleep(0.5)


def suffer(client: interpose.Client, name: str) -> None:
    """One fault: a finished job, a trace in flight, its end, a new trace, the job again."""
    model = client.model(name)
    refused = ""
    while True:
        try:
            with model.trace("one two three", blocking=False) as tracer:
                kept = model.model.layers[0].output[0].new_ones(99999).save()
            tracer.job.wait(timeout=60)
            break
        except (Unavailable, DeadlineExceeded) as caught:
            refused = refused or shown(caught)
            time.sleep(0.3)
    assert kept.sum() == 99999
    error: InterposeError | None = None
    try:
        with model.trace("one two three", max_tokens=400, ignore_eos=True, stream=True) as running:
            from time import sleep

            for _step in running.iter[:]:
                sleep(0.1)
        for number, _ in enumerate(running.stream()):
            if number == 3:
                tell("running", refused=refused)
    except InterposeError as caught:
        error = caught
    assert error is not None
    tell("ended", saw=shown(error), retryable=isinstance(error, Unavailable), message=error.message)
    while True:
        try:
            with model.trace("one two three"):
                hidden = model.model.layers[0].output[0].save()
            break
        except (Unavailable, DeadlineExceeded):
            time.sleep(0.3)
    assert hidden.shape[-1] == 128
    tell("back")
    lost = 0
    try:
        lost = int(client.job(tracer.job.id).result()["kept"].sum() != 99999)
        tracer.job.forget()
    except InterposeError:
        lost = 1
    tell("looked", lost=lost)


def main() -> None:
    """Run until nobody wants to hear more."""
    address, key, name, checkpoint = sys.argv[1:]
    wait(address, key)
    tell("served")
    check(address, name, Path(checkpoint), key)
    with pytest.raises(Unauthenticated):
        interpose.connect(address, "another key", progress=False)
    with tempfile.TemporaryDirectory() as folder:
        run_smoke_job(address, Path(folder))
    tell("checked")
    with interpose.connect(address, key, progress=False) as client:
        for _ in sys.stdin:
            suffer(client, name)
    check(address, name, Path(checkpoint), key)
    tell("checked")


if __name__ == "__main__":
    main()
