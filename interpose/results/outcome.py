"""The outcome of a trace: its events are read as they arrive, its values at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from interpose.contract.accounting import Accounting
from interpose.contract.errors import EngineError
from interpose.contract.explanation import Explanation
from interpose.contract.result import Logprob, Result
from interpose.modules.envoy import Envoy
from interpose.modules.tree import Node
from interpose.rpc.call import Running
from interpose.rpc.progress import Progress, write
from interpose.rpc.remote import RemoteDecoder, RemoteValue
from interpose.rpc.session import Session
from interpose.v1.trace_pb2 import (
    CapturedName,
    Event,
    Failure,
    Output,
    Saves,
    SessionVariable,
    TokenLogprobs,
    Trace,
    Usage,
)
from interpose.v1.value_pb2 import Blob, RemoteTensor
from interpose.wire.decoder import Decoder
from interpose.wire.encoder import WireError
from interpose.wire.resolver import Resolver
from interpose.wire.walk import blob_of


@dataclass
class Outcome:
    """The outcome of a trace.

    Attributes:
        session_id: the session on the server that holds the trace.
        model: the served model's name.
        captured: names of the caller's objects in the trace's scope, for a client that does not have these objects.
        results: the engine's output, by invoke.
        saves: messages with saved values, not yet decoded, in the order of arrival.
        failures: the failures of invokes, in the order of arrival.
        usage: the tokens, bytes and seconds of the trace.
        accounting: the locations and steps of each invoke's block, by invoke. An invoke that never ran has no entry.
        variables: the session variables of the trace, with their new versions.
        explanation: the tiers of the block, of a trace that asks for them.
    """

    session_id: str = ""
    model: str = ""
    captured: list[CapturedName] = field(default_factory=list)
    results: dict[int, Result] = field(default_factory=dict)
    saves: list[Saves] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    accounting: dict[int, Accounting] = field(default_factory=dict)
    variables: list[SessionVariable] = field(default_factory=list)
    explanation: Explanation | None = None


def follow(
    session: Session, trace: Trace, blobs: Mapping[str, memoryview], progress: Progress, tokens: int | None
) -> Outcome:
    """Run a trace to its end and print the text of its blocks.

    An interrupt cancels the trace on the server.

    Args:
        tokens: the expected number of generated tokens, for the progress bar; None: unknown.
    """
    outcome = new_outcome(trace)
    with closing(session.submit(trace, blobs)) as events, progress.tokens("generating", tokens) as bar:
        for session_id, event in events:
            outcome.session_id = outcome.session_id or session_id
            take_event(outcome, event)
            bar.update(len(event.output.token_ids))
    return outcome


async def follow_async(running: Running, trace: Trace, progress: Progress, tokens: int | None) -> Outcome:
    """Do the same as `follow` for an accepted trace, on an event loop.

    Cancelling the task cancels the trace on the server.
    """
    outcome = new_outcome(trace)
    outcome.session_id = running.session_id
    try:
        with progress.tokens("generating", tokens) as bar:
            while (event := await running.next_async()) is not None:
                take_event(outcome, event)
                bar.update(len(event.output.token_ids))
    finally:
        running.close(wait=False)
    return outcome


def new_outcome(trace: Trace) -> Outcome:
    """Return the outcome of a trace that has just begun."""
    return Outcome(results={index: Result() for index in range(len(trace.invokes))})


def take_event(outcome: Outcome, event: Event) -> None:
    """Add an event to the outcome; the text of a log event is printed."""
    kind = event.WhichOneof("kind")
    if kind == "accepted":
        outcome.session_id = event.accepted.session_id or outcome.session_id
        outcome.model = event.accepted.model
        outcome.captured = list(event.accepted.captured)
        outcome.results = {index: Result() for index in range(event.accepted.invokes)} | outcome.results
    elif kind == "output":
        _add_output(outcome.results.setdefault(event.output.invoke, Result()), event.output)
    elif kind == "saves":
        outcome.saves.append(event.saves)
        outcome.variables.extend(event.saves.variables)
    elif kind == "failed":
        outcome.failures.append(event.failed)
    elif kind == "log":
        write(event.log.text)
    elif kind == "accounting":
        outcome.accounting[event.accounting.invoke] = Accounting.of(event.accounting)
    elif kind == "explanation":
        outcome.explanation = Explanation.of(event.explanation)
    elif kind == "done":
        outcome.usage = event.done.usage


def _add_output(result: Result, output: Output) -> None:
    result.text += output.text
    result.token_ids.extend(output.token_ids)
    result.prompt_token_ids.extend(output.prompt_token_ids)
    result.finish_reason = output.finish_reason or result.finish_reason
    if output.logprobs:
        result.logprobs = result.logprobs if result.logprobs is not None else []
        result.logprobs.extend(_logprobs(position) for position in output.logprobs)
    if output.prompt_logprobs:
        result.prompt_logprobs = [_logprobs(position) or None for position in output.prompt_logprobs]


def _logprobs(position: TokenLogprobs) -> dict[int, Logprob]:
    texts = position.texts or [None] * len(position.token_ids)
    found = zip(position.token_ids, position.logprobs, position.ranks, texts, strict=True)
    return {token: Logprob(logprob, rank or None, text) for token, logprob, rank, text in found}


class NotebookResolver(Resolver):
    """Rebuilds modules as envoys, and tensors that stayed on the server.

    Args:
        tree: gives the model's module tree.
        earlier: gives a tensor of an earlier trace that a later trace saved again unchanged.
    """

    def __init__(self, tree: Callable[[], Node], earlier: Callable[[RemoteTensor], object] | None = None) -> None:
        self._tree = tree
        self._earlier = earlier or super().remote

    def module(self, path: str) -> object:
        tree = node = self._tree()
        for name in path.split(".") if path else ():
            node = node.child(name)
        return Envoy(node, tree)

    def remote(self, tensor: RemoteTensor) -> object:
        return self._earlier(tensor)


# An invoke (-1: shared), its names and their values, and the new contents of the caller's objects by their index.
Delivered = tuple[int, dict[str, object], dict[int, object]]


def values_of(
    outcome: Outcome, session: Session, tree: Callable[[], Node], *, fetch: bool = True
) -> Iterator[Delivered]:
    """Fetch and decode the saved values of a trace.

    Args:
        tree: gives the model's module tree, for modules among the values.
        fetch: whether to fetch tensors that are not in the messages; else they are `RemoteValue`s.

    Yields:
        For each message a `Delivered`: the invoke (-1: shared), its names and their values, and the new contents of the
        caller's objects by their index in the trace's scope. Invokes come in their order, the shared scope comes last.

    Raises:
        EngineError: the server sent a value that cannot be rebuilt.
        NotFound, Unavailable: a value could not be fetched.
    """
    buffers: dict[str, np.ndarray] = {}
    if fetch:
        buffers.update(session.fetch(outcome.session_id, list(_blobs(outcome.saves))))

    def get_blob(blob: Blob) -> np.ndarray:  # [bytes], uint8
        # Each buffer becomes the memory of a single array. A second array of the same bytes fetches its own buffer.
        buffer = buffers.pop(blob.id, None)
        return buffer if buffer is not None else session.fetch(outcome.session_id, [blob])[blob.id]

    def earlier(tensor: RemoteTensor) -> object:
        holder = tensor.session_id or outcome.session_id
        value = RemoteValue(session, holder, tensor.blob_id, tensor.view, tensor.library)
        return value.fetch_here() if fetch else value

    ordered = sorted(outcome.saves, key=lambda saves: (saves.invoke < 0, saves.invoke))
    for saves in ordered:
        kind = Decoder if fetch else RemoteDecoder
        decoder = kind(saves.objects, get_blob=get_blob, resolver=NotebookResolver(tree, earlier))
        if isinstance(decoder, RemoteDecoder):
            decoder.session, decoder.session_id = session, outcome.session_id
        try:
            names = {binding.name: decoder.decode(binding.value) for binding in saves.names}
            updates = {update.index: decoder.decode(update.value) for update in saves.updates}
        except WireError as error:
            raise EngineError(f"the server sent a value that cannot be rebuilt: {error}") from error
        yield saves.invoke, names, updates


def update_in_place(target: object, contents: object) -> None:
    """Set the contents of the caller's list, dict or set to the contents of the trace's.

    Raises:
        EngineError: the contents are of another type.
    """
    if isinstance(target, list) and isinstance(contents, list | tuple):
        target[:] = contents
    elif (isinstance(target, dict) and isinstance(contents, dict)) or (
        isinstance(target, set) and isinstance(contents, set | frozenset)
    ):
        target.clear()
        target.update(contents)
    else:
        raise EngineError(f"the server sent a {type(contents).__name__} as the contents of a {type(target).__name__}")


def _blobs(messages: Iterable[Saves]) -> Iterator[Blob]:
    for saves in messages:
        yield from (blob for value in saves.objects.values if (blob := blob_of(value)) is not None)
