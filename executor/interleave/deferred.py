"""Requests whose blocks need not run, because their loops are all that is left to do.

A request is deferred if all that its block does is known (`executor.interleave.known`). Its loop goes into the tables, and its
block is neither bound nor started. At the request's end, what the taps read becomes what the block would have saved.

If something happens that the block has to see, the block is bound and started after all, and takes over its loop
(`Interleaver._run_deferred`). That is so when the engine evicts the request, when the cache got a number that is not finite, and
when a value cannot be sent in the short way. The block's code before its loop only makes lists, so the block is then as if it had
started before the first step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from executor.block.binding import ordinary_tensors
from executor.block.tally import Tally
from executor.block.uploads import Uploads
from executor.core.ended import Ended, Ending
from executor.core.request import InvokeRequest, Opened
from executor.graphs.landing import rows_of
from executor.graphs.loops import TableLoops
from executor.graphs.table_loop import Left, asks_prompt
from executor.interleave.context import Host
from executor.interleave.known import Known, KnownBlocks, Learn
from executor.interleave.spans_of_steps import counted
from executor.plan.environment import Environment
from executor.plan.run import Member
from executor.saves.lists import Lists
from executor.saves.rows import Rows
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Tensor, Value
from interpose.wire.decoder import Decoder
from interpose.wire.resolver import Resolver

_MOST_CONSTANTS, _MOST_CONSTANT_BYTES = 128, 64 << 10  # kept; each of so many bytes at most
_MOST_ACCOUNTS = 64


@dataclass(eq=False)
class Deferred:
    """A deferred request.

    Attributes:
        opened: its trace.
        prompt_tokens: rows of its prompt.
        known: what its block does.
        request: as it came.
        left: what its loop left, if the loop has left the tables and the block has to see it.
    """

    opened: Opened
    prompt_tokens: int
    known: Known
    request: InvokeRequest
    left: Left | None = None


class _Constants(Resolver):
    """Makes a trace's tensors, as `executor.block.resolver` does, and nothing else."""

    def __init__(self, device: torch.device, uploads: Uploads) -> None:
        self._device = device
        self._uploads = uploads

    def uploaded(self, tensor: Tensor, make: Callable[[], Any]) -> Any:  # [...], the shape of the message
        return self._uploads.tensor(tensor, make)

    def placed(self, tensor: Any) -> Any:  # [...]
        return tensor.to(self._device)


