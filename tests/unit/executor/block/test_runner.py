"""The runner of a block, in two implementations: a greenlet, and another process that shares only bytes."""

from __future__ import annotations

import array
import ast
import json
import subprocess
import sys
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.block.barrier import Barrier
from executor.block.budget import Budget
from executor.block.mediator import Mediator
from executor.block.runner import Runner
from executor.block.state import BlockState
from executor.core.ended import Ended
from executor.core.errors import Refusal
from executor.core.location import Kind, Location
from executor.model.values import Served
from interpose.v1 import trace_pb2 as pb
from tests.unit.executor.block.parts import ROWS, WIDTH, driven, failed_with, greenlet_block, serve, state

BLOCK = Path(__file__).parents[4] / "executor" / "block"

_CHILD = """
import array, json, sys
def tell(**what):
    print(json.dumps(what), flush=True)
def read(position):
    tell(wait=position)
    told = json.loads(sys.stdin.readline())
    if "raise" in told:
        raise RuntimeError(told["raise"])
    return array.array("f", bytes.fromhex(told["value"]))
def write(value):
    tell(written=bytes(value).hex())
sys.stdin.readline()
try:
    exec(sys.argv[1], {"read": read, "write": write})
except Exception as error:
    tell(failed=str(error))
else:
    tell(done=True)
"""


