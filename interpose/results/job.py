"""Jobs: traces that go on without their client, found by id from any process of the tenant.

The server keeps the events of a job from the first event on. A client can read all of them, several times, until the
retention time ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from interpose.contract.display import facts, folded, size
from interpose.contract.errors import (
    Cancelled,
    DeadlineExceeded,
    InterposeError,
    InvalidArgument,
    Unavailable,
    from_failure,
)
from interpose.contract.result import Result
from interpose.contract.shown import shown
from interpose.modules.tree import Node
from interpose.results.outcome import Delivered, Outcome, take_event, values_of
from interpose.rpc.channel import Stream
from interpose.rpc.progress import write
from interpose.rpc.session import Session
from interpose.rpc.transfer import BACKOFF_SECONDS
from interpose.v1 import service_pb2
from interpose.v1.trace_pb2 import Usage

_SEPARATOR = "/"
_MOST_BRIEF = 200  # characters of a value in one line


@dataclass(frozen=True)
class JobStatus:
    """The state of a job.

    Size: data: each field is a field of the message.

    Attributes:
        state: "queued", "running", "done", "failed" or "cancelled".
        model: the served model's name.
        invokes, finished_invokes: the number of prompts, and the number of prompts that have ended.
        prompt_tokens, generated_tokens: the numbers of tokens so far.
        stored_bytes: the bytes that the server keeps for the job.
        seconds_since_submitted, seconds_since_started, seconds_since_ended: ages; None before the job started or ended.
        seconds_left: seconds until the server forgets the job; None while the job runs.
        error: the error of a failed job, or None.
    """

    state: str
    model: str
    invokes: int
    finished_invokes: int
    prompt_tokens: int
    generated_tokens: int
    stored_bytes: int
    seconds_since_submitted: float
    seconds_since_started: float | None
    seconds_since_ended: float | None
    seconds_left: float | None
    error: InterposeError | None

    def rows(self) -> dict[str, object]:
        """Return what there is to say about the job, by title."""
        found: dict[str, object] = {"state": self.state, "model": self.model}
        found["prompts"] = f"{self.finished_invokes} of {self.invokes} ended"
        found["tokens"] = f"{self.prompt_tokens} of the prompt, {self.generated_tokens} generated"
        found["kept on the server"] = size(self.stored_bytes)
        found["submitted"] = f"{self.seconds_since_submitted:.0f} s ago"
        if self.seconds_left is not None:
            found["forgotten in"] = f"{self.seconds_left:.0f} s"
        if self.error is not None:
            found["error"] = f"{type(self.error).__name__}: {self.error.message}"
        return found

    def _repr_html_(self) -> str:
        return facts(self.rows())

    @property
    def ended(self) -> bool:
        """Whether the job is done, failed or cancelled."""
        return self.state in ("done", "failed", "cancelled")

    @classmethod
    def from_message(cls, message: service_pb2.JobStatus) -> JobStatus:
        """Return the status of a message."""
        return cls(
            state=service_pb2.JobState.Name(message.state).removeprefix("JOB_STATE_").lower(),
            model=message.model,
            invokes=message.invokes,
            finished_invokes=message.finished_invokes,
            prompt_tokens=message.prompt_tokens,
            generated_tokens=message.generated_tokens,
            stored_bytes=message.stored_bytes,
            seconds_since_submitted=message.seconds_since_submitted,
            seconds_since_started=message.seconds_since_started or None,
            seconds_since_ended=message.seconds_since_ended or None,
            seconds_left=message.seconds_left if message.seconds_since_ended else None,
            error=from_failure(message.failure) if message.HasField("failure") else None,
        )


class JobResult(Mapping[str, object]):
    """The saved values of a job by name, and the engine's output.

    If several prompts save a name, the value is that of the last prompt. Lists, dicts and sets that the block changed have
    the names under which the trace was sent.

    Attributes:
        results: the result of each prompt, in the order of the prompts.
        usage: the tokens, bytes and seconds of the trace.
    """

    def __init__(self, values: Mapping[str, object], results: list[Result], usage: Usage) -> None:
        self._values = dict(values)
        self.results = results
        self.usage = usage

    @property
    def result(self) -> Result:
        """The engine's output, for a trace with one prompt."""
        if len(self.results) != 1:
            raise InvalidArgument(f"the trace has {len(self.results)} prompts, and a result for each in .results")
        return self.results[0]

    def __getitem__(self, name: str) -> object:
        if name not in self._values:
            raise KeyError(f"the trace saved no {name!r}; it saved {', '.join(self._values) or 'nothing'}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._values)

    def _repr_html_(self) -> str:
        values = {name: _brief(value) for name, value in self._values.items()}
        shown = [folded(f"result {number}", one._repr_html_()) for number, one in enumerate(self.results)]
        return facts(values or {"saved": "nothing"}) + "".join(shown)

    def __repr__(self) -> str:
        return f"<result of a trace: {', '.join(self._values) or 'nothing saved'}>"


class Assigner(Protocol):
    """Assigns the saved values of a trace long after its block."""

    def values(self, outcome: Outcome) -> list[Delivered]:
        """Fetch and return the saved values."""

    def deliver(self, outcome: Outcome, values: list[Delivered]) -> None:
        """Assign the values where that is still possible; called in the thread of the block."""


@dataclass(frozen=True)
class Arrived:
    """The outcome of a job, and its values: fetched and not yet assigned."""

    outcome: Outcome
    assigner: Assigner | None
    values: list[Delivered]


class Job:
    """A job: `tracer.job` of a trace with `blocking=False`, or `client.job(id)`.

    Args:
        session: the client's side of a session, for calls to the server.
        session_id: the session on the server that holds the job.
        trace_id: the trace's id.
        tree_of: gives the module tree of a served model.
        assigner: assigns the saved values; None for a job that was found by its id.
        fetch: whether saved tensors are fetched; else they are `RemoteValue`s.
    """

    def __init__(
        self,
        session: Session,
        session_id: str,
        trace_id: str,
        tree_of: Callable[[str], Node],
        assigner: Assigner | None = None,
        fetch: bool = True,
    ) -> None:
        self._session = session
        self._session_id = session_id
        self._trace_id = trace_id
        self._tree_of = tree_of
        self._assigner = assigner
        self._fetch = fetch
        self._printed = 0  # characters of the block's prints that are shown already
        self.outcome: Outcome | None = None

    @classmethod
    def found(cls, session: Session, job_id: str, tree_of: Callable[[str], Node]) -> Job:
        """Return the job with an id; its methods raise NotFound if the server has no such job.

        Raises:
            InvalidArgument: the text is not the id of a job.
        """
        session_id, separator, trace_id = job_id.partition(_SEPARATOR) if isinstance(job_id, str) else ("", "", "")
        if not (session_id and separator and trace_id):
            raise InvalidArgument(f"{job_id!r} is not the id of a job; tracer.job.id is one")
        return cls(session, session_id, trace_id, tree_of)

    @property
    def id(self) -> str:
        """The job's id, for `client.job(id)` in any process of the same tenant."""
        return f"{self._session_id}{_SEPARATOR}{self._trace_id}"

    def status(self) -> JobStatus:
        """Return the state of the job.

        Raises:
            NotFound: there is no such job, or the retention time has ended.
        """
        return JobStatus.from_message(self._session.describe_job(self._session_id, self._trace_id))

    def cancel(self) -> bool:
        """Cancel the job; return whether the job was running."""
        return self._session.cancel(self._session_id, self._trace_id)

    def forget(self) -> None:
        """Cancel the job if it runs, and drop its results from the server.

        Results count towards the tenant's limit until they are dropped.
        """
        self._session.cancel(self._session_id, self._trace_id, forget=True)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the job, then assign its saved values as a blocking trace does.

        The block's prints appear here. The names are assigned in the scope of the block, if that is a module, a notebook, or a
        running function that called this method. Lists and dicts that the block changed are changed in any case. A job that
        was found by its id assigns nothing: `result()` has the values. An interrupt ends the waiting, not the job.

        Args:
            timeout: seconds to wait; None: no limit.

        Raises:
            DeadlineExceeded: the job still runs after `timeout`.
            NotFound: there is no such job, or the retention time has ended.
            InterposeError: the trace failed. The values that it saved before are assigned.
        """
        self.deliver(self.arrive(timeout))

    def arrive(
        self, timeout: float | None = None, following: Callable[[Stream], None] = lambda stream: None
    ) -> Arrived:
        """Wait for the end of the job and fetch its saved values, without assigning them.

        Args:
            timeout: as for `wait`.
            following: is called with each stream of events that is read. Cancelling the stream ends the waiting.
        """
        outcome = self._ended(timeout, following)
        assigner, self._assigner = self._assigner, None
        return Arrived(outcome, assigner, assigner.values(outcome) if assigner is not None else [])

    def deliver(self, arrived: Arrived) -> None:
        """Assign the fetched values, then raise the trace's first failure."""
        if arrived.assigner is not None:
            arrived.assigner.deliver(arrived.outcome, arrived.values)
        if arrived.outcome.failures:
            raise from_failure(arrived.outcome.failures[0])

    def result(
        self,
        timeout: float | None = None,
        *,
        fetch: bool | None = None,
        following: Callable[[Stream], None] = lambda stream: None,
    ) -> JobResult:
        """Wait for the end of the job and return its saved values and the engine's output.

        Args:
            timeout: seconds to wait; None: no limit.
            fetch: whether saved tensors are fetched; False gives `RemoteValue`s. Default: the trace's own `fetch`.
            following: as for `arrive`.

        Raises:
            DeadlineExceeded: the job still runs after `timeout`.
            NotFound: there is no such job, or the retention time has ended.
            InterposeError: the trace failed.
        """
        outcome = self._ended(timeout, following)
        if outcome.failures:
            raise from_failure(outcome.failures[0])
        return result_of(outcome, self._session, self._tree_of, self._fetch if fetch is None else fetch)

    def _ended(self, timeout: float | None, following: Callable[[Stream], None]) -> Outcome:
        if self.outcome is None:
            self.outcome = self._follow(None if timeout is None else time.monotonic() + timeout, following)
        return self.outcome

    def _follow(self, deadline: float | None, following: Callable[[Stream], None]) -> Outcome:
        """Read the job's events from the first to the last.

        When the connection breaks, the reading starts again at the first event.
        """
        attempt = 0
        while True:
            outcome = Outcome(session_id=self._session_id)
            stream = self._session.attach(self._session_id, self._trace_id)
            following(stream)
            timer = threading.Timer(max(0.0, deadline - time.monotonic()), stream.cancel) if deadline else None
            if timer is not None:
                timer.daemon = True
                timer.start()
            skipped = self._printed
            arrivals = stream.events()
            try:
                for event in arrivals:
                    if event.WhichOneof("kind") == "log":
                        skipped = self._print(event.log.text, skipped)
                    else:
                        take_event(outcome, event)
                    if event.WhichOneof("kind") == "done":
                        return outcome
                raise Unavailable("the server ended the job's events without the last one")
            except Unavailable as error:
                # An error with a trace id is the end of the trace itself, which another try does not change.
                if error.trace_id or attempt >= len(BACKOFF_SECONDS):
                    raise
                time.sleep(BACKOFF_SECONDS[attempt])
                attempt += 1
            except Cancelled:
                if deadline is None or time.monotonic() < deadline:
                    raise
                raise DeadlineExceeded(f"the job has not ended yet: {self.id}") from None
            finally:
                if timer is not None:
                    timer.cancel()
                arrivals.close()
                stream.cancel()

    def _print(self, text: str, skipped: int) -> int:
        """Print the text without its first `skipped` characters, which are shown already.

        Returns:
            How many characters of the next text are shown already.
        """
        fresh = text[skipped:]
        self._printed += len(fresh)
        write(fresh)
        return max(0, skipped - len(text))

    def __dir__(self) -> list[str]:
        return shown(self, ("arrive", "deliver", "found", "outcome"))

    def _repr_html_(self) -> str:
        state = (
            "ended"
            if self.outcome is not None
            else "sent; job.status() asks for its state, job.wait() waits for its end"
        )
        return facts({"job": self.id, "state": state})

    def __repr__(self) -> str:
        return f"<interpose job {self.id}>"


def _brief(value: object) -> str:
    """Return a saved value in one line."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} {getattr(value, 'dtype', '')} {list(shape)}"
    text = repr(value)
    return text if len(text) <= _MOST_BRIEF else f"{text[:_MOST_BRIEF]}…"


def result_of(outcome: Outcome, session: Session, tree_of: Callable[[str], Node], fetch: bool) -> JobResult:
    """Return the saved values and results of a trace, by name."""
    captured: dict[int, list[str]] = {}
    for entry in outcome.captured:
        captured.setdefault(entry.index, []).append(entry.name)
    values: dict[str, object] = {}
    for _, names, updates in values_of(outcome, session, lambda: tree_of(outcome.model), fetch=fetch):
        values.update(names)
        for index, contents in updates.items():
            values.update(dict.fromkeys(captured.get(index, ()), contents))
    results = [outcome.results[index] for index in sorted(outcome.results)]
    return JobResult(values, results, outcome.usage)
