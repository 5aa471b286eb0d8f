"""What blocks of every kind cost, as a ratio to stock vLLM as it is deployed.

Each row of `benchmarks.tier_rows` is measured with one request and with 32, all with prompts of 64 tokens. The engines are a
stock engine, another stock engine as the control, and an engine with traces; all run in processes on one GPU, and answer one at a
time in alternating rounds. Stock runs the same batch without blocks. A time is that of the whole batch, from the first request to
the last value; of "31 beside one" it is the time until the 31 requests without a block have ended. A row's first run, in which
plans and graphs are made, does not count, and stands in the result as "first".

With `--service` the rows run through a whole service too: gRPC, Ray Serve, a session. The ratio of these rows is to stock as
well, and "to engine" is the ratio to the engine in the same rounds; the control is then left out. `--joined` makes one trace of a
batch instead of one for each request. `--profile ROW` measures nothing but that row's parts: admission, steps and finish, and the
functions that take the time.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine_child import switched_on
from benchmarks.graph_steps import MEMORY, PROMPT_TOKENS
from benchmarks.models import Model
from benchmarks.rounds import Asked, Child, Measured, alternate
from benchmarks.served import Service
from benchmarks.tier_child import ENGINE
from benchmarks.tier_rows import ROWS
from benchmarks.tier_traces import TraceRows
from serve_app.settings import ModelSettings

SECONDS = 225.0  # seconds of a run, with the engines' starts
ROUNDS = 40  # rounds of a group, at most
LEAST_SECONDS = 20.0  # seconds for the rounds, however long the engines took to start
STOCK = {"stock": "stock", "control": "stock"}


@dataclass(frozen=True)
class Group:
    """Rows that are measured in the same rounds.

    Attributes:
        batch: requests at a time.
        rows: names of `ROWS`.
        share: the group's share of the time.
    """

    batch: int
    rows: tuple[str, ...]
    share: float

    @property
    def tokens(self) -> int | None:
        """New tokens of each request, if the rows say it."""
        return ROWS[self.rows[0]].tokens


FAST = ("plain", "capture one", "steer", "sae", "probe", "capture all")
GROUPS = (
    Group(1, FAST, 3),
    Group(1, ("first token",), 1),
    Group(32, ("first token",), 1),
    Group(32, (*FAST, "31 beside one"), 4),
    Group(1, ("decide one", "decide all", "unplannable one", "python one", "unplannable all"), 2),
    Group(32, ("decide one", "decide all", "unplannable one", "python one"), 2),
    Group(32, ("unplannable all",), 2),
)


def run(
    *,
    model: str | None = None,
    dtype: str | None = None,
    rounds: int | None = None,
    seconds: float | None = None,
    rows: Sequence[str] | None = None,
    profile: str | None = None,
    service: bool | None = None,
    joined: bool | None = None,
) -> dict[str, dict[str, float]]:
    """Return ms/step of each row, and its ratio to stock vLLM.

    Args:
        model, dtype: see `Model.chosen`.
        rounds: rounds of each group, at most.
        seconds: seconds of the run, with the engines' starts.
        rows: names of `ROWS`; by default all but the extra rows.
        profile: a row whose parts and profile are printed, in place of the measurement.
        service: whether the rows run through a service too.
        joined: whether the requests of a batch are invokes of one trace.
    """
    measured_model = Model.chosen(model, dtype)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        options = engine_options(measured_model, Path(folder))
        kinds = ["interpose"] if profile else ["stock", "interpose"] if service else ["stock", "control", "interpose"]
        options["gpu_memory_utilization"] = min(
            options["gpu_memory_utilization"], MEMORY / (len(kinds) + bool(service))
        )
        bench = _Bench(measured_model, joined=bool(joined))
        if service:
            bench.asked["service"] = stack.enter_context(_service(folder, options))
        bench.asked |= stack.enter_context(engines(kinds, folder, options))
        for one in bench.asked.values():
            one.ask(row="plain", batch=1, prompt_tokens=PROMPT_TOKENS, tokens=1)
        print(f"  {len(bench.asked)} engines run after {time.monotonic() - began:.0f} s", flush=True)
        if profile:
            return bench.profile(profile)
        wanted = list(rows or (name for name, row in ROWS.items() if not row.extra))
        left = max(LEAST_SECONDS, (seconds or SECONDS) - (time.monotonic() - began))
        groups = chosen(GROUPS, wanted)
        shares = sum(group.share for group in groups)
        for group in groups:
            started = time.monotonic()
            bench.measure(group, rounds or (ROUNDS if measured_model.gpu else 2), left * group.share / shares)
            left = max(0.0, left - (time.monotonic() - started))
            shares -= group.share
        return bench.figures


def engine_options(model: Model, folder: Path) -> dict[str, Any]:
    """Write a model; return the options of vLLM's LLM that all engines of a comparison have."""
    options = model.write(folder)
    return {**options, "skip_tokenizer_init": True, "disable_log_stats": True}


def chosen(groups: Sequence[Group], rows: Sequence[str]) -> list[Group]:
    """Return the groups with these rows alone, without the groups that are then empty."""
    kept = [Group(group.batch, tuple(row for row in group.rows if row in rows), group.share) for group in groups]
    return [group for group in kept if group.rows]


@contextlib.contextmanager
def engines(kinds: Sequence[str], folder: str, options: dict[str, Any]) -> Iterator[dict[str, Child]]:
    """Start an engine of every kind, all at the same time; end them afterwards."""
    children: dict[str, Child] = {}
    try:
        for kind in kinds:
            argv = (STOCK.get(kind, kind), folder, json.dumps(options))
            children[kind] = Child("benchmarks.tier_child", *argv, environment={"VLLM_PLUGINS": "none"})
        yield children
    finally:
        for child in children.values():
            child.stop()
        for child in children.values():
            child.close()


