"""Asks the workers before a trace whether its blocks can run over prompts in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executor.core.request import step_tokens
from executor.core.text import clip
from executor.engine.failures import TraceFailed
from executor.engine.rpc import call_workers
from interpose.v1 import trace_pb2 as pb


async def check_long_prompts(
    llm: Any,
    trace: pb.Trace,
    requests: Mapping[int, tuple[Any, dict[str, Any]]],
    shipment: dict[str, Any],
) -> None:
    """Refuse a trace with a block that cannot run over a prompt that is longer than a step.

    Args:
        llm: vLLM's engine.
        trace: the trace.
        requests: prompt and sampling parameters of each invoke that has a prompt.
        shipment: the trace, as the workers get it.

    Raises:
        TraceFailed: with the reason, and what to write instead.
    """
    step = step_tokens(llm.vllm_config.scheduler_config)
    for index, (prompt, _) in requests.items():
        tokens = len(prompt["prompt_token_ids"])
        if tokens <= step:
            continue
        replies = [reply for reply in await call_workers(llm, "interpose_follow", shipment, index, tokens) if reply]
        if replies:
            failure = pb.Failure.FromString(replies[0])
            failure.trace_id, failure.invoke, failure.message = trace.id, index, clip(failure.message)
            raise TraceFailed(failure)
