"""vLLM's scheduler, told by the workers which requests are over.

A block that fails or calls `tracer.stop()` ends its request in the very step: the runner names it in its output, and the
scheduler treats the token of this step as the request's last, whatever `min_tokens` or `ignore_eos` say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class EndedModelRunnerOutput(ModelRunnerOutput):
    """A step's output that also names the requests whose blocks ended them, with the reason."""

    ended: dict[str, str] = field(default_factory=dict)


class InterposeScheduler(Scheduler):
    """The stock scheduler, plus the end of requests that their blocks ended."""

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        if isinstance(model_runner_output, EndedModelRunnerOutput):
            for request_id in model_runner_output.ended:
                request = self.requests.get(request_id)
                if request is not None:
                    request.max_tokens = request.num_output_tokens + 1
        return super().update_from_output(scheduler_output, model_runner_output)
