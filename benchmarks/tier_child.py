"""One in-process engine of `benchmarks.tiers`.

`python -m benchmarks.tier_child stock|interpose CHECKPOINT [OPTIONS]`. OPTIONS are further options of vLLM's LLM, as JSON. An
answer is the seconds of a batch, a report of its parts, or a text that says why the batch does not count. With "sandbox" among
OPTIONS the engine has sandboxed processes, with "sandbox_plans" plans of their blocks.
"""

from __future__ import annotations

import cProfile
import io
import itertools
import json
import os
import pstats
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.engine_child import CORES, BenchLimits, middle, switched_on
from benchmarks.models import prompts
from benchmarks.rounds import answer_forever
from benchmarks.tier_rows import ROWS, Row, constants, with_locations
from benchmarks.traced_batch import TracedBlock, TracedTrace, finish_all

TOP = 40  # functions of a profile that are shown
ENGINE = {"enable_chunked_prefill": False, "enable_prefix_caching": False}  # options of vLLM's engine


def main(kind: str, checkpoint: str, given: str = "{}") -> None:
    """Load the engine, and answer requests for timed batches."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    engine = Engine(kind, checkpoint, json.loads(given))
    answer_forever(engine.answer)


class Engine:
    """One engine, stock or with traces.

    Args:
        kind: "stock" or "interpose".
        checkpoint: folder of the model.
        given: options of vLLM's LLM.
    """

    def __init__(self, kind: str, checkpoint: str, given: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        options = {**ENGINE, **given}
        self._traced = kind == "interpose"
        if self._traced:
            from executor.plugin.config import trace_options

            sandboxes = {name: bool(options.pop(name, False)) for name in ("sandbox", "sandbox_plans")}
            switches = switched_on(trace_options) | sandboxes
            options |= trace_options(BenchLimits, "local", **switches)
        llm = LLM(model=checkpoint, **options)
        if current_platform.is_cuda():  # as in `benchmarks.engine_child`
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-CORES:])
        self.llm: Any = llm.llm_engine
        config = self.llm.model_config
        self.layers = config.get_num_layers(self.llm.vllm_config.parallel_config)
        self._hidden = config.get_hidden_size()
        self._dtype = config.dtype
        self._detokenize = not config.skip_tokenizer_init
        self._blocks: dict[str, TracedBlock] = {}
        self._constants: dict[str, Any] = {}
        self._prompts: dict[int, Any] = {}
        self._ids = itertools.count()

    @property
    def worker(self) -> Any:
        """The engine's only worker."""
        return self.llm.model_executor.driver_worker.worker

    def answer(
        self,
        row: str,
        batch: int,
        prompt_tokens: int,
        tokens: int,
        joined: bool = False,
        report: str = "",
        locations: int = 0,
        trusted: bool = True,
        traced: int | None = None,
    ) -> Any:
        """Return the seconds of a batch, or why it does not count.

        Args:
            row: one of `ROWS`; with `locations` a kind of `with_locations`. A stock engine runs its batch without blocks.
            batch: requests of the batch.
            prompt_tokens, tokens: numbers of tokens of each request.
            joined: whether all requests with a block are invokes of one trace.
            report: in place of the seconds: "layers" for the number of the model's layers, "parts" for the milliseconds of the
                batch's parts, "profile" for these and a profile.
            locations: on how many layers the block works.
            trusted: whether blocks may run in the worker's own process.
            traced: how many of the requests have a block; None: as the row says.
        """
        chosen = with_locations(row, locations) if locations else ROWS[row]
        chosen = chosen if traced is None else replace(chosen, traced=traced)
        run = Batch(self, chosen, batch, prompt_tokens, tokens, joined, trusted)
        profile = cProfile.Profile() if report == "profile" else None
        try:
            seconds = run.run(profile)
            run.check(self.layers, tokens)
        except Exception as error:
            run.drop()
            return f"{type(error).__name__}: {error}"
        if not report:
            return seconds
        if report == "layers":
            return self.layers
        return {**run.parts(), **({"profile": shown(profile)} if profile is not None else {})}

    def ways(self) -> Counter[str]:
        """Return how many steps have run which way so far, and how many graphs were captured."""
        dispatcher = getattr(getattr(self.worker.model_runner, "graphs", None), "dispatcher", None)
        if dispatcher is None:
            return Counter()
        counts = dispatcher.counts
        made = {"captured": counts.captured, "failed": counts.failed, "mismatched": counts.mismatched}
        return counts.steps + Counter(made)

    def traces(self, row: Row, count: int, joined: bool, trusted: bool = True) -> list[TracedTrace]:
        """Return the traces of a batch's requests with a block."""
        if not self._traced or not row.source or not count:
            return []
        if row.source not in self._blocks:
            self._constants = self._constants or constants(self._hidden, self._dtype)
            captured = {name: self._constants[name] for name in row.captured}
            uploads = self.worker.interpose_outbox.uploads
            self._blocks[row.source] = TracedBlock(row.source, captured, uploads)
        return self._blocks[row.source].batches(count, joined, trusted)

    def prompt(self, tokens: int) -> list[int]:
        """Return a new prompt."""
        prompt: list[int] = next(self._prompts.setdefault(tokens, prompts(tokens)))
        return prompt

    def add(
        self,
        name: str,
        prompt: int | list[int],
        tokens: int,
        extra_args: dict[str, Any] | None = None,
        increments: bool = False,
    ) -> None:
        """Add a request to the engine.

        Args:
            name: the request's id.
            prompt: its prompt, or the number of tokens of a new one.
            tokens: how many tokens it generates.
            extra_args: of the request, if it is traced.
            increments: whether each token is an output; otherwise all of them are one.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=tokens,
            detokenize=self._detokenize,
            temperature=0.0,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA if increments else RequestOutputKind.FINAL_ONLY,
            extra_args=extra_args,
        )
        ids = self.prompt(prompt) if isinstance(prompt, int) else prompt
        self.llm.add_request(name, {"prompt_token_ids": ids}, params)

    def name(self) -> str:
        """Return an id for a request."""
        return str(next(self._ids))


class Batch:
    """One timed batch of an engine.

    Args:
        engine: the engine.
        row: the kind of block.
        batch: requests of the batch.
        prompt_tokens, tokens: numbers of tokens of each request.
        joined: whether all requests with a block are invokes of one trace.
        trusted: whether blocks may run in the worker's own process.
    """

    def __init__(
        self, engine: Engine, row: Row, batch: int, prompt_tokens: int, tokens: int, joined: bool, trusted: bool = True
    ) -> None:
        self._engine = engine
        self._row = row
        traced = batch if row.traced is None else row.traced
        self._traces = engine.traces(row, traced, joined and traced > 1, trusted)
        invokes = [(trace, invoke) for trace in self._traces for invoke in range(trace.invokes)]
        names = [engine.name() for _ in range(batch)]
        self._traced = dict(zip(names, invokes, strict=False))
        self._plain = set(names[len(invokes) :])
        self._prompts = {name: engine.prompt(prompt_tokens) for name in names}
        self._tokens = tokens
        self._ways: dict[str, int] = {}
        self._marks: list[float] = []  # perf_counter at the begin, after admission, after each step, and at the end

    def run(self, profile: cProfile.Profile | None) -> float:
        """Return the seconds from the first request to the last value.

        In a batch with requests without a block beside others, it is the time to the last output of a request without a block.

        Args:
            profile: is on while the batch runs, if it is given.
        """
        llm = self._engine.llm
        waited = set(self._plain if self._traced else ())
        before = self._engine.ways()
        until = 0.0
        if profile is not None:
            profile.enable()
        marks = self._marks = [time.perf_counter()]
        for trace in self._traces:
            trace.open(self._engine.worker)
        for name, prompt in self._prompts.items():
            trace, invoke = self._traced.get(name, (None, 0))
            extra_args = trace.extra_args(invoke) if trace is not None else None
            self._engine.add(name, prompt, self._tokens, extra_args)
        marks.append(time.perf_counter())
        finished: dict[str, Any] = {}
        while llm.has_unfinished_requests():
            finished |= {output.request_id: output for output in llm.step() if output.finished}
            marks.append(time.perf_counter())
            if waited and waited <= finished.keys():
                waited, until = set(), marks[-1]
        ended = [(trace, invoke, finished[name]) for name, (trace, invoke) in self._traced.items()]
        finish_all(self._engine.worker, ended)
        marks.append(time.perf_counter())
        if profile is not None:
            profile.disable()
        self._ways = dict(self._engine.ways() - before)
        return (until or marks[-1]) - marks[0]

    def check(self, layers: int, tokens: int) -> None:
        """Check that every value came, with the shape of its step.

        Raises:
            RuntimeError: some did not.
        """
        expected = self._row.expected(layers, tokens)
        for trace in self._traces:
            came = list(trace.values(self._engine.worker.interpose_outbox.blobs))
            for kept in came:
                if len(kept) != expected:
                    raise RuntimeError(f"{len(kept)} values came instead of {expected}")
                rows = {len(value) for value in kept[expected // tokens :]}  # of the steps after the prompt
                if rows - {1}:
                    raise RuntimeError(f"values of {sorted(rows)} rows came instead of one row")
            if expected and len(came) != trace.invokes:
                raise RuntimeError(f"{len(came)} lists of values came instead of {trace.invokes}")

    def drop(self) -> None:
        """Give everything up that still runs."""
        self._engine.llm.abort_request(list(self._prompts))
        for trace in self._traces:
            trace.drop(self._engine.worker)

    def parts(self) -> dict[str, Any]:
        """Return the milliseconds of the batch's parts, and its steps by the way they ran.

        Only steps for which the engine decides on a graph are counted.
        """
        begin, admitted, *steps = self._marks
        *steps, end = steps
        took = [(later - earlier) * 1e3 for earlier, later in itertools.pairwise([admitted, *steps])]
        ordered = sorted(took)
        return {
            "admission": (admitted - begin) * 1e3,
            "steps": len(took),
            "first step": took[0],
            "typical step": middle(took),
            "median step": statistics.median(took),
            "longest steps": ordered[-3:],
            "finish": (end - steps[-1]) * 1e3,
            "all": (end - begin) * 1e3,
            "ways": self._ways,
        }


def shown(profile: cProfile.Profile) -> str:
    """Return a profile's functions with the longest times, and the times of each folder.

    The times are a function's own. Its calls do not say much, since a block waits inside of functions while others run.
    """
    text = io.StringIO()
    stats = pstats.Stats(profile, stream=text)
    stats.strip_dirs().sort_stats("tottime").print_stats(TOP)
    folders: Counter[str] = Counter()
    for entry in profile.getstats():
        folders[folder_of(entry.code)] += entry.inlinetime
    lines = [f"{seconds * 1e3:9.2f} ms  {name}" for name, seconds in folders.most_common(TOP // 2)]
    return "\n".join([text.getvalue().strip(), "", "own time by folder:", *lines])


def folder_of(code: Any) -> str:
    """Return a profiled function's folder below its library, or the kind of a builtin function."""
    if isinstance(code, str):
        return "torch's operations" if "torch" in code else "builtin functions"
    parts = Path(code.co_filename).parts[:-1]
    if "site-packages" in parts:
        parts = parts[parts.index("site-packages") + 1 :]
    else:
        parts = parts[-2:]
    return "/".join(parts[:4])


if __name__ == "__main__":
    main(*sys.argv[1:])
