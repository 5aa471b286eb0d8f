"""Prompts that are longer than a step: what their blocks read is gathered over the chunks.

The engine computes such a prompt in chunks, one in each step. The block runs in the step of the last chunk, as if the whole
prompt were in that step. Which locations it asks for is known before the first chunk (`executor.interleave.following`). In
each chunk the rows of these locations are kept, and the block is served all of them.

A change is needed in each chunk. So if the block changes something, a copy of it runs in every chunk but the last: the
shadow. The shadow is served all rows that have come, and of its changes the chunk's rows go to the model. Its saves and its
prints are dropped. It was shown on shapes that each row of a change depends on that row alone, so the shadow's rows are the
block's. The block's own change over all rows is compared with them.

If the engine evicts the request in the middle, it computes chunks anew. Their rows take the places of the rows before.

A prompt may also lack rows, because the engine has taken them from its prefix cache. Such a prompt is closed: it was shown that
its block asks for none of its rows (`executor.plan.prompt_rows`), so none is kept. A block that asks for one after all is
refused, and so can neither see a part of a prompt nor change keys and values that the cache gives to other requests. A prompt is
closed whether or not the cache had any of it. It may be open at its end: the block asks for some of the last rows, all of which
are in the step of the last chunk, and is given nothing else (`executor.model.last_rows`).

Size: both kinds of prompts that a step does not have all rows of.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from executor.core.errors import Refusal
from executor.core.location import COMPUTED, Kind
from executor.core.request import Span
from executor.interleave.context import Host
from executor.interleave.following import Needs
from executor.interleave.serving import Serving, Visit
from executor.interleave.shadow import Shadow
from executor.model.last_rows import refused
from executor.model.rows import Rows
from executor.model.values import Fixed, Served
from executor.model.wide import Keeping, Kept, Wide
from interpose.v1 import trace_pb2 as pb


@dataclass(eq=False)
class _Prompt:
    """A prompt that comes in chunks.

    Attributes:
        tokens: its length.
        needs: what its block asks for.
        shadow_of: makes a shadow of the block.
        kept: the rows so far, by path and kind.
        done: how many rows of the prompt have come.
        start, stop: the rows of the step.
        shadow: the shadow in the step; None: the step is the last, or the block changes nothing.
        failure: why the block cannot be served.
        last: how many of the last rows the block may get, and no other; None: it gets all rows.
    """

    tokens: int
    needs: Needs
    shadow_of: Callable[[], Shadow]
    kept: dict[tuple[str, str], Kept] = field(default_factory=dict)
    done: int = 0
    start: int = 0
    stop: int = 0
    shadow: Shadow | None = None
    failure: Refusal | None = None
    last: int | None = None

    @property
    def closed(self) -> bool:
        """Whether the block gets none of the prompt's rows but the last."""
        return self.last is not None

    @property
    def ends(self) -> bool:
        """Whether the step has the prompt's last rows."""
        return self.stop == self.tokens