@contextlib.contextmanager
def _service(folder: str, options: dict[str, Any]) -> Iterator[TraceRows]:
    """Serve a model during the `with` block, which gets what runs rows through the service."""
    engine = {name: value for name, value in options.items() if name != "skip_tokenizer_init"} | ENGINE
    service = Service(1, 1, engine, Path(folder), model=switched_on(ModelSettings))
    try:
        with TraceRows(service.address) as rows:
            yield rows
    finally:
        service.close()


class Answering:
    """An engine whose refusals are errors.

    Args:
        asked: the engine.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def ask(self, **request: Any) -> float:
        """Return the seconds of a batch.

        Raises:
            RuntimeError: the batch does not count, with the reason.
        """
        answer = self._asked.ask(**request)
        if isinstance(answer, str):
            raise RuntimeError(f"{request['row']}, batch {request['batch']}: {answer}")
        return float(answer)


class _Bench:
    """The engines of a run, and what was measured.

    Args:
        model: the measured model.
        joined: whether the requests of a batch are invokes of one trace.

    Attributes:
        asked: the engines, by kind.
        figures: the rows of the result.
    """

    def __init__(self, model: Model, joined: bool) -> None:
        self.asked: dict[str, Any] = {}
        self.figures: dict[str, dict[str, float]] = {}
        self._model = model
        self._joined = joined
        self._tokens = 128 if model.gpu else 8

    def _request(self, row: str, group: Group) -> dict[str, Any]:
        tokens = group.tokens or self._tokens
        request = {"row": row, "batch": group.batch, "prompt_tokens": PROMPT_TOKENS, "tokens": tokens}
        return {**request, **({"joined": True} if self._joined else {})}

    def measure(self, group: Group, rounds: int, seconds: float) -> None:
        """Measure the rows of a group. A row that an engine refuses is left out, with a message."""
        began = time.monotonic()
        plain = self._request("plain", group)
        cases: list[tuple[str, Asked, dict[str, Any]]] = [
            (kind, Answering(self.asked[kind]), plain) for kind in STOCK if kind in self.asked
        ]
        for _, asked, request in cases:
            asked.ask(**request)
        first: dict[str, float] = {}
        for row in group.rows:
            for kind in ("interpose", "service"):
                if kind not in self.asked:
                    continue
                name, request = f"{row}: {kind}", self._request(row, group)
                asked = Answering(self.asked[kind])
                try:
                    first[name] = asked.ask(**request)
                    self._again(kind, request, name, group)
                except RuntimeError as error:
                    print(f"  {self._name(group, name)} does not count: {error}", flush=True)
                    continue
                cases.append((name, asked, request))
        left = max(0.0, seconds - (time.monotonic() - began))
        taken = {one.name: one for one in alternate(cases, rounds, False, left)}
        for name, one in taken.items():
            row = self._row(one, taken, group, name)
            if name in first:
                row["first"] = first[name] / (group.tokens or self._tokens) * 1e3
            key = self._name(group, name if name in first else f"{name} beside {group.rows[0]}")
            self.figures[key] = row
            shown = f"{row['ms/step']:.4g} ms/step" + (f", ratio {row['ratio']:.3f}" if "ratio" in row else "")
            print(f"  {key}: {shown}, {len(one.seconds)} rounds", flush=True)

    def _again(self, kind: str, request: dict[str, Any], name: str, group: Group) -> None:
        """Run a row once more, with what its first run prepared, and print how its steps ran.

        Raises:
            RuntimeError: the row does not count.
        """
        if kind != "interpose":
            Answering(self.asked[kind]).ask(**request)
            return
        report = self.asked[kind].ask(**request, report="parts")
        if isinstance(report, str):
            raise RuntimeError(report)
        print(
            f"  {self._name(group, name)}: {json.dumps(report.get('ways', {}))} of {report['steps']} steps", flush=True
        )

    def _name(self, group: Group, name: str) -> str:
        return f"{self._model.size}, batch {group.batch}, {name}"

    def _row(self, one: Measured, taken: dict[str, Measured], group: Group, name: str) -> dict[str, float]:
        tokens = group.tokens or self._tokens
        row = {"ms/step": one.median / tokens * 1e3, "fastest": min(one.seconds) / tokens * 1e3}
        if name != "stock":
            row |= one.over(taken["stock"]).figures()
        kind = name.partition(": ")[2]
        engine = taken.get(name.replace(": service", ": interpose"))
        if kind == "service" and engine is not None:
            row["to engine"] = one.over(engine).median
        goal = ROWS[name.partition(": ")[0]].goals.get((self._model.size, group.batch)) if kind else None
        return {**row, **({"goal": goal} if goal is not None else {}), "rounds": len(one.seconds)}

    def profile(self, row: str) -> dict[str, dict[str, float]]:
        """Print the parts and the profile of a row, at both batch sizes; return the parts."""
        for group in chosen(GROUPS, [row]):
            request = self._request(row, group)
            ask: Callable[..., Any] = self.asked["interpose"].ask
            for report in ("", "", "parts", "profile"):  # What the first run prepares is there in the others.
                answer = ask(**request, report=report)
                if isinstance(answer, str):
                    raise RuntimeError(answer)
                if not report:
                    continue
                text = answer.pop("profile", "")
                key = self._name(group, f"{row}: {report}")
                print(f"  {key}: {json.dumps(answer)}\n{text}", flush=True)
                self.figures[key] = {name: value for name, value in answer.items() if isinstance(value, int | float)}
        return self.figures
