"""Which traced requests may run a step before the token of the step ahead is known.

With async scheduling, a step is scheduled before the step ahead of it has ended. The worker runs the steps one after the other,
so a block finds its own state as it left it, and the model finds the sampled token on the device. The token decides one thing
more: whether the request ends with it. If it does, the block must not see the next step. The worker can tell so from the token
where stop tokens alone can end the request. It cannot find stop strings, repetitions, or the end of a grammar. So requests with
these sit out until the scheduler knows the token. The requests of a gang sit out too, so that they stay in the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from executor.core.ended import Ended
from executor.core.request import InvokeRequest

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.config import VllmConfig


def may_run_ahead(params: SamplingParams, invoke: InvokeRequest, vllm_config: VllmConfig) -> bool:
    """Return whether a traced request may run ahead of the scheduler.

    A step of several pipeline stages samples on the last stage alone.
    """
    return (
        vllm_config.scheduler_config.async_scheduling
        and vllm_config.parallel_config.pipeline_parallel_size == 1
        and invoke.gang <= 1
        and not params.stop
        and params.repetition_detection is None
        and params.structured_outputs is None
    )


class Over:
    """The requests that have ended, as a worker finds it out before the scheduler does.

    A request that runs ahead may be in one more step. In that step it has rows but no block.
    """

    def __init__(self) -> None:
        self._requests: set[str] = set()
        self._ending: dict[str, frozenset[int]] = {}  # the token ids that end a request, by request id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def watch(self, request_id: str, params: SamplingParams) -> None:
        """Look at the sampled tokens of a request that runs ahead."""
        ending = frozenset([*(params.stop_token_ids or ()), params.eos_token_id]) - {None}
        if ending:
            self._ending[request_id] = ending

    def sampled(self, request_ids: Iterable[str], token_ids: torch.Tensor, waits: Callable[[str], object]) -> None:
        """Find out which requests end with the tokens of a step. This may wait for the device.

        Args:
            request_ids: the requests of the step, in the order of the batch.
            token_ids: the sampled tokens, [requests, 1].
            waits: returns whether a block waits for the next step of a request.
        """
        watched = [(row, one) for row, one in enumerate(request_ids) if one in self._ending and waits(one)]
        if watched:
            tokens = token_ids[:, 0].tolist()
            self._requests.update(one for row, one in watched if tokens[row] in self._ending[one])

    def ended(self, ended: Mapping[str, Ended]) -> None:
        """Note which requests end with their blocks."""
        self._requests.update(one for one, how in ended.items() if how is not Ended.READ_ONLY)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that the scheduler knows to have ended."""
        for one in request_ids:
            self._requests.discard(one)
            self._ending.pop(one, None)