class Chunks:
    """The prompts of one worker that come in chunks.

    Args:
        host: the worker.
        hook: has a module's location visited in the step.

    Attributes:
        prompts: what is known of each prompt, by request id.
    """

    def __init__(self, host: Host, hook: Callable[[str, str], None]) -> None:
        self._cache = host.cache
        self._hook = hook
        self._serving: Serving | None = None
        self.prompts: dict[str, _Prompt] = {}
        self._step: dict[str, _Prompt] = {}
        self._spans: Mapping[str, Span] = {}

    def __contains__(self, key: object) -> bool:
        return key in self.prompts

    def serve_with(self, serving: Serving) -> None:
        """Have changes of shadows written back as changes of blocks are."""
        self._serving = serving

    def add(self, key: str, tokens: int, needs: Needs, shadow_of: Callable[[], Shadow]) -> None:
        """Take in a request whose prompt comes in chunks.

        Args:
            key: the request.
            tokens: the length of its prompt.
            needs: what its block asks for.
            shadow_of: makes a shadow of the block.
        """
        self.prompts[key] = _Prompt(tokens, needs, shadow_of)

    def close(self, key: str, tokens: int, last: int = 0) -> None:
        """Take in a request whose block gets none of its prompt's rows, or the last of them alone.

        The others may come from the prefix cache.

        Args:
            key: the request.
            tokens: the length of its prompt.
            last: how many of the last rows it may get.
        """
        self.prompts[key] = _Prompt(tokens, Needs({}), _no_shadow, last=last)

    def gathers(self, key: str) -> bool:
        """Return whether the rows of a request's prompt are kept from chunk to chunk."""
        prompt = self.prompts.get(key)
        return prompt is not None and not prompt.closed

    def last_of(self, key: str) -> int | None:
        """Return how many of the prompt's last rows a block may get; None: all rows."""
        prompt = self.prompts.get(key)
        return None if prompt is None else prompt.last

    def keep(self, known: Container[str]) -> None:
        """Forget the requests that are not among the known ones."""
        for key in [key for key in self.prompts if key not in known]:
            self._drop(key)

    def _drop(self, key: str) -> None:
        prompt = self.prompts.pop(key)
        self._step.pop(key, None)
        if prompt.shadow is not None:
            prompt.shadow.end()

    # A step.

    def begin(self, bounds: Mapping[str, tuple[int, int]]) -> None:
        """A step begins.

        Args:
            bounds: of each request in the step, the rows that were computed before, and the number of rows in the step.
        """
        for key in [key for key in self.prompts if key in bounds and bounds[key][0] >= self.prompts[key].tokens]:
            self._drop(key)  # its prompt went by in steps that no block waited for
        self._step = {key: prompt for key, prompt in self.prompts.items() if key in bounds}
        for key, prompt in self._step.items():
            computed, rows = bounds[key]
            prompt.start, prompt.stop = computed, computed + rows
            if computed > prompt.done and prompt.failure is None and not prompt.closed:
                message = "the engine served part of a traced prompt from its prefix cache"
                prompt.failure = Refusal(pb.ERROR_CODE_ENGINE, message)

    def partial(self, key: str) -> bool:
        """Return whether a request has rows in the step that are not the last of its prompt."""
        prompt = self._step.get(key)
        return prompt is not None and not prompt.ends

    @property
    def collecting(self) -> bool:
        """Whether rows are kept in the step, which has a chunk that is not the last."""
        return any(not prompt.ends and not prompt.closed for prompt in self._step.values())

    def closed(self, keys: Iterable[str]) -> bool:
        """Return whether a block of some gets none of the rows of the step."""
        steps = self._step
        return bool(steps) and any(key in steps and steps[key].closed and not steps[key].last for key in keys)

    def rows(self, key: str) -> int | None:
        """Return how many rows a block sees in the step; None: as many as the step has."""
        prompt = self._step.get(key)
        return None if prompt is None else prompt.tokens

    def enter(self, spans: Mapping[str, Span]) -> None:
        """The forward begins: start the shadows, and have the locations visited.

        Args:
            spans: where the chunks that are not the last are in the batch.
        """
        self._spans = spans
        for key in spans:
            prompt = self._step[key]
            if prompt.needs.changes and prompt.failure is None:
                prompt.shadow = prompt.shadow_of()
                prompt.shadow.start()
            for path, kind in prompt.needs.locations:
                self._hook(path, kind)

    def at(self, path: str, kind: str) -> bool:
        """Return whether a chunk's rows are to be kept at a location."""
        return any((path, kind) in self._step[key].needs.locations for key in self._spans)

    def visit(self, visit: Visit) -> None:
        """Keep the chunks' rows at a location; the shadows have their turns."""
        at = (visit.node.path, str(visit.kind))
        for key, span in self._spans.items():
            prompt = self._step[key]
            if prompt.failure is not None or at not in prompt.needs.locations:
                continue
            try:
                self._take(prompt, visit, span)
            except Refusal as error:
                prompt.failure = error
            except Exception as error:
                message = f"the value at {at[0]}.{at[1]} could not be given: {error}"
                prompt.failure = Refusal(pb.ERROR_CODE_ENGINE, message, location=f"{at[0]}.{at[1]}")

    def _take(self, prompt: _Prompt, visit: Visit, span: Span) -> None:
        location, shadow = f"{visit.node.path}.{visit.kind}", prompt.shadow
        waits = shadow is not None and shadow.waits_at(visit.node.path, visit.kind)
        served = self._made(prompt, visit, location, visit.rows_of(span), span.index, not waits)
        if shadow is None or not waits:
            return
        assert self._serving is not None
        shadow.serve(served, visit.position)
        misfit = self._serving.settle(shadow.mediator, visit)
        if misfit is not None:
            raise Refusal(misfit.code, misfit.message, location=misfit.location)  # type: ignore[arg-type]
        if shadow.failure is not None:
            raise Refusal(shadow.failure.code, shadow.failure.message, location=shadow.failure.location)

    def serve(self, key: str, visit: Visit, location: str, rows: Rows, index: int) -> Served | None:
        """Return what a block is given in the step of the last chunk; None: its rows of the step.

        Args:
            key: the block.
            visit: the location.
            location: what errors call it.
            rows: the block's rows in the step.
            index: the index of its request in the batch.

        Raises:
            Refusal: the rows of an earlier chunk were not kept.
        """
        prompt = self._step.get(key)
        if prompt is None or visit.node.module is None:
            return None
        if prompt.last is not None:
            if prompt.last and visit.kind not in COMPUTED:
                return None
            raise refused(location, prompt.last)
        if prompt.failure is not None:
            raise prompt.failure
        if visit.kind in (Kind.EXPERT_ACT, Kind.EXPERT_OUT):
            why = "is computed for prompts that fit into one step of the engine; use a shorter prompt"
            raise Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, f"{location} {why}", location=location)
        if (visit.node.path, str(visit.kind)) not in prompt.needs.locations:
            raise Refusal(
                pb.ERROR_CODE_INVALID_ARGUMENT,
                f"{location} was not asked for when the block was followed on shapes alone, so its rows of earlier chunks of "
                "this prompt are gone; ask for the same locations whatever their values are",
                location=location,
            )
        return self._made(prompt, visit, location, rows, index, False)

    def _made(self, prompt: _Prompt, visit: Visit, location: str, rows: Rows, index: int, keeps: bool) -> Served:
        """Return all rows at a location that have come, after this step's were added.

        Args:
            keeps: whether they are only kept, and no block is served.
        """
        node, kind = visit.node, visit.kind
        kept = prompt.kept.setdefault((node.path, str(kind)), Kept(prompt.tokens))
        if kind == Kind.PATTERN:
            given, returned = visit.value
            pattern = node.computed[kind].compute(given, returned, rows, index)  # [heads, rows, keys]
            keys = pattern.new_zeros((pattern.shape[1], pattern.shape[0], prompt.tokens))
            keys[..., : pattern.shape[2]] = pattern.transpose(0, 1)
            rows_so_far = kept.put(0, keys, prompt.start)  # [tokens, heads, keys]
            return Fixed(location, rows_so_far[:0] if keeps else rows_so_far.transpose(0, 1).contiguous())
        made = Keeping if keeps else Wide
        return made(location, visit.value, rows, partial(node.layouts.of, kind), kept, prompt.start)

    def check_cache(self) -> None:
        """The model has run: see what changed chunks left in the cache.

        The forward context must still be there.
        """
        changed = {key: (span,) for key, span in self._spans.items() if self._step[key].needs.changes}
        if changed:
            self._cache.check(changed)

    def end_step(self) -> None:
        """The step is over."""
        for key, prompt in list(self._step.items()):
            if prompt.shadow is not None:
                prompt.shadow.end()
                prompt.shadow = None
            prompt.done = prompt.stop
            if prompt.ends:
                del self.prompts[key]
        self._step, self._spans = {}, {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.prompts)


def _no_shadow() -> Shadow:
    raise RuntimeError("a block that gets nothing of its prompt changes nothing there")
