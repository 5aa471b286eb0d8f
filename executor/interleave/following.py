"""Follows a block on shapes, before a prompt that is longer than a step begins.

So it is known beforehand for which locations the block asks, how many bytes they have, and whether each row of its changes
depends on that row of the prompt alone (`executor.interleave.row_wise`). What cannot be known so is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from executor.block.traceback import frames_here
from executor.core.location import Kind, Location
from executor.core.request import InvokeRequest, Opened
from executor.interleave.context import Host
from executor.interleave.row_wise import RowWise
from executor.interleave.shadow import Shadow
from executor.model.layouts import WHOLE
from executor.model.meta_tensors import Fakes, needs_elements
from executor.model.rows import Rows
from executor.model.shapes import Shapes
from executor.model.tree import PSEUDO, ModuleTree
from executor.plan.forms import Form
from interpose.v1 import trace_pb2 as pb

_PATTERN_BYTES = 1 << 30
_RAISE = "or have max_num_batched_tokens raised where the model is served"


@dataclass(frozen=True)
class Needs:
    """What a block asks for in the step of its prompt.

    Attributes:
        locations: by path and kind, each with whether the block changes it.
    """

    locations: dict[tuple[str, str], bool]

    @property
    def changes(self) -> bool:
        """Whether the block changes anything."""
        return any(self.locations.values())


class NotFollowed(Exception):
    """A block cannot run over a prompt that comes in chunks.

    Attributes:
        failure: the reason.
    """

    def __init__(self, failure: pb.Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Following:
    """Follows one block.

    Args:
        tree: the model's modules.
        forms: the forms of the locations' values for one row, by path and kind.
        tokens: the length of the prompt.
        step: the most tokens of a step.
        most: the most bytes that are kept of the prompt.
    """

    def __init__(
        self, tree: ModuleTree, forms: Mapping[tuple[str, str], Form], tokens: int, step: int, most: int
    ) -> None:
        self.fakes = Fakes()
        self.rows = RowWise()
        self._tree = tree
        self._forms = forms
        self._tokens = tokens
        self._step = step
        self._most = most
        self._bytes = 0

    def follow(self, shadow: Shadow) -> Needs:
        """Run a shadow on shapes up to the end of the prompt's step; return what it asks for.

        Args:
            shadow: the block, with the tensors of `fakes`, whose turns have `rows` around them.

        Raises:
            NotFollowed: with the reason, and what to write instead.
        """
        locations: dict[tuple[str, str], bool] = {}
        state = shadow.mediator.state
        shadow.start()
        while (at := shadow.waits) is not None and at.path not in PSEUDO:
            served = self._served(at)
            shadow.serve(served, self._tree.order_of(at.path, at.kind))
            changed = self._changed(shadow, served, at)
            locations[at.path, str(at.kind)] = locations.get((at.path, str(at.kind)), False) or changed
            shadow.mediator.left()
            self._bytes += sum(one.nbytes for one in served.given()) * (3 if changed else 2)
            if self._bytes > self._most:
                raise self._refuse(
                    pb.ERROR_CODE_QUOTA_EXCEEDED,
                    f"what the block reads of it has more than {self._most >> 20} MiB (block_memory_bytes of the model's "
                    f"settings); read fewer locations in one trace, {_RAISE}",
                    at,
                )
        failure = shadow.failure
        if failure is not None:
            if needs_elements(failure):
                failure.code = pb.ERROR_CODE_INVALID_ARGUMENT
                failure.message = (
                    f"{self._why}, so where the block asks for values must not depend on values: take numbers out of tensors "
                    f"after the prompt's last location, {_RAISE} ({failure.message})"
                )
            raise NotFollowed(failure)
        if state.record.recorders or state.record.skips.fingerprint():
            what = "tracer.cache() records" if state.record.recorders else "module.skip(value) skips"
            instead = "save values one by one" if state.record.recorders else "assign the module's output"
            raise self._refuse(
                pb.ERROR_CODE_INVALID_ARGUMENT, f"{what} in the step of the whole prompt; {instead}, {_RAISE}", None
            )
        return Needs(locations)

    @property
    def _why(self) -> str:
        return f"the prompt has {self._tokens} tokens and is computed in chunks of up to {self._step}"

    def _refuse(
        self, code: pb.ErrorCode, what: str, at: Location | None, lines: Sequence[pb.Frame] = ()
    ) -> NotFollowed:
        location = "" if at is None else at.shown or f"{at.path}.{at.kind}"
        return NotFollowed(pb.Failure(code=code, message=f"{self._why}, and {what}", location=location, frames=lines))

    def _served(self, at: Location) -> Shapes:
        """Return a location's value without elements, over the whole prompt."""
        form = self._forms.get((at.path, str(at.kind)))
        if at.kind == Kind.PATTERN:
            return self._pattern(at)
        if form is None:
            raise self._refuse(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"the shape of {at} is not known before a step; read what the modules around it take and give",
                at,
            )
        device = self._tree.device
        tensors = [self.fakes.make((self._tokens, *leaf.shape), leaf.dtype, device) for leaf, _ in form.leaves()]
        return self._shapes(at, form.filled(tensors), self._tokens)

    def _pattern(self, at: Location) -> Shapes:
        kernel: Any = self._tree.nodes[at.path].layer
        heads = kernel.num_heads * (self._tree.nodes[at.path].layouts.ranks)
        if heads * self._tokens * self._tokens * 4 > _PATTERN_BYTES:
            raise self._refuse(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"{self._tokens} by {self._tokens} probabilities for each of {heads} heads are more than fit; use attn.rot_q, "
                "attn.rot_k and attn.z",
                at,
            )
        shape = (heads, self._tokens, self._tokens)
        gave = self._forms.get((at.path, str(Kind.OUTPUT)))
        dtype = next((leaf.dtype for leaf, _ in gave.leaves()), torch.float32) if gave is not None else torch.float32
        return self._shapes(at, self.fakes.make(shape, dtype, self._tree.device), heads)

    def _shapes(self, at: Location, value: Any, rows: int) -> Shapes:
        served = Shapes(str(at), value, Rows(0, rows, rows, rows), lambda path: WHOLE, self.fakes.like)
        for tensor in served.given():
            if at.kind == Kind.PATTERN:
                self.rows.mix(tensor, "the attention pattern")
            else:
                self.rows.note(tensor)
        return served

    def _changed(self, shadow: Shadow, served: Shapes, at: Location) -> bool:
        """Return whether the block changed a value; refuse a change that mixes rows."""
        changed = served.changed()
        for tensor in changed:
            by = self.rows.why_mixed(tensor)
            if shadow.applied:
                by = by or "a module that the block applies"
            if by:
                raise self._refuse(
                    pb.ERROR_CODE_INVALID_ARGUMENT,
                    f"{at} is changed by what depends on several rows, or is not known not to ({by}), which a chunk has not "
                    "all of; write a change of each row by itself: add or multiply by constants, set rows by index, project "
                    f"on a vector (h - (h @ d)[:, None] * d), {_RAISE}",
                    at,
                    self.rows.lines_of(tensor),
                )
        if changed and at.kind == Kind.PATTERN:
            raise self._refuse(pb.ERROR_CODE_INVALID_ARGUMENT, f"{at} is read-only; clone it to work on it", at)
        return bool(changed)


