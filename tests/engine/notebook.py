"""A notebook on an engine in this process: the client's own capture, encoding and decoding, with no server between.

`notebook` gives an `interpose.tracing.model.Model` with a session that runs traces on a `LocalEngine`. Everything a block goes
through is the real thing but for gRPC, Ray and admission.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

from executor.core.request import shipped
from executor.engine.failures import MOST_STEPS
from interpose.program.libraries import Libraries
from interpose.rpc.progress import Progress
from interpose.rpc.session import Session
from interpose.tracing.model import Model
from interpose.v1.model_pb2 import ModelDescription
from interpose.v1.service_pb2 import Limits
from interpose.v1.trace_pb2 import Event, Log, Output, Trace
from interpose.v1.value_pb2 import Blob
from interpose.wire.gang import gang_of, start_after
from tests.engine.harness import Block, LocalEngine, request_of

LIMITS = Limits(
    max_message_bytes=16 << 20,
    max_upload_bytes=1 << 30,
    max_invokes=64,
    chunk_bytes=1 << 20,
    inline_bytes=16 << 10,
    max_program_bytes=1 << 20,
)


class LocalSession(Session):
    """Runs traces on an engine in this process.

    Attributes:
        traces: what was submitted, as it would have travelled.
    """

    def __init__(self, engine: LocalEngine, description: ModelDescription) -> None:
        nowhere: Any = None
        super().__init__(nowhere, LIMITS, Progress(False))
        self._engine = engine
        self._description = description
        self.traces: list[Trace] = []

    def submit(self, trace: Trace, blobs: Mapping[str, memoryview]) -> Generator[tuple[str, Event], None, None]:
        trace = Trace.FromString(trace.SerializeToString())
        self.traces.append(trace)
        outbox = self._engine.worker.interpose_outbox
        for digest, data in blobs.items():
            assert digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
            outbox.uploads[digest] = bytes(data)
        if trace.scan:
            yield from self._scan(trace)
            return
        from executor.engine.requests import sampling_of  # with it vLLM, whose environment is set first

        config, tokenizer = self._engine.llm.llm_engine.vllm_config, self._engine.llm.get_tokenizer()
        blocks = [
            Block(
                list(invoke.prompt.token_ids.ids),
                sampling=sampling_of(trace, invoke, self._description, config, tokenizer),
                after=tuple(sorted(waits_for)),
                gang=len(gang_of(trace)) if invoke.gang else 0,
                joint=invoke.joint,
            )
            for invoke, waits_for in zip(trace.invokes, start_after(trace), strict=True)
        ]
        for index, ran in enumerate(self._engine.run_traces([blocks], captured=trace)):
            yield "local", ran.output or Event(output=Output(invoke=index, finished=True))
            if ran.logs:
                yield "local", Event(log=Log(invoke=index, text=ran.logs))
            for event in ran.events:
                yield "local", Event.FromString(event)
        outbox.uploads.clear()

    def _scan(self, trace: Trace) -> Generator[tuple[str, Event], None, None]:
        numbers = {binding.name: binding.value.integer for binding in trace.sampling}
        prompt = list(trace.invokes[0].prompt.token_ids.ids)
        steps = MOST_STEPS if trace.explain else numbers.get("max_tokens", 1)
        _, events, _ = self._engine.worker.interpose_scan(shipped(request_of(trace), None), prompt, steps)
        yield "local", Event(output=Output(finished=True))
        for event in events:
            yield "local", Event.FromString(event)

    def fetch(self, session_id: str, blobs: Sequence[Blob]) -> dict[str, np.ndarray]:
        outbox = self._engine.worker.interpose_outbox
        return {blob.id: np.frombuffer(bytearray(outbox.blobs.pop(blob.id)), np.uint8) for blob in blobs}


class _Client:
    def __init__(self, engine: LocalEngine, description: ModelDescription) -> None:
        self.awaited = False
        self.session = self.current_session = LocalSession(engine, description)
        self.limits = LIMITS
        self.libraries = Libraries()
        self.progress = Progress(False)


def notebook(engine: LocalEngine) -> Any:
    """Return the engine's model as a notebook has it; its traces run in this process."""
    description = engine.describe()
    return Model(_Client(engine, description), description)  # type: ignore[arg-type]
