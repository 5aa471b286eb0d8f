"""Which requests a worker knows to have ended before the scheduler does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.core.ended import Ended
from executor.core.request import InvokeRequest
from executor.plugin.ahead import Over, may_run_ahead


class Config:
    """What of an engine's configuration counts."""

    def __init__(self, ahead: bool = True, stages: int = 1) -> None:
        self.scheduler_config = self.parallel_config = self
        self.async_scheduling = ahead
        self.pipeline_parallel_size = stages


def sampling(**given: Any) -> Any:
    """Return sampling parameters, of which only what may end a request counts."""
    nothing = {
        "stop": [],
        "stop_token_ids": [],
        "eos_token_id": 2,
        "structured_outputs": None,
        "repetition_detection": None,
    }
    return SimpleNamespace(**{**nothing, **given})


ALONE = InvokeRequest("t", 0, 0)


def test_what_stop_tokens_alone_can_end_runs_ahead() -> None:
    config: Any = Config()
    assert may_run_ahead(sampling(stop_token_ids=[5]), ALONE, config)
    assert may_run_ahead(sampling(eos_token_id=None), InvokeRequest("t", 0, 1), config)


@pytest.mark.parametrize(
    "given", [{"stop": ["x"]}, {"structured_outputs": object()}, {"repetition_detection": object()}]
)
def test_what_the_worker_cannot_find_sits_out(given: Any) -> None:
    config: Any = Config()
    assert not may_run_ahead(sampling(**given), ALONE, config)


def test_gangs_and_pipeline_stages_sit_out() -> None:
    params = sampling()
    config: Any = Config()
    staged: Any = Config(stages=2)
    behind: Any = Config(ahead=False)
    assert not may_run_ahead(params, InvokeRequest("t", 0, 2), config)
    assert not may_run_ahead(params, ALONE, staged)
    assert not may_run_ahead(params, ALONE, behind)


def test_a_stop_token_ends_the_request_that_sampled_it() -> None:
    over = Over()
    over.watch("one", sampling(stop_token_ids=[5]))
    over.watch("two", sampling(stop_token_ids=[7]))
    over.watch("free", sampling(eos_token_id=None))
    names = ["free", "two", "one", "end", "plain"]
    over.watch("end", sampling(eos_token_id=2))
    over.sampled(names, torch.tensor([[5], [5], [5], [2], [7]]), lambda request: True)
    assert [one for one in names if one in over] == ["one", "end"]
    over.forget(["one"])
    assert "one" not in over


def test_nothing_is_read_from_the_device_when_no_block_waits() -> None:
    over = Over()
    over.watch("one", sampling(stop_token_ids=[5]))
    unread: Any = None
    over.sampled(["one"], unread, lambda request: False)
    assert "one" not in over


def test_a_block_that_ended_ends_its_request_unless_it_only_read() -> None:
    over = Over()
    over.ended({"stopped": Ended.STOPPED, "failed": Ended.FAILED, "read": Ended.READ_ONLY})
    assert "stopped" in over and "failed" in over and "read" not in over
