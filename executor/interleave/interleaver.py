"""Interleaves blocks with the forward pass: who waits where, hooks only there, and every rank in agreement.

Each step the interleaver is told which rows belong to which request. It resumes the blocks that wait for the step, hooks
the modules they ask for, serves them in invoke order when the model gets there, writes back what they changed, and hooks
what they ask for next. Under tensor parallelism every rank does the same; after each turn the ranks compare how it ended,
so a block that went another way on one rank fails that trace, on all ranks, before any rank waits for another.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from executor.block.mediator import Mediator
from executor.core.ended import Ended
from executor.core.errors import Refusal
from executor.core.location import Kind, Location
from executor.core.request import Batch, Span
from executor.core.text import clip
from executor.interleave.admission import Requests
from executor.interleave.context import Host
from executor.interleave.finish import Endings
from executor.interleave.gang import OUT_OF_STEP, Companions, no_room
from executor.interleave.recordings import Recordings
from executor.interleave.serving import Place, Serving
from executor.interleave.turns import Turns
from executor.model.hooks import Hooks
from executor.model.kv_guard import not_finite
from executor.model.node import Node
from executor.model.rows import ManyRows, Rows
from executor.model.tree import LOGITS, PSEUDO, SAMPLES
from executor.parallel.agreement import different_values
from interpose.contract.result import Result
from interpose.v1 import trace_pb2 as pb

_BETWEEN = 1 << 62  # no place of any step: between two
_ANY_TIME = (Kind.STEP, Kind.RESULT, Kind.BARRIER)  # what a block may go on waiting for when a step ends


def _written_by(mediator: Mediator) -> int:
    """A number that stands for all that a block wrote in this step; waits for the devices that it is on."""
    written = [int(one) for one in mediator.state.record.wrote]
    mediator.state.record.wrote.clear()
    return zlib.crc32(repr(written).encode()) if written else 0


class Interleaver:
    """The blocks of one worker.

    Args:
        host: the worker.

    Attributes:
        mediators: the mediators of all unfinished traced requests, by request id.
        live: those of them that wait for something in a coming step, or must see that there is none. Empty: steps are the
            engine's alone.
        ended: how the blocks ended that ended in this step, by request id; the runner takes it. `Ended.READ_ONLY`: the
            request goes on without its block; any other member: it must end too.
        stages: the pipeline's stages.
        open, admit, waits, drop: of `Requests`; finish: of `Endings`.
    """

    def __init__(self, host: Host) -> None:
        self._hooks = Hooks(host.tree, lambda node, kind, value: self._visit(node, kind, value, self._token_rows))
        self._requests = Requests(host)
        self._turns = Turns(self._requests.scopes, host, self._hooks.muted)
        self._companions = Companions(self._requests, self._turns)
        self._serving = Serving(host.stages, host.ranks, self._turns, self._fail, host.vocabulary, host.cache)
        endings = Endings(self._requests, self._end, host)
        self.finish = endings.finish
        self.mediators = self._requests.mediators
        self.live = self._requests.live
        self.ended = self._requests.ended
        self.open = self._requests.open
        self.admit = self._requests.admit
        self.waits = self._requests.waits
        self.drop = self._requests.drop
        self._tree = host.tree
        self._budget = host.budget
        self._ranks = host.ranks
        self._cache = host.cache
        self._spoilt: set[str] = set()  # blocks whose requests left what is not finite in the cache, in this step
        self.stages = host.stages
        self._recordings = Recordings(host.tree, self._hooks.add, host.limits.max_saved_bytes)
        self._batch = Batch({}, 0, 0, 0)
        self._spans: dict[str, tuple[Span, ...]] = {}  # where the rows of the blocks in the step are
        self._place = _BETWEEN  # the model's, in the step
        self._waiting: dict[tuple[str, str], list[Mediator]] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing of any trace is held."""
        return not (self._requests or self._hooks)

    def take_ended(self) -> dict[str, Ended]:
        """Return what `ended` holds, and empty it."""
        ended = dict(self.ended)
        self.ended.clear()
        return ended

    # Admission.

    def admitted(self, request_ids: Sequence[str]) -> None:
        """Compare over the ranks which of the new requests were admitted; one that failed on any rank fails on all."""
        keys = [*request_ids, *self._requests.take_brought()]
        everyone = self._ranks.compare([int(key in self.live) for key in keys])
        for i, request_id in enumerate(keys):
            mediator = self.live.get(request_id)
            if mediator is not None and not all(votes[i] for votes in everyone):
                message = "the block could not be bound on another rank of the model"
                self._fail(mediator, pb.Failure(code=pb.ERROR_CODE_ENGINE, message=message))

    def preempted(self, request_id: str) -> None:
        """The engine evicted a request and computes it anew, prompt and all, without the changes that its block made.

        A block that only read and has ended loses nothing; any other fails, because what follows would be wrong.
        """
        mediator = self.mediators.get(request_id)
        if mediator is not None and not self._disposable(mediator):
            self._fail(
                mediator,
                pb.Failure(
                    code=pb.ERROR_CODE_UNAVAILABLE,
                    message="the engine ran out of cache and evicted the request while it ran; submit it again",
                ),
            )

    def _disposable(self, mediator: Mediator) -> bool:
        """Whether a request could be computed anew without harm: its blocks need no step more and changed nothing."""
        wholes = self._requests.wholes.get(mediator.identity.trace_id, ())
        blocks = (mediator, *self._requests.edits_of(mediator.identity.request_id), *wholes)
        ended = mediator.state.ending.ended in (None, Ended.DONE) and not self.waits(mediator.identity.request_id)
        return ended and not any(block.state.changed for block in blocks)

    # A step.

    def begin_step(self, batch: Batch) -> None:
        """A forward begins: start and resume the blocks that wait for it, and hook what they ask for.

        On a later pipeline stage the step is under way, and this stage's part of it begins.
        """
        if self.stages.mine == 0:
            self.stages.begin(batch)
            self._begin(batch)
        else:  # without the blocks that have ended on the way
            spans = {key: span for key, span in self._batch.spans.items() if key in batch.spans}
            if batch != replace(self._batch, spans=spans):
                raise RuntimeError("the pipeline stages laid out the rows of a step differently")

    def follow(self, stages: Iterable[int]) -> None:
        """Take part in a step while other pipeline stages compute theirs, to its end if the last one is among them."""
        for stage in stages:
            if stage == 0:
                self._begin(self.stages.begun())
            while (at := self.stages.announced(stage)) is not None:
                node = self._tree.find(at[0])
                assert node is not None
                self._visit(node, at[1], None, self._token_rows)
            if stage == self.stages.last:
                self._end_step()

    def _begin(self, batch: Batch) -> None:
        self._batch = batch
        self._place = -1
        self._budget.begin_step()
        self._hooks.begin_step()
        apart = self._companions.apart(batch.spans)
        alone = [(self.live[key], (span,)) for key, span in batch.spans.items() if key in self.live]
        self._spans = {}
        for mediator, spans in (*alone, *self._companions.seen(batch.spans)):
            self._spans[mediator.identity.request_id] = spans
            mediator.begin_step()
            self._recordings.enlist(mediator)
            if mediator.identity.outer and not self._companions.keep_step(mediator, batch.spans):
                self._fail(mediator, pb.Failure(code=pb.ERROR_CODE_ENGINE, message=OUT_OF_STEP))
            elif mediator.state.resting:  # it is here for what it has skipped, and will not skip again
                self._check_skips(mediator)
            elif mediator.state.progress.step == 0:
                self._start(
                    mediator, sum(span.stop - span.start for span in spans), mediator.identity.trace_id in apart
                )
            elif (
                mediator.state.waits.location
                and mediator.state.waits.location.kind == Kind.STEP
                and mediator.state.waits.location.step == mediator.state.progress.step
            ):
                self._turns.run(mediator, lambda m=mediator: m.resume(True))  # type: ignore[misc]
        self._agree(self._present())

    def _start(self, mediator: Mediator, tokens: int, apart: bool) -> None:
        """A block's first step begins: run it up to what it first asks for.

        Args:
            tokens: how many of its prompt the step has.
            apart: whether the step lacks some of those it was to start with.
        """
        if mediator.identity.outer:
            mediator.state.progress.prompt_tokens = tokens
        expected = mediator.state.progress.prompt_tokens
        if tokens != expected:
            message = (
                f"the prompt has {expected} tokens, more than the engine runs in one step; trace a shorter one, "
                "or have max_num_batched_tokens raised where the model is served"
            )
            self._fail(mediator, pb.Failure(code=pb.ERROR_CODE_INVALID_ARGUMENT, message=message))
        elif apart:
            self._fail(mediator, no_room(mediator.identity.gang))
        else:
            self._turns.run(mediator, mediator.start)

    def _present(self) -> list[Mediator]:
        """The blocks that are in the step, as far as they have not left."""
        return [self.mediators[key] for key in self._spans if key in self.mediators]

    def padded_to(self, rows: int) -> None:
        """The step's tensors have so many rows, with those that nobody uses."""
        self._batch = replace(self._batch, padded_tokens=rows)

    def end_forward(self) -> None:
        """The modules have run: take the hooks away."""
        self._hooks.clear()

    def check_cache(self) -> None:
        """The model has run, in the forward context that is still there: see what changed requests left in the cache."""
        changed = [mediator for mediator in self._present() if mediator.state.changed]
        if changed:
            spoilt = self._cache.clean(
                {span for mediator in changed for span in self._spans[mediator.identity.request_id]}
            )
            self._spoilt.update(
                mediator.identity.request_id
                for mediator in changed
                if any(span in spoilt for span in self._spans[mediator.identity.request_id])
            )

    def visit_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Serve `logits.output`, [requests, vocab], before sampling; return what to sample from."""
        return self._visit_requests(LOGITS, logits)

    def visit_samples(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Serve `samples.output`, [requests, 1], after sampling; return what was sampled."""
        return self._visit_requests(SAMPLES, token_ids)

    def end_step(self) -> None:
        """The step is over, on the last stage: what was asked for in it and did not come will not come."""
        self.stages.end()
        self._end_step()

    def _end_step(self) -> None:
        missed = []
        for mediator in self._present():
            waiting = mediator.state.waits.location
            if waiting is None or waiting.kind in _ANY_TIME or mediator.identity.request_id not in self.live:
                continue
            if waiting.step == mediator.state.progress.step:
                missed.append(mediator)
                mediator.pass_step()  # a block that catches the error is not given the next step's values for this one's
                error = Refusal(
                    pb.ERROR_CODE_UNKNOWN_LOCATION,
                    f"{waiting} was not reached in step {waiting.step}: the forward pass did not call {waiting.path}",
                    location=str(waiting),
                )
                self._turns.run(mediator, lambda m=mediator, e=error: m.throw(e))  # type: ignore[misc]
        self._waiting.clear()
        self._recordings.clear()
        self._place = _BETWEEN
        self._agree(missed)
        self._look_back()
        for mediator in self._present():
            if mediator.identity.request_id in self.live and not mediator.state.resting:
                self._check_skips(mediator)
        if self._requests.streams:
            for request_id in self._batch.spans:
                self._stream_step(request_id)
        self._requests.after_step()

    def let_pass(self) -> None:
        """A step goes by in which no block waits for anything, while there are traces."""
        self._requests.after_step()

    def _look_back(self) -> None:
        """Fail those who left on any rank what must not stay in the cache, without which their next steps would be wrong, and
        those who wrote something else on another rank."""
        present = self._present()
        spoilt = [int(mediator.identity.request_id in self._spoilt) for mediator in present]
        everyone = self._ranks.compare(spoilt + [_written_by(mediator) for mediator in present])
        self._spoilt.clear()
        for i, mediator in enumerate(present):
            failure = None
            if any(votes[i] for votes in everyone):
                failure = not_finite(mediator.state.progress.step)
            elif len({votes[len(present) + i] for votes in everyone}) > 1:
                failure = different_values(mediator.state.progress.step, len(everyone))
            if failure is None:
                continue
            # A block without a prompt has changed what those with one go on with.
            prompts = self._requests.companions(mediator.identity.trace_id) if mediator.identity.outer else []
            for one in (mediator, *prompts):
                if one.state.ending.ended is not Ended.FAILED:  # what the block itself ran into says more
                    said = pb.Failure()
                    said.CopyFrom(failure)
                    self._fail(one, said)

    def _check_skips(self, mediator: Mediator) -> None:
        """Fail a block that lets a module run whose cache lacks what it skipped."""
        gap = mediator.state.record.skips.missed(mediator.state.progress.step)
        if gap is None:
            return
        if mediator.state.live:
            self._turns.run(mediator, lambda: mediator.throw(gap))
        if mediator.state.ending.ended is not Ended.FAILED:
            self._fail(mediator, pb.Failure(code=gap.code, message=gap.message, location=gap.location))
        self._enlist([mediator])

    def _stream_step(self, request_id: str) -> None:
        """Send what a block of a streamed trace saved in the step that has ended."""
        stream = self._requests.streams.get(request_id)
        if stream is not None:
            mediator = self.mediators[request_id]
            if not stream.step(mediator.names, mediator.state.steps, request_id not in self.live):
                self.ended[request_id] = Ended.FAILED

    # The end of a request.

    def _end(self, mediator: Mediator, result: Result | list[Result]) -> None:
        """Let a block run to its end: the generation is over."""
        if mediator.state.live:
            self._budget.begin_step()
            if isinstance(result, Result):
                mediator.state.progress.step = max(mediator.state.progress.step, len(result.token_ids) - 1)
            self._turns.run(mediator, lambda: mediator.finish(result))
        self._agree([mediator])

    # Serving.

    def _visit_requests(self, path: str, value: torch.Tensor) -> torch.Tensor:
        requests = self._batch.requests
        return self._visit(
            self._tree.pseudo[path],
            Kind.OUTPUT,
            value,
            lambda span: Rows(span.index, span.index + 1, requests, value.shape[0]),
        )

    def _token_rows(self, span: Span) -> Rows:
        return Rows(span.start, span.stop, self._batch.tokens, self._batch.padded_tokens)

    def _visit(self, node: Node, kind: str, value: Any, rows_of: Callable[[Span], Rows]) -> Any:
        """The model is at a location: serve everyone who waits for it; return the value to go on with."""
        key = (node.path, str(kind))
        if key not in self._waiting and not self._recordings.at(*key):
            return value
        self.stages.announce(*key)
        self._place = self._tree.order_of(node.path, kind)
        place = Place(node, kind, self._place)
        visited: list[Mediator] = []

        def settle(mediator: Mediator) -> None:
            nonlocal value
            value = self._serving.settle(mediator, value)

        # Who passes a barrier here may come to wait for this very location.
        while waiting := self._waiting.pop(key, None):
            waiting.sort(key=self._turn_order)
            # A block that sees the rows of others sees what these have made of them, and the other way round.
            overlapping = any(mediator.identity.outer for mediator in waiting)
            for group in [[mediator] for mediator in waiting] if overlapping else [waiting]:
                for mediator in group:
                    self._serving.serve(mediator, place, value, *self._rows(mediator, rows_of))
                    settle(mediator)
                self._agree(group, settle)
            visited += waiting
        for mediator in visited:
            if mediator.state.waits.barrier is not None:
                value = self._serving.settle(mediator, value, leaving=True)
        for mediator, recorder in sorted(self._recordings.at(*key), key=lambda pair: self._turn_order(pair[0])):
            if mediator.state.ending.ended in (None, Ended.DONE):
                location = f"{node.path}.{kind}"
                give = partial(self._serving.give, mediator, place, location, value, *self._rows(mediator, rows_of))
                scope = self._requests.scopes[mediator.identity.trace_id]
                failure = self._recordings.record(mediator, recorder, node.path, str(kind), give, scope)
                if failure is not None:
                    self._fail(mediator, failure)
        return value

    def _rows(self, mediator: Mediator, rows_of: Callable[[Span], Rows]) -> tuple[Rows | ManyRows, int]:
        """The rows that a block sees, and its (first) request's place in the batch."""
        spans = self._spans[mediator.identity.request_id]
        parts = tuple(map(rows_of, spans))
        return ManyRows(parts) if mediator.identity.outer else parts[0], spans[0].index

    def _turn_order(self, mediator: Mediator) -> tuple[int, int, int]:
        return (
            self._requests.scopes[mediator.identity.trace_id].arrival,
            mediator.identity.invoke,
            mediator.identity.rank,
        )

    def _agree(self, mediators: Sequence[Mediator], settle: Callable[[Mediator], None] | None = None) -> None:
        """See that the blocks' turns ended alike on every rank (`Turns.agree`), and list them for what they wait for next."""
        self._turns.agree(mediators, self._fail, settle)
        self._enlist(mediators)
        turned = list(mediators)
        while turned := self._companions.pass_barriers(turned, self._batch.spans, self._place):
            if settle is not None:
                for mediator in turned:
                    settle(mediator)
            self._turns.agree(turned, self._fail, settle)
            self._enlist(turned)

    def _fail(self, mediator: Mediator, failure: pb.Failure) -> None:
        failure.trace_id, failure.invoke = mediator.identity.trace_id, mediator.identity.invoke
        mediator.fail(failure)
        for edit in self._requests.edits_of(mediator.identity.request_id):
            if edit.state.live:
                edit.cancel()
            self.live.pop(edit.identity.request_id, None)
        self._enlist([mediator])
        self._stream_step(mediator.identity.request_id)

    def _fail_for_edit(self, edit: Mediator) -> None:
        """A standing edit failed, and with it the request that it ran in."""
        mediator = self.mediators.get(edit.identity.owner)
        if (
            mediator is not None
            and mediator.state.ending.ended is not Ended.FAILED
            and edit.state.ending.failure is not None
        ):
            failure = pb.Failure()
            failure.CopyFrom(edit.state.ending.failure)
            failure.message = clip(f"in the edit {edit.identity.edit!r}: {failure.message}")
            self._fail(mediator, failure)

    def _enlist(self, mediators: Iterable[Mediator]) -> None:
        for mediator in mediators:
            waiting = mediator.state.waits.location
            if mediator.state.record.recorders and self._place < _BETWEEN:
                self._recordings.enlist(mediator)
            if mediator.identity.edit:
                if mediator.state.ending.ended is Ended.FAILED:
                    self._fail_for_edit(mediator)
            elif mediator.identity.outer:
                pass  # it is no request that could end
            elif mediator.state.ending.ended is Ended.FAILED:
                self.ended[mediator.identity.request_id] = Ended.FAILED
            elif mediator.state.ending.ended is Ended.STOPPED:
                self.ended[mediator.identity.request_id] = Ended.STOPPED
            if mediator.state.resting:
                stays = mediator.state.record.skips.owed or mediator.state.record.recorders
                if not stays or mediator.state.ending.ended not in (None, Ended.DONE):
                    self.live.pop(mediator.identity.request_id, None)
                for owner in self._owners(mediator):
                    if owner.identity.request_id not in self.ended and self._disposable(owner):
                        self.ended[owner.identity.request_id] = Ended.READ_ONLY
            elif waiting is not None and waiting.kind not in _ANY_TIME and waiting.step == mediator.state.progress.step:
                self._wait(mediator, waiting)

    def _owners(self, mediator: Mediator) -> list[Mediator]:
        """Return the own blocks of the requests that a block runs in."""
        if mediator.identity.outer:
            return self._requests.companions(mediator.identity.trace_id)
        owner = self.mediators.get(mediator.identity.owner if mediator.identity.edit else mediator.identity.request_id)
        return [owner] if owner is not None else []

    def _wait(self, mediator: Mediator, location: Location) -> None:
        key = (location.path, str(location.kind))
        self._waiting.setdefault(key, []).append(mediator)
        if location.path not in PSEUDO:
            self._hooks.add(*key)
