"""Measures engines against each other, each in a process, in rounds with every case once.

A shared machine drifts by more than the differences of interest. One round measures all its cases within a second or two. So the
ratio is taken in each round, and the median and quartiles are taken over the rounds' ratios. The order changes from round to
round, so that every case has every place equally often.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

_TAIL = 2000  # characters of a failed process's output that its error shows
LEAST = 2  # the least number of rounds with quartiles


@dataclass(frozen=True)
class Ratio:
    """A case compared with another: the median of the rounds' ratios, and their quartiles."""

    median: float
    low: float
    high: float

    def figures(self) -> dict[str, float]:
        """Return the ratio as columns of a table."""
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
        """Return the ratio of this case's seconds to those of `base`, round by round.

        There must be at least two rounds.
        """
        ratios = [mine / other for mine, other in zip(self.seconds, base.seconds, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return Ratio(median, low, high)


class Asked(Protocol):
    """An object that does what it is asked for, and answers how many seconds that took."""

    @property
    def ask(self) -> Callable[..., Any]: ...


class Child:
    """A process that answers each line of JSON on its input with a line on its output.

    Args:
        module: run as `python -m module`.
        argv: its arguments.
        environment: variables that the process has besides this one's; None takes a variable away.
    """

    def __init__(self, module: str, *argv: str, environment: Mapping[str, str | None] | None = None) -> None:
        # The same hash seed gives sets and dictionaries the same layout in all processes; otherwise two processes of one
        # engine differ.
        wanted = {**os.environ, "PYTHONHASHSEED": "0", **(environment or {})}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={name: value for name, value in wanted.items() if value is not None},
        )

    def ask(self, **request: Any) -> Any:
        """Send a request and return the answer; raises RuntimeError if the process is gone."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the error below gives the reason
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
    """Time each case once in each of `rounds` rounds, after a round that warms up.

    Args:
        cases: name, process to ask, request; the answer is the seconds that the request took.
        rounds: how many rounds count; a multiple of twice the number of cases gives each case each place equally often.
        warm_up: whether there is a round before them.
        seconds: after this time no further round begins; but two rounds are run, however long they take.
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
    """Yield each round's order.

    The order is rotated by one after every second round, and every second round runs backwards.
    """
    for turn in range(rounds):
        first = turn // 2 % count
        order = [*range(first, count), *range(first)]
        yield order[::-1] if turn % 2 else order
