"""Runs a crowd of traces for minutes; each trace must give what it gives alone.

    python -m benchmarks.stress --seconds 300 --traces 200

serves a small model whose steps are short and whose cache is small, or takes a service with `--address`. The traces join, edit,
stop, fail and are cancelled. The exit status is 1 if a trace gave another result than alone, failed for a reason that is not its
own, got stuck, or left something behind. A share of the clients are strangers, whose blocks run in sandboxes (`--sandboxed`).

Traces whose blocks end in the first step generate more tokens than the others. They go on as plain requests, which are evicted
while others start, and whose prompts are cut into chunks and found in the prefix cache when they are computed anew.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import interpose
from benchmarks import tenants
from benchmarks.served import Service
from interpose.contract.errors import Cancelled, InterposeError
from interpose.v1.service_pb2 import StatusReply

ENGINE = {"max_model_len": 256, "max_num_batched_tokens": 128, "block_size": 32, "num_gpu_blocks_override": 40}
CLIENTS = 8
CASES = 40
STUCK_SECONDS = 120.0
IDLE_SECONDS = 60.0
LONGER = 8  # times as many tokens, for traces whose blocks do not see them
CANCEL_EVERY = 0.15  # seconds; one attempt in ten finds a trace that runs


@dataclass(frozen=True)
class Case:
    """One trace, which is run many times.

    Attributes:
        kind: one of `KINDS`.
        prompt: token ids of the prompt.
        sampling: the engine's sampling parameters.
        layer: the layer that the block uses.
        scale: the number that the block multiplies by or adds.
        end: the step in which the block stops or raises.
        tag: a number that no other case has.
    """

    kind: str
    prompt: list[int]
    sampling: dict[str, Any]
    layer: int
    scale: float
    end: int
    tag: int


Watch = Callable[[Any], Any]  # takes a tracer before its block is captured, and returns it


def read(model: Any, case: Case, watch: Watch) -> list[Any]:
    layer = case.layer
    with watch(model.trace(case.prompt, **case.sampling)) as tracer:
        hidden = model.model.layers[layer].mlp.output.save()
        logits = [].save()
        for _ in tracer.iter[:]:
            logits.append(model.logits.output.save())
    return [hidden, *logits, *tracer.result.token_ids]


def edit_the_prompt(model: Any, case: Case, watch: Watch) -> list[Any]:
    layer, scale = case.layer, case.scale
    with watch(model.trace(case.prompt, **case.sampling)) as tracer:
        model.model.layers[layer].mlp.output[:] *= scale
        hidden = model.model.layers[layer].mlp.output.save()
        logits = model.logits.output.save()
        result = tracer.result.save()
    return [hidden, logits, *result.token_ids]


def edit_every_step(model: Any, case: Case, watch: Watch) -> list[Any]:
    layer, scale = case.layer, case.scale
    with watch(model.trace(case.prompt, **case.sampling)) as tracer:
        logits = [].save()
        for _ in tracer.iter[:]:
            model.model.layers[layer].mlp.output[:, ::7] += scale
            logits.append(model.logits.output.save())
    return [*logits, *tracer.result.token_ids]


def stop(model: Any, case: Case, watch: Watch) -> list[Any]:
    end = case.end
    with watch(model.trace(case.prompt, **case.sampling)) as tracer:
        logits = [].save()
        for step in tracer.iter[:]:
            logits.append(model.logits.output.save())
            if step == end:
                tracer.stop()
    return [*logits, *tracer.result.token_ids]


def fail(model: Any, case: Case, watch: Watch) -> list[Any]:
    end, tag = case.end, case.tag
    with watch(model.trace(case.prompt, **case.sampling)) as tracer:
        for step in tracer.iter[:]:
            model.logits.output
            if step == end:
                raise ValueError(f"the error of case {tag}")
    return []


def nothing(model: Any, case: Case, watch: Watch) -> list[Any]:
    with watch(model.trace(case.prompt, **_longer(case))) as tracer:
        pass
    return list(tracer.result.token_ids)


def read_and_leave(model: Any, case: Case, watch: Watch) -> list[Any]:
    layer = case.layer
    with watch(model.trace(case.prompt, **_longer(case))) as tracer:
        hidden = model.model.layers[layer].mlp.output.save()
        logits = model.logits.output.save()
    return [hidden, logits, *tracer.result.token_ids]


def never_reach(model: Any, case: Case, watch: Watch) -> list[Any]:
    with watch(model.trace(case.prompt, **{**case.sampling, "max_tokens": 2})) as tracer:
        for _ in tracer.iter[5]:
            model.logits.output
    return []


def two_prompts(model: Any, case: Case, watch: Watch) -> list[Any]:
    layer, scale = case.layer, case.scale
    with watch(model.trace(**case.sampling)) as tracer:
        kept = {}.save()
        with tracer.invoke(case.prompt):
            kept["first"] = model.model.layers[layer].mlp.output.save()
        with tracer.invoke(case.prompt[::-1]):
            model.model.layers[layer].mlp.output[:] *= scale
            kept["second"] = model.logits.output.save()
    return [kept["first"], kept["second"]]


def _longer(case: Case) -> dict[str, Any]:
    return {**case.sampling, "max_tokens": LONGER * case.sampling["max_tokens"]}


KINDS: dict[str, Callable[[Any, Case, Watch], list[Any]]] = {
    "read": read,
    "edit the prompt": edit_the_prompt,
    "edit every step": edit_every_step,
    "stop": stop,
    "fail": fail,
    "never reach": never_reach,
    "two prompts": two_prompts,
    "nothing": nothing,
    "read and leave": read_and_leave,
}


def cases(seed: int, count: int) -> list[Case]:
    """Return `count` cases of all kinds."""
    rng = random.Random(seed)
    return [
        Case(
            kind=list(KINDS)[tag % len(KINDS)],
            prompt=[rng.randrange(5, 400) for _ in range(rng.choice([2, 9, 33, 90, 128]))],
            sampling={
                "max_tokens": rng.randrange(4, 12),
                "ignore_eos": True,
                **({"temperature": 0.8, "seed": tag} if tag % 5 == 0 else {"temperature": 0.0}),
                **({"min_tokens": 4} if tag % 4 == 0 else {}),
            },
            layer=rng.randrange(1, 4),
            scale=round(rng.uniform(-2, 2), 3),
            end=rng.randrange(0, 4),
            tag=tag,
        )
        for tag in range(count)
    ]


@dataclass
class Report:
    """How often each kind of trace ended in which way, and what was wrong."""

    endings: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def traces(self) -> int:
        """Number of ended traces."""
        return self.endings.total()


class Crowd:
    """Runs cases from many threads, and cancels some.

    Args:
        models: the served model, from several clients. Each has a session of its own, which several threads share.
        known: the cases, with the outcome of each alone.
        lost: names of errors that a trace may end with through no fault of its own, where parts of the service are killed.
    """

    def __init__(self, models: list[Any], known: list[tuple[Case, object]], lost: Collection[str] = ()) -> None:
        self.report = Report()
        self._models = models
        self._known = known
        self._lost = frozenset(lost)
        self._lock = threading.Lock()
        self._running: dict[int, tuple[Any, Any, float]] = {}  # by thread: model, tracer, since when
        self._cancelled: set[str] = set()
        self._until = 0.0
        self._latest = 0.0

    def run(self, seconds: float, traces: int) -> Report:
        """Run `traces` traces at a time for `seconds`, and until one was cancelled; let them end.

        On a machine that is too slow for both, this ends at the latest `STUCK_SECONDS` later.
        """
        self._until = time.monotonic() + seconds
        self._latest = self._until + STUCK_SECONDS
        workers = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(traces)]
        canceller = threading.Thread(target=self._cancel_some, daemon=True)
        for thread in (*workers, canceller):
            thread.start()
        for thread in workers:
            thread.join(max(0.0, self._latest - time.monotonic()) + STUCK_SECONDS)
        canceller.join()
        stuck = sum(thread.is_alive() for thread in workers)
        if stuck:
            self.report.wrong.append(f"{stuck} traces have not ended {STUCK_SECONDS:g} s after the last began")
        return self.report

    def _goes_on(self) -> bool:
        """Whether another trace may begin."""
        now = time.monotonic()
        return now < self._until or (not self.report.endings["cancelled"] and now < self._latest)

    def _work(self, number: int) -> None:
        rng = random.Random(number)
        model = self._models[number % len(self._models)]
        mine = self._known[number % len(self._known)]  # so that every case has its turn
        while self._goes_on():
            case, alone = mine
            mine = rng.choice(self._known)
            tracers: list[Any] = []

            def watch(tracer: Any, tracers: list[Any] = tracers) -> Any:
                tracers.append(tracer)
                with self._lock:
                    self._running[number] = model, tracer, time.monotonic()
                return tracer

            try:
                got: object = outcome_of(model, case, watch)
            except Exception as error:
                got = f"{type(error).__name__}: {error}"
            with self._lock:
                self._running.pop(number, None)
                self._note(case, alone, got, tracers[0].id if tracers else "")

    def _note(self, case: Case, alone: object, got: object, trace_id: str) -> None:
        if isinstance(got, tuple) and got[0] == Cancelled.__name__ and trace_id in self._cancelled:
            self.report.endings["cancelled"] += 1
        elif isinstance(got, tuple) and got[0] in self._lost and got != alone:
            self.report.endings[f"lost: {got[0]}"] += 1
        elif same(got, alone):
            self.report.endings[case.kind] += 1
        else:
            self.report.endings["wrong"] += 1
            self.report.wrong.append(f"{case} gave {_short(got)}, alone {_short(alone)}")

    def _cancel_some(self) -> None:
        rng = random.Random("cancel")
        while self._goes_on():
            time.sleep(CANCEL_EVERY)
            with self._lock:
                running = [(model, tracer) for model, tracer, _ in self._running.values() if tracer.id]
                if not running:
                    continue
                model, tracer = rng.choice(running)
                self._cancelled.add(tracer.id)
            with contextlib.suppress(InterposeError):  # the engine that ran the trace may be gone
                model.session.cancel(model.session.open(), tracer.id)


def outcome_of(model: Any, case: Case, watch: Watch = lambda tracer: tracer) -> object:
    """Run a case; return its values, or the type and the reason of its failure."""
    try:
        return KINDS[case.kind](model, case, watch)
    except InterposeError as error:
        return type(error).__name__, getattr(error, "message", str(error))


def same(mine: object, alone: object) -> bool:
    """Whether two outcomes agree: tokens and reasons exactly, tensors to 1e-4."""
    if isinstance(mine, torch.Tensor) and isinstance(alone, torch.Tensor):
        return mine.shape == alone.shape and torch.allclose(mine, alone, atol=1e-4, rtol=1e-4)
    if isinstance(mine, list) and isinstance(alone, list):
        return len(mine) == len(alone) and all(same(one, other) for one, other in zip(mine, alone, strict=True))
    return type(mine) is type(alone) and mine == alone


def _short(outcome: object) -> str:
    text = (
        str([tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in outcome])
        if isinstance(outcome, list)
        else str(outcome)
    )
    return text[:400]


def stress(
    address: str,
    seconds: float,
    traces: int,
    clients: int = CLIENTS,
    count: int = CASES,
    name: str | None = None,
    keys: Sequence[str | None] = (None,),
) -> Report:
    """Run the crowd against a service; return the report.

    Args:
        address: address of the service.
        seconds: seconds in which new traces begin.
        traces: traces that run at a time.
        clients: sessions that the traces share.
        count: number of different cases.
        name: name of the served model, a demo llama; None for the only model.
        keys: the clients' API keys, in turn; the first gives the results alone.
    """
    with interpose.connect(address, keys[0], progress=False) as observer:
        before = observer.status()
        with contextlib.ExitStack() as connected:
            models = [
                connected.enter_context(interpose.connect(address, keys[number % len(keys)], progress=False)).model(
                    name
                )
                for number in range(clients)
            ]
            known = [(case, outcome_of(models[0], case)) for case in cases(0, count)]
            for model in models:
                model.session.open()  # otherwise a cancellation would wait for the session, behind the crowd
            report = Crowd(models, known).run(seconds, traces)
            report.wrong.extend(left_behind(observer, before, connected))
    return report


def left_behind(observer: interpose.Client, before: StatusReply, connected: contextlib.ExitStack) -> list[str]:
    """Return what the traces and the clients have left behind.

    These are requests that still run when every trace has ended, and values that are still held when the clients have gone.

    Args:
        observer: a client without a session.
        before: the observer's status reply before the other clients came.
        connected: closes the other clients.
    """
    running = _beyond(observer, before, _running)
    connected.close()
    return running + _beyond(observer, before, _held)


def _running(status: StatusReply) -> dict[str, int]:
    return {
        **{f"{model.name}: requests that run": model.running for model in status.models},
        **{f"{model.name}: requests that wait": model.waiting for model in status.models},
        "traces of sessions": sum(tenant.traces_running for tenant in status.tenants),
    }


def _held(status: StatusReply) -> dict[str, int]:
    return {
        **_running(status),
        "sessions": status.sessions,
        "sessions of replicas": sum(replica.sessions for model in status.models for replica in model.each),
        "stored bytes": sum(tenant.stored_bytes for tenant in status.tenants),
    }


def _beyond(
    observer: interpose.Client, before: StatusReply, counts: Callable[[StatusReply], dict[str, int]]
) -> list[str]:
    """Return the counts that do not return to their earlier values in time."""
    deadline = time.monotonic() + IDLE_SECONDS
    had = counts(before)
    while True:
        left = [
            f"{what}: {count}, before {had.get(what, 0)}"
            for what, count in counts(observer.status()).items()
            if count > had.get(what, 0)
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def _served(tensor_parallel_size: int, seconds: float, traces: int, sandboxed: float) -> Report:
    """Run the crowd against a service of its own, some of it in sandboxes."""
    service = Service(tensor_parallel_size, CLIENTS, ENGINE, tenants=tenants.TENANTS)
    try:
        address = service.address()
        before = tenants.sandboxes(service.process)
        report = stress(address, seconds, traces, keys=tenants.keys(CLIENTS, sandboxed))
        report.wrong.extend(tenants.left(service.process, before, IDLE_SECONDS))
        return report
    finally:
        service.close()


def main() -> int:
    """Run the stress test as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stress", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="how long new traces begin (default: 300)")
    parser.add_argument("--traces", type=int, default=200, help="how many run at a time (default: 200)")
    parser.add_argument("--address", help="of a service with a demo llama; without it, one is served for the time")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=2, help="of the service that is served (default: 2)"
    )
    parser.add_argument(
        "--sandboxed",
        type=float,
        default=tenants.SHARE,
        metavar="SHARE",
        help=f"of the clients of the service that is served, whose blocks run in sandboxes (default: {tenants.SHARE:g})",
    )
    args = parser.parse_args()
    if args.address:
        report = stress(args.address, args.seconds, args.traces)
    else:
        report = _served(args.tensor_parallel_size, args.seconds, args.traces, args.sandboxed)
    for kind, count in sorted(report.endings.items()):
        print(f"  {kind:16} {count}")
    print(f"  {'traces':16} {report.traces}")
    for line in report.wrong:
        print(f"wrong: {line}")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