class Deferral:
    """The deferred requests of one worker.

    Args:
        host: the worker.
        loops: its loops in the tables.

    Attributes:
        here: the deferred requests, by request id.
        ended: how many have ended without their blocks.
    """

    def __init__(self, host: Host, loops: TableLoops) -> None:
        self.here: dict[str, Deferred] = {}
        self.ended = 0
        self._host = host
        self._loops = loops
        self._blocks = KnownBlocks()
        self._ids: dict[str, str] = {}  # request ids by trace
        self._constants: OrderedDict[tuple[bytes, ...], list[torch.Tensor]] = OrderedDict()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.here

    def learner(self, opened: Opened, prompt_tokens: int) -> Learn | None:
        """Return what a block's runner calls when its loop is in the tables, as of `KnownBlocks`."""
        return self._blocks.learner(opened, prompt_tokens)

    # A request's begin.

    def take(self, request_id: str, opened: Opened, prompt_tokens: int, request: InvokeRequest) -> bool:
        """Defer a request, all of whose prompt is in the step; return whether it could be.

        Args:
            request_id: the request.
            opened: its trace, of which it is the only request.
            prompt_tokens: rows of its prompt.
            request: as it came.
        """
        known = self._blocks.find(opened, prompt_tokens)
        if known is None:
            return False
        steps = known.steps[prompt_tokens]
        if request.prefix and not request.last and asks_prompt(steps):
            return False
        try:
            constants, alike = self._constants_of(opened, known)
        except Exception:  # the block is bound in the usual way, and fails in its own name
            return False
        member = Member(Environment(steps[-1].plan.environment, constants), {}, _nothing, _nothing)
        with torch.inference_mode(False), torch.no_grad():
            why = self._loops.enter(request_id, opened.tenant, steps, member, 0, _comes_not_back, prompt_tokens, alike)
        if why:
            return False
        self.here[request_id] = Deferred(opened, prompt_tokens, known, request)
        self._ids[opened.trace.id] = request_id
        return True

    def _constants_of(self, opened: Opened, known: Known) -> tuple[list[tuple[str, torch.Tensor]], object]:
        """Return the tensors that a loop reads, [...] each, by the names of its environment.

        Nothing changes them. Small tensors that came inside the message are kept for other requests.

        Returns:
            The tensors, and an object that stands for them; None: they are this request's alone.
        """
        if not known.constants:
            return [], known
        values = opened.trace.scope.values
        messages = [values[index].tensor for _, index in known.constants]
        brought = any(one.HasField("blob") for one in messages)  # a session has what it has brought
        kept = not brought and sum(len(one.data) for one in messages) <= _MOST_CONSTANT_BYTES
        content = tuple(one.SerializeToString() for one in messages) if kept else ()
        made = self._constants.get(content) if kept else None
        if made is None:
            host, session, trace_id = self._host, opened.session, opened.trace.id
            uploads = Uploads(lambda blob: host.outbox.get(session, trace_id, blob.id), opened.tenant, host.constants)
            resolver = _Constants(host.tree.device, uploads)
            decoder = Decoder(opened.trace.scope, get_blob=uploads.get, resolver=resolver)
            with ordinary_tensors():
                made = [decoder.decode(Value(ref=index)) for _, index in known.constants]
            if kept:
                self._constants[content] = made
                if len(self._constants) > _MOST_CONSTANTS:
                    self._constants.popitem(last=False)
        found = [(name, tensor) for (name, _), tensor in zip(known.constants, made, strict=True)]
        return found, made if kept else None

    # Its end.

    def id_of(self, trace_id: str) -> str:
        """Return the request of a trace if it is deferred, else ""."""
        return self._ids.get(trace_id, "")

    def pop(self, request_id: str) -> Deferred:
        """Forget a deferred request, whose block runs from now on."""
        found = self.here.pop(request_id)
        del self._ids[found.opened.trace.id]
        return found

    def drop(self, trace_id: str) -> None:
        """Forget a trace that was given up. Idempotent."""
        request_id = self.id_of(trace_id)
        if request_id:
            self.pop(request_id)
            self._loops.drop(request_id)

    def finish(self, generated: Mapping[str, int]) -> dict[str, Ending]:
        """End deferred requests that the engine has finished.

        Args:
            generated: the number of tokens of each request, by its id.

        Returns:
            How each block ended, and its events. A request is missing whose block has to see its end; the block is to run.
        """
        here = [one for one in generated if self.here[one].left is None]
        flagged = self._loops.flagged(here)
        found = {}
        for request_id in here:
            if request_id in flagged:
                continue
            try:
                ending = self._finish(request_id, generated[request_id])
            except Exception:  # the block meets the error again, as its own
                continue
            if ending is not None:
                found[request_id] = ending
        return found

    def _finish(self, request_id: str, tokens: int) -> Ending | None:
        """End one request, as `finish` does; None: its block is to run."""
        deferred = self.here[request_id]
        if self._loops.ran_of(request_id, tokens) < 1:
            return None
        left = deferred.left = self._loops.leave(request_id, tokens, watched=False)
        lists = _lists_of(left, deferred.known)
        if lists is None:
            return None
        trace = deferred.opened.trace
        host, events = self._host, []
        if lists:
            sent = Lists(trace.id, -1 if trace.remote else host.limits.inline_bytes)
            event = sent.event(lists, host.limits.max_saved_bytes)
            for blob_id, data in sent.blobs if event.HasField("saves") else ():
                host.outbox.put(deferred.opened.session, trace.id, blob_id, data)
            events.append(event.SerializeToString())
        events.append(self._account(deferred, left, tokens))
        host.outbox.forget(trace.id)
        self.pop(request_id)
        self.ended += 1
        return Ended.DONE, events, 0

    def _account(self, deferred: Deferred, left: Left, tokens: int) -> bytes:
        """Return the serialized event with a request's account."""
        accounts = deferred.known.accounts
        ran = tuple(map(left.ran_in, left.loop.phases))
        key = (deferred.prompt_tokens, left.passed, tokens, left.ran, ran)
        found = accounts.get(key)
        if found is None:
            tally = Tally()
            counted(left, tally)
            account = tally.accounting(0, left.passed, deferred.prompt_tokens, tokens, self._host.precision)
            found = pb.Event(accounting=account).SerializeToString()
            if len(accounts) >= _MOST_ACCOUNTS:
                accounts.clear()
            accounts[key] = found
        return found


def _lists_of(left: Left, known: Known) -> list[tuple[str, list[Rows]]] | None:
    """Return the lists that a block gives back; None if they have to be made in the usual way."""
    found: dict[int, list[Rows]] = {number: [] for _, _, number in known.lists}
    saved = set[int]()
    for phase in left.loop.phases:
        if left.ran_in(phase):
            parts = rows_of(left, phase)
            if parts is None:
                return None
            for number, rows in parts.items():
                if number in found:
                    found[number] += rows
            saved |= {one.container for one in phase.steps.plan.appends if one.item.saved}
    return [(name, found[number]) for name, itself, number in known.lists if itself or number in saved]


def _nothing(*values: Any) -> None:
    """Stand for what marks saved values: no value is marked one by one."""


def _comes_not_back(left: Left, again: bool) -> Any:
    raise RuntimeError("the loop of a deferred request came back without its block")
