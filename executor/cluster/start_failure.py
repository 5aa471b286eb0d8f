"""Says in a few lines why an engine cannot start.

It also says whether another try can succeed. vLLM's engine runs in a process of its own and its workers in others. What fails
there reaches the process that started them as "Engine core initialization failed. See root cause above". The engine's process
therefore leaves a note with the real error, in a file whose path it has in its environment.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from executor.core.engine_names import near

NOTE_VARIABLE = "INTERPOSE_START_NOTE"
_LOGGER = "vllm.v1.engine.core"  # logs what ends the engine's process, with the exception
_MOST_CAUSES = 20
_LONGEST = 2000  # characters of a reason

# Faults of processes, nodes and networks, by the names of the exceptions: most are of libraries that are not imported here.
_PASSING = frozenset(
    {
        *("RayActorError", "ActorDiedError", "ActorUnavailableError", "NodeDiedError", "WorkerCrashedError"),
        *("ObjectLostError", "OwnerDiedError", "RaySystemError", "RpcError", "GetTimeoutError"),
        *("DistBackendError", "DistNetworkError", "DistStoreError", "TimeoutError", "ConnectionError"),
        *(
            "ConnectError",
            "ConnectTimeout",
            "ReadTimeout",
            "ReadError",
            "RemoteProtocolError",
            "LocalEntryNotFoundError",
        ),
    }
)
# The same, in the words that one process hands on from another.
_PASSING_WORDS = re.compile(
    r"connection (was )?(closed|reset|refused|lost|aborted)|NCCL error|broken pipe|did not connect to the engine|"
    r"took longer than \d+ s|^cancelled$",  # the last: a process that was shutting down stopped waiting for a message
    re.IGNORECASE,
)
_HANDED_ON = re.compile(r"Worker failed with error '(.*)', please check the stack trace above", re.DOTALL)
_ARCHITECTURES = re.compile(
    r"Model architectures (\[.*?\]) are not supported.*?Supported architectures: (.*)", re.DOTALL
)


@dataclass(frozen=True)
class StartFailure:
    """Why an engine does not start.

    Attributes:
        reason: in words, for the operator.
        permanent: whether the next try would fail in the same way.
    """

    reason: str
    permanent: bool


class CannotStart(Exception):
    """An engine does not start."""

    def __init__(self, failure: StartFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure

    def __reduce__(self) -> tuple[type[CannotStart], tuple[StartFailure]]:
        return CannotStart, (self.failure,)


def failure_of(error: BaseException) -> StartFailure:
    """Return the failure that an exception stands for.

    An exception that is not known as a fault of a process, a node or a network is taken for permanent: wrong arguments, missing
    or wrong weights, too little memory, a model that the engine does not know.
    """
    if isinstance(error, CannotStart):
        return error.failure
    chain = list(_chain(error))
    reason = _in_words(chain[0])
    if len(chain) > 1 and str(chain[1]) not in str(chain[0]):
        reason += f" (because of {_in_words(chain[1])})"
    return StartFailure(reason, permanent=not any(_passes(one) for one in chain))


def of_workers(errors: Mapping[int, BaseException], what: str) -> StartFailure:
    """Return the failure of an engine of which workers failed.

    One worker's error makes others fail that wait for it, and these may be heard of first: a permanent error counts more.

    Args:
        errors: by the worker's rank.
        what: what they were doing.
    """
    failures = {rank: failure_of(error) for rank, error in sorted(errors.items())}
    rank = min(failures, key=lambda rank: (not failures[rank].permanent, rank))
    return StartFailure(f"{what}, worker {rank}: {failures[rank].reason}", failures[rank].permanent)


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Give a failure of the engine's own process its reason in this process.

    The engine's process is started inside the context.

    Raises:
        CannotStart: in place of an exception, if the process has left a note.
    """
    with tempfile.TemporaryDirectory(prefix="interpose-") as folder:
        note = Path(folder) / "note.json"
        os.environ[NOTE_VARIABLE] = str(note)
        try:
            yield
        except Exception as error:
            if note.is_file():
                raise CannotStart(StartFailure(**json.loads(note.read_text()))) from error
            if "Engine core initialization failed" in str(error):
                processes = re.search(r"\{.*\}", str(error))
                status = processes[0] if processes else "?"
                reason = f"the engine's process ended without saying why (exit status: {status})"
                raise CannotStart(StartFailure(reason, permanent=False)) from error
            raise
        finally:
            os.environ.pop(NOTE_VARIABLE, None)


def leave_note() -> None:
    """Leave a note when the engine's process fails to start.

    Nothing happens where nobody reads it.
    """
    path = os.environ.get(NOTE_VARIABLE)
    if path:
        logging.getLogger(_LOGGER).addHandler(_Note(Path(path)))


class _Note(logging.Handler):
    """Writes the first exception that is logged."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and self._path.parent.is_dir() and not self._path.exists():
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(asdict(failure_of(error))))
            part.rename(self._path)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes, the first cause last.

    A worker's exception stands in place of Ray's.
    """
    left: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if left is None:
            return
        inner = getattr(left, "cause", None)  # RayTaskError's
        if not isinstance(inner, BaseException):
            yield left
            inner = left.__cause__
        left = inner


def _passes(error: BaseException) -> bool:
    if isinstance(error, CannotStart):
        return not error.failure.permanent
    names = {one.__name__ for one in type(error).__mro__}
    ray_memory = type(error).__name__ == "OutOfMemoryError" and type(error).__module__.startswith("ray")
    return bool(names & _PASSING) or ray_memory or _PASSING_WORDS.search(str(error)) is not None


def _setting(loc: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in loc if "[" not in str(part))  # without which of several types it did not have


def _in_words(error: BaseException) -> str:
    if isinstance(error, CannotStart):
        return error.failure.reason
    details = getattr(error, "errors", None)  # pydantic's
    if callable(details):
        found = [(_setting(one["loc"]), str(one["msg"]).removeprefix("Value error, ")) for one in details()]
        text = "; ".join(f"{setting}: {said}" if setting else said for setting, said in found)
    else:
        text = str(error).strip()
    if handed_on := _HANDED_ON.search(text):
        text = handed_on[1]
    if unknown := _ARCHITECTURES.search(text):
        known = set(re.findall(r"\w+", unknown[2])) - {"dict_keys"}
        hints = "".join(near(name, known) for name in re.findall(r"\w+", unknown[1]))
        text = f"vLLM does not know the architecture {unknown[1]}, which the model's config.json names{hints}"
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + " …"
    # A ValueError is a sentence for the operator; of others the type says as much as the text.
    return text if text and isinstance(error, ValueError) else f"{type(error).__name__}: {text}".rstrip(": ")
