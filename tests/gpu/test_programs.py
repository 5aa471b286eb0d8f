"""Programs in captured graphs on a GPU give what greenlets give on the same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from executor.graphs.capture import CudaRecorder, capture
from executor.graphs.programs import Programs
from tests.unit.executor.graphs import program_rows
from tests.unit.executor.graphs.rides import (
    ELEMENTWISE,
    WITH_SUMS,
    Rides,
    compare,
    device,
    in_hooks,
    machine,
    moved,
    names_here,
)
from tests.unit.executor.plan.bench import HIDDEN, MODEL
from tests.unit.executor.plan.test_cases import block

GPU = torch.device("cuda")


class Graphs:
    """Runs the model with programs in captured graphs: one for each number of rows and set of programs.

    Attributes:
        graphs: by the rows and the programs, the graph, its input and what it gives.
    """

    def __init__(self) -> None:
        self._recorder = CudaRecorder(GPU)
        self.graphs: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}

    def __call__(self, programs: Programs, keys: Sequence[str], x: torch.Tensor) -> torch.Tensor:  # [rows, hidden]
        found = self.graphs.get((len(x), *keys))
        if found is None:
            given, made = x.clone(), torch.zeros_like(x)

            def prepare() -> Callable[[], None]:
                return lambda: made.copy_(MODEL(given))

            with torch.inference_mode(), programs.unchanged(keys), programs.hooked(keys):
                captured = capture(self._recorder, prepare, warm=True)
            found = self.graphs[(len(x), *keys)] = captured.graph, given, made
        graph, given, made = found
        given.copy_(x)
        graph.replay()
        return made.clone()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_programs_in_a_graph_give_the_bits_of_the_greenlet(name: str, dtype: torch.dtype) -> None:
    with moved(GPU, dtype):
        rides = Rides([block(*ELEMENTWISE[name])] * 3, names_here, machine(), ahead=1, run=Graphs()).go(steps=8)
        rides.unstable.clear()
        compare(rides)


@pytest.mark.parametrize("name", WITH_SUMS)
def test_programs_with_sums_in_a_graph_agree_within_rounding(name: str) -> None:
    with moved(GPU, torch.float32):
        compare(Rides([block(*WITH_SUMS[name])] * 3, names_here, machine(), ahead=1, run=Graphs()).go(steps=8))


def test_one_graph_serves_requests_that_join_and_leave() -> None:
    with moved(GPU, torch.float32):
        programs, graphs = machine(), Graphs()
        names = ["a carried sum", "steering of the stream", "several locations"]
        late = block(*ELEMENTWISE["a carried sum in place"], loop="for step in tracer.iter[4:]:")
        texts = [block(*ELEMENTWISE[name]) for name in names] + [late, block(*WITH_SUMS["an autoencoder"])]
        for seed in range(4):
            compare(Rides(texts, names_here, programs, run=graphs).go(steps=8, seed=seed))
        assert programs.made == len(texts)
        assert len(graphs.graphs) <= 12  # one for each number of rows


def test_a_capture_waits_for_nothing_and_a_replay_gives_what_hooks_give() -> None:
    with moved(GPU, torch.bfloat16):
        programs, graphs = machine(), Graphs()
        texts = [block(*case) for case in {**ELEMENTWISE, **WITH_SUMS}.values()]
        for text in texts:
            rides = Rides([text], names_here, programs).go(steps=3)
            keys = sorted(rides.keys)
            x = torch.randn(5, HIDDEN, device=device(), dtype=torch.bfloat16)
            torch.cuda.set_sync_debug_mode("error")
            try:
                with programs.unchanged(keys):
                    expected = in_hooks(programs, keys, x)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert torch.equal(graphs(programs, keys, x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", program_rows.TEXTS)
def test_a_prompt_s_rows_are_as_so_many_requests_in_one_graph(name: str, dtype: torch.dtype) -> None:
    with moved(GPU, dtype):
        graphs = Graphs()
        program_rows.check(program_rows.TEXTS[name], graphs)
        assert len(graphs.graphs) == 1, "the prompt's step has a graph of its own"