def too_long(tokens: int, step: int, why: str) -> NotFollowed:
    """Return the refusal of a request of a kind whose prompt cannot come in chunks."""
    message = (
        f"the prompt has {tokens} tokens, a step of the engine has up to {step}, and {why}, so that the prompt cannot be "
        f"computed in chunks; use a shorter prompt, {_RAISE}"
    )
    return NotFollowed(pb.Failure(code=pb.ERROR_CODE_INVALID_ARGUMENT, message=message))


def gathered(
    host: Host,
    opened: Opened,
    request: InvokeRequest,
    request_id: str,
    tokens: int,
    muted: Callable[[], AbstractContextManager[object]],
    others: bool,
) -> tuple[Needs, Callable[[], Shadow]]:
    """Return what a block asks for in a prompt that comes in chunks, and what makes its shadows.

    Args:
        host: the worker.
        opened, request, request_id: the block's trace and request.
        tokens: the length of the prompt.
        muted: a context in which no hook of a step sees a module that is called.
        others: whether other blocks see the request's rows.

    Raises:
        NotFollowed: with the reason, and what to write instead.
    """
    invoke = opened.trace.invokes[request.invoke]
    why = (
        "the model is served on several pipeline stages"
        if host.stages.last
        else "other blocks see its rows: standing edits, or invokes without a prompt"
        if others
        else "it runs together with other invokes, at a barrier or in one step"
        if request.gang > 1 or invoke.gang
        else "its block reads names that other invokes assign"
        if invoke.after
        else host.cache.why_not_looked_at
    )
    if why or not host.shapes:
        raise too_long(tokens, host.step_tokens, why or "the shapes of the model's values are not known")

    def shadow_of(**options: Any) -> Shadow:
        return Shadow(host, opened, request_id, request.invoke, tokens, muted, **options)

    host.budget.begin_step()
    following = Following(host.tree, host.shapes, tokens, host.step_tokens, host.budget.memory_bytes)
    with torch.inference_mode(False):
        shadow = shadow_of(fakes=following.fakes, around=lambda: following.rows)
        following.rows.where = lambda: frames_here(shadow.sources)
        try:
            needs = following.follow(shadow)
        finally:
            shadow.end()
    if needs.changes and opened.mingles:
        raise too_long(tokens, host.step_tokens, "its block changes the model and shares names with other invokes")
    return needs, shadow_of