class ProcessRunner(Runner):
    """Runs a block in a process of its own, which gets values as bytes and sends changed values back."""

    def __init__(self, of: BlockState, source: str) -> None:
        super().__init__(of)
        self._names: dict[str, Any] = {}
        self._child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def names(self) -> MutableMapping[str, Any]:
        return self._names

    @property
    def lends_names(self) -> bool:
        return False

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def start(self) -> None:
        self._turn({}, None)

    def serve(self, served: Served) -> None:
        self._turn({"value": array.array("f", served.value.flatten().tolist()).tobytes().hex()}, served)

    def resume(self, value: Any) -> None:
        self._turn({"value": value}, None)

    def throw(self, error: BaseException) -> None:
        self._turn({"raise": str(error)}, None)

    def cancel(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            pipe.close()

    def let_go(self, do: Callable[[], object]) -> None:
        do()

    def _turn(self, told: dict[str, Any], served: Served | None) -> None:
        ending, waits = self._state.ending, self._state.waits
        assert self._child.stdin is not None and self._child.stdout is not None
        waits.location = None
        self._child.stdin.write(json.dumps(told) + "\n")
        self._child.stdin.flush()
        while True:
            came = json.loads(self._child.stdout.readline())
            if "written" in came:
                assert served is not None
                values = array.array("f", bytes.fromhex(came["written"]))
                served.assign(torch.tensor(values).reshape(served.value.shape))
                continue
            if "wait" in came:
                waits.location = Location(str(came["wait"]), Kind.OUTPUT, 0)
            else:
                ending.ended = Ended.FAILED if "failed" in came else Ended.DONE
                ending.failure = pb.Failure(message=came["failed"]) if "failed" in came else None
                self.cancel()
            return


def in_greenlet(source: str) -> Mediator:
    return greenlet_block("def write(value): pass\n" + source)


def in_process(source: str) -> Mediator:
    of = state()
    return driven(of, ProcessRunner(of, source))


Make = Callable[[str], Mediator]
both = pytest.mark.parametrize("make", [in_greenlet, in_process])


@both
def test_a_block_waits_at_each_location_and_its_change_reaches_the_model(make: Make) -> None:
    mediator = make(
        "first = read(3)\nfirst[0] = 7.0\nwrite(first)\nsecond = read(5)\n".replace(
            "[0] =", "[0] =" if make is in_process else "[0, 0] ="
        )
    )
    mediator.start()
    assert mediator.state.waits.location == Location("3", Kind.OUTPUT, 0)
    went_on = serve(mediator, torch.ones(ROWS + 1, WIDTH))
    expected = torch.ones(ROWS + 1, WIDTH)
    expected[0, 0] = 7.0
    assert went_on.tolist() == expected.tolist()
    assert mediator.state.waits.location == Location("5", Kind.OUTPUT, 0)
    assert serve(mediator, expected).tolist() == expected.tolist()
    assert mediator.state.ending.ended is Ended.DONE
    assert mediator.state.waits.location is None


@both
def test_an_error_is_raised_where_the_block_waits_and_may_be_caught(make: Make) -> None:
    mediator = make("try:\n    read(3)\nexcept Exception:\n    read(5)\n")
    mediator.start()
    mediator.throw(RuntimeError("not here"))
    assert mediator.state.waits.location == Location("5", Kind.OUTPUT, 0)
    mediator.throw(RuntimeError("nor here"))
    assert mediator.state.ending.ended is Ended.FAILED
    assert "nor here" in failed_with(mediator).message


@both
def test_the_end_of_the_generation_fails_a_block_that_waits_for_a_location(make: Make) -> None:
    mediator = make("read(3)")
    mediator.start()
    mediator.finish(None)
    assert mediator.state.ending.ended is Ended.FAILED
    assert "3.output was never reached: the generation ended after 1 step" in failed_with(mediator).message


@both
def test_a_cancelled_block_is_over_wherever_it_is(make: Make) -> None:
    mediator = make("read(3)")
    mediator.start()
    mediator.cancel()
    assert mediator.state.ending.ended is Ended.CANCELLED
    assert not mediator.state.live


def test_cancel_before_the_start_and_fail_at_a_location() -> None:
    ran: list[Any] = []
    unstarted = greenlet_block("ran.append(1)", ran=ran)
    unstarted.cancel()
    assert unstarted.state.ending.ended is Ended.CANCELLED and ran == []
    waiting = greenlet_block("try:\n    read(3)\nfinally:\n    ran.append(2)", ran=ran)
    waiting.start()
    waiting.fail(pb.Failure(message="the engine's"))
    assert (waiting.state.ending.ended, failed_with(waiting).message, ran) == (
        Ended.FAILED,
        "the engine's",
        [2],
    )


def test_a_block_that_ends_before_its_request_ran() -> None:
    mediator = greenlet_block("read(3)")
    mediator.finish(None)
    assert "the request ended before it ran" in failed_with(mediator).message


def test_the_result_and_a_step_that_does_not_come() -> None:
    came: list[Any] = []
    mediator = greenlet_block(
        "came.append(block().await_step(4, iter(())))\ncame.append(block().await_result())", came=came
    )
    mediator.start()
    assert mediator.state.waits.location == Location("", Kind.STEP, 4)
    mediator.finish("result")
    assert came == [None, "result"]
    assert mediator.state.ending.ended is Ended.DONE
    asks = greenlet_block("came.append(block().await_result())", came=came)
    asks.start()
    assert asks.state.resting and asks.state.waits.result_asked
    asks.finish("later")
    assert came[-1] == "later"


def test_a_barrier_is_passed_or_ended_by_the_end_of_the_generation() -> None:
    barrier = Barrier(0, 2, lambda one: None)
    for ends in (False, True):
        mediator = greenlet_block("block().await_barrier(barrier)", gang=2, barrier=barrier)
        mediator.start()
        assert mediator.state.waits.barrier is barrier
        if ends:
            mediator.finish(None)
            assert "the generation ended while the block waited at barrier 1 (of 2)" in failed_with(mediator).message
        else:
            mediator.pass_barrier(3, barrier)
            assert mediator.state.ending.ended is Ended.DONE
        assert mediator.state.waits.barrier is None


def test_a_broken_barrier_raises_in_the_block() -> None:
    barrier = Barrier(0, 2, lambda one: None)
    mediator = greenlet_block("block().await_barrier(barrier)", gang=2, barrier=barrier)
    mediator.start()
    barrier.broken = "nobody comes"
    mediator.pass_barrier(3, barrier)
    assert "nobody comes" in failed_with(mediator).message


def test_a_change_after_the_location_fails_the_block() -> None:
    mediator = greenlet_block("x = read(3)\ny = read(5)\nx[0] = 1\nread(7)")
    mediator.start()
    serve(mediator, torch.zeros(ROWS, WIDTH))
    serve(mediator, torch.zeros(ROWS, WIDTH))
    assert "the value of 3.output was changed in place after the block had gone on" in failed_with(mediator).message


def test_a_location_that_has_passed_is_refused_at_the_blocks_line() -> None:
    came: list[Any] = []
    mediator = greenlet_block(
        "read(5)\ntry:\n    read(3)\nexcept Exception as error:\n    came.append(error)\n", came=came
    )
    mediator.start()
    serve(mediator, torch.zeros(ROWS, WIDTH))
    assert [type(one) for one in came] == [Refusal]
    assert mediator.state.ending.ended is Ended.DONE


def test_a_turn_ends_when_its_time_is_over_and_counts_into_the_step() -> None:
    mediator = greenlet_block("read(3)\nwhile True: pass", budget=Budget(0.2, 1 << 34))
    mediator.start()
    began = time.monotonic()
    serve(mediator, torch.zeros(ROWS, WIDTH))
    assert time.monotonic() - began < 5
    assert failed_with(mediator).code == pb.ERROR_CODE_DEADLINE_EXCEEDED
    assert mediator.state.progress.used >= 0.19
    mediator.begin_step()
    assert mediator.state.progress.used == 0.0


def test_a_block_has_its_modes_in_its_turns_and_the_engine_its_own_between() -> None:
    source = """
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(True)
read(3)
came.append(modes())
"""

    def modes() -> tuple[torch.dtype, bool, bool]:
        return torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    came: list[Any] = []
    mediator = greenlet_block(source, came=came, modes=modes)
    with torch.inference_mode():
        mediator.start()
        assert modes() == (torch.float32, False, True)
        serve(mediator, torch.zeros(ROWS, WIDTH))
        assert modes() == (torch.float32, False, True)
    assert came == [(torch.float64, True, False)]


def test_names_are_read_between_turns() -> None:
    mediator = greenlet_block("x = 1\nread(3)\nx = given + 1")
    mediator.start()
    assert mediator.bound(["x", "y"]) == {"x": 1}
    mediator.names["given"] = 5
    serve(mediator, torch.zeros(ROWS, WIDTH))
    assert mediator.bound(["x"]) == {"x": 6}
    assert not mediator.lends_names
    assert greenlet_block("def f(): pass").lends_names


@pytest.mark.parametrize("name", ["state", "runner", "mediator"])
def test_the_forwards_side_knows_no_implementation_of_the_runner(name: str) -> None:
    imports = [
        node.module
        for node in ast.walk(ast.parse((BLOCK / f"{name}.py").read_text()))
        if isinstance(node, ast.ImportFrom) and node.module is not None
    ]
    assert imports
    hidden = {
        f"executor.block.{part}" for part in ("api", "fiber", "greenlet_runner", "budget", "process_state", "rng")
    }
    assert not hidden.intersection(imports) and "greenlet" not in imports


def test_the_two_sides_hold_the_state_and_the_forwards_side_a_runner() -> None:
    mediator = greenlet_block("read(3)")
    assert set(vars(mediator)) == {"state", "identity", "_runner"}
    runner = mediator._runner
    assert mediator not in vars(runner).values()
    assert mediator not in vars(runner._block).values()  # type: ignore[attr-defined]
    assert runner._state is mediator.state
