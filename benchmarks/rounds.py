"""Measures engines against each other: each in a process of its own, in rounds that have every case once.

A shared machine drifts by more than the differences of interest. What one round measured was measured within a second or
two, so the ratio is taken in each round, and the median and quartiles are those of the rounds' ratios. The order changes
from round to round so that every case has every place equally often.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_TAIL = 2000  # characters of a failed process's output that its error shows
LEAST = 2  # rounds that have quartiles


@dataclass(frozen=True)
class Ratio:
    """How one case compares with another: the median of the rounds' ratios, and their quartiles."""

    median: float
    low: float
    high: float

    def figures(self) -> dict[str, float]:
        """Return it as columns of a table."""
        return {"ratio": self.median, "quartile 1": self.low, "quartile 3": self.high}


@dataclass(frozen=True)
class Measured:
    """Seconds of one case in every round, in the order of the rounds."""

    name: str
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def over(self, base: Measured) -> Ratio:
        """Return how this case's seconds compare with those of `base`, round by round; two rounds at least."""
        ratios = [mine / other for mine, other in zip(self.seconds, base.seconds, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return Ratio(median, low, high)


class Asked(Protocol):
    """Whatever does what it is asked for and answers how many seconds that took."""

    @property
    def ask(self) -> Callable[..., Any]: ...


class Child:
    """A process that answers each line of JSON on its input with one on its output.

    Args:
        module: run as `python -m module`.
        argv: its arguments.
    """

    def __init__(self, module: str, *argv: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # Sets and dictionaries lie alike in all of them: two processes of one engine differ for as long as they live.
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )

    def ask(self, **request: Any) -> Any:
        """Send a request and return the answer; raises RuntimeError if the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the error below says why
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        status = self._process.wait()
        self._errors.seek(0)
        raise RuntimeError(f"the benchmark's process ended with status {status}:\n{self._errors.read()[-_TAIL:]}")

    def stop(self) -> None:
        """Let the process end, without waiting for it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass

    def close(self) -> None:
        """End the process."""
        assert self._process.stdout is not None
        self.stop()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def answer_forever(answer: Callable[..., Any]) -> None:
    """The child's side: answer every request line with `answer(**request)` until the input ends."""
    for line in sys.stdin:
        print("answer " + json.dumps(answer(**json.loads(line))), flush=True)


def alternate(
    cases: Sequence[tuple[str, Asked, dict[str, Any]]],
    rounds: int,
    warm_up: bool = True,
    seconds: float = math.inf,
) -> list[Measured]:
    """Time each case once in each of `rounds` rounds; a round before them warms up and is left out.

    Args:
        cases: name, who is asked, request; the answer is the seconds it took.
        rounds: how many rounds count; twice the number of cases, or a multiple of it, gives each case each place equally often.
        warm_up: whether there is a round before them.
        seconds: after so many no further round begins; two have been run by then, however long they took.
    """
    ends = time.monotonic() + seconds
    measured: dict[str, list[float]] = {name: [] for name, _, _ in cases}
    for _, asked, request in cases if warm_up else ():
        asked.ask(**request)
    for turn, order in enumerate(orders(len(cases), rounds)):
        if turn >= LEAST and time.monotonic() > ends:
            break
        for index in order:
            name, asked, request = cases[index]
            measured[name].append(asked.ask(**request))
    return [Measured(name, values) for name, values in measured.items()]


def orders(count: int, rounds: int) -> Iterator[list[int]]:
    """Yield each round's order: rotated by one after every second round, and every second round backwards."""
    for turn in range(rounds):
        first = turn // 2 % count
        order = [*range(first, count), *range(first)]
        yield order[::-1] if turn % 2 else order
