"""The failures of traces and invokes, and the checks that refuse a trace before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executor.core.request import step_tokens
from executor.core.text import clip
from interpose.contract.errors import with_retry
from interpose.v1 import trace_pb2 as pb

MOST_STEPS = 16  # of a scan


class TraceFailed(Exception):
    """A trace or one of its invokes failed; the exception carries the failure for the client."""

    def __init__(self, failure: pb.Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def failed_event(trace: pb.Trace, index: int, code: int, message: str, retry_after: float = 0.0) -> pb.Event:
    """Return the event of an invoke that failed; `index` is -1 for the whole trace."""
    failure = pb.Failure(code=code, message=clip(message), trace_id=trace.id, invoke=index, retry_after=retry_after)  # type: ignore[arg-type]
    return pb.Event(failed=with_retry(failure))


def check_traced(trace: pb.Trace, why_untraced: str) -> None:
    """Refuse a trace where the engine serves plain requests only."""
    if not why_untraced or (trace.HasField("openai") and not trace.openai.traced):
        return
    message = (
        f"this model is served without traces: {why_untraced}. Completions without a block are served over HTTP, for the clients "
        "of OpenAI; for traces, have the model served without that option"
    )
    raise TraceFailed(failed_event(trace, -1, pb.ERROR_CODE_INVALID_ARGUMENT, message).failed)


def check_scan(trace: pb.Trace, steps: int | None, stages: int, tokens: int, most: int) -> None:
    """Refuse a scan that this engine does not take.

    Args:
        steps: the scan's largest number of steps; None if it has none.
        stages: pipeline stages of the model.
        tokens, most: the number of the prompt's tokens, and of the tokens that a step of the engine has at most.
    """
    if tokens > most:
        message = (
            f"a scan runs its prompt in one step, which has up to {most} tokens; this prompt has {tokens}: use a shorter one, "
            "whose shapes are the same but for the number of rows"
        )
        raise TraceFailed(failed_event(trace, 0, pb.ERROR_CODE_INVALID_ARGUMENT, message).failed)
    if stages > 1:
        what = "model.explain" if trace.explain else "model.scan"
        rather = "tracer.accounting.tiers" if trace.explain else "the shapes of its values"
        message = (
            f"{what} runs a model on one pipeline stage, and this one is served on several; write model.trace(prompt, "
            f"max_tokens=1) and read {rather}"
        )
        raise TraceFailed(failed_event(trace, 0, pb.ERROR_CODE_INVALID_ARGUMENT, message).failed)
    if steps is None or steps > MOST_STEPS:
        many = steps or "as many as there may be"
        message = (
            f"a scan goes through up to {MOST_STEPS} steps, not {many}; all steps after the first have the same shapes, so "
            "max_tokens=2 shows them"
        )
        raise TraceFailed(failed_event(trace, 0, pb.ERROR_CODE_INVALID_ARGUMENT, message).failed)


def check_room(
    trace: pb.Trace, gang: list[int], requests: Mapping[int, tuple[Any, dict[str, Any]]], scheduler: Any
) -> None:
    """Refuse invokes that could never start in one step of the engine.

    Args:
        gang: indices of the invokes that start together.
        requests: prompt and sampling parameters of each invoke.
        scheduler: the engine's `SchedulerConfig`.
    """
    if not gang:
        return
    tokens = sum(len(requests[index][0]["prompt_token_ids"]) for index in gang)
    for size, most, what, setting in (
        (len(gang), scheduler.max_num_seqs, "requests", "max_num_seqs"),
        (tokens, step_tokens(scheduler), "tokens of their prompts", "max_num_batched_tokens"),
    ):
        if size > most:
            message = (
                f"the invokes that run together have {size} {what} together, and the engine runs up to {most} in "
                f"one step; trace fewer or shorter prompts together, or have {setting} raised where the model is served"
            )
            raise TraceFailed(failed_event(trace, gang[0], pb.ERROR_CODE_INVALID_ARGUMENT, message).failed)
