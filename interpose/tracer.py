"""The `with` blocks of the notebook: a trace of one prompt, or an outer block whose inner blocks are its invokes.

The bodies are captured instead of run. When the block ends, the trace is sent, followed, and what it saved appears in the
caller's scope.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from interpose import capture
from interpose.check import TRACER_WORDS, frame_at
from interpose.errors import InvalidArgument, from_failure
from interpose.outcome import Outcome, follow, update_in_place, values_of
from interpose.program import TraceBuilder
from interpose.result import Result
from interpose.saving import saving_with
from interpose.v1.trace_pb2 import Frame, Prompt, Usage

if TYPE_CHECKING:
    from interpose.model import Model

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, range)


class _Block(capture.CapturedContext):
    """A captured block whose syntax errors are the library's own."""

    def __enter__(self) -> Any:
        try:
            return super().__enter__()
        except capture.CaptureError as error:
            raise _refused(error) from None


class Tracer(_Block):
    """One trace; made by `model.trace`.

    Args:
        model: the served model.
        prompt: of a trace with one prompt; None for an outer block.
        sampling: the engine's sampling parameters by their own names.

    Attributes:
        id: the trace's id, once its block has been captured.
    """

    def __init__(self, model: Model, prompt: Prompt | None, sampling: Mapping[str, object]) -> None:
        self._model = model
        self._prompt = prompt
        self._sampling = sampling
        self._builder: TraceBuilder | None = None  # while the block is gathered and the trace runs
        self._places: list[tuple[capture.Block, capture.Scope]] = []  # of each invoke
        self._saved: list[object] = []
        self.id = ""
        self._running = False
        self._outcome: Outcome | None = None

    @property
    def usage(self) -> Usage:
        """After the block, what the trace cost."""
        return self._finished().usage

    @property
    def result(self) -> Result:
        """After the block, what the engine generated for a trace with one prompt."""
        if self._prompt is None:
            raise InvalidArgument(
                "a trace with several prompts has a result for each: `with tracer.invoke(…) as one`, one.result"
            )
        return self._finished().results[0]

    def invoke(self, prompt: Any = None, **sampling: Any) -> Invoker:
        """Add a prompt with a block of its own: `with tracer.invoke(prompt):`.

        Args:
            prompt: as for `model.trace`.
            sampling: sampling parameters of this prompt alone; the trace's own are the defaults.
        """
        if self._prompt is not None:
            raise InvalidArgument(
                "this trace has its prompt already; write `with model.trace() as tracer:` and give the prompts to "
                "tracer.invoke(prompt)"
            )
        if not self._running:
            raise InvalidArgument("tracer.invoke(prompt) belongs inside the block of `with model.trace() as tracer:`")
        if prompt is None:
            raise InvalidArgument("tracer.invoke() needs a prompt: tracer.invoke(prompt)")
        return Invoker(self, self._model.encode_prompt(prompt), self._model.check_sampling(sampling))

    def log(self, *values: object) -> None:
        """Print; inside an invoke's block the text arrives here while the trace runs."""
        print(*values)

    def __getattr__(self, name: str) -> NoReturn:
        if name in TRACER_WORDS:
            raise InvalidArgument(f"tracer.{name} belongs inside a block with a prompt, which runs in the model")
        raise AttributeError(f"a tracer has no attribute {name!r}")

    def run_block(self, block: capture.Block, scope: capture.Scope) -> None:
        """Send the captured block, or run it here to gather the invokes in it and send those."""
        builder = TraceBuilder(self._model.name, self._model.tree, self._model.limits, self._is_own, self._sampling)
        self._builder, self._places, self._outcome = builder, [], None
        self.id = builder.id
        try:
            if self._prompt is not None:
                self._add(block, scope, self._prompt, {})
            else:
                self._gather(builder, block, scope)
            if not self._places:
                raise InvalidArgument(
                    "the trace has no prompt: write model.trace(prompt), or `with tracer.invoke(prompt):` inside the block",
                    frames=[frame_at(block.body[0], block.filename)],
                )
            self._run(builder, block, scope)
        finally:
            # The frames in the scopes refer to this tracer, and the builder to everything that was sent.
            self._builder, self._places, self._saved = None, [], []

    def _run(self, builder: TraceBuilder, block: capture.Block, scope: capture.Scope) -> None:
        """Send the trace, follow it, and give the caller what it saved; raise the first failure after that."""
        trace = builder.build()
        session = self._model.session
        tokens = _expected_tokens(self._sampling, builder.samplings())
        outcome = follow(session, trace, builder.blobs, self._model.progress, tokens)
        self._outcome = outcome
        captured = builder.captured()
        for invoke, names, updates in values_of(outcome, session, self._model.tree):
            for index, contents in updates.items():
                update_in_place(captured.get(index), contents)
            self._place_of(invoke, block, scope).assign(names)
        if outcome.failures:
            raise from_failure(outcome.failures[0])

    def _gather(self, builder: TraceBuilder, block: capture.Block, scope: capture.Scope) -> None:
        """Run the outer block; its saved names become the trace's shared variables."""
        self._saved = []
        self._running = True
        try:
            with saving_with(self._save):
                capture.run_outer(block, scope, self._save)
        except capture.CaptureError as error:
            raise _refused(error) from None
        finally:
            self._running = False
        for name, value in self._shared_names(block, scope).items():
            builder.share(name, value)

    def _shared_names(self, block: capture.Block, scope: capture.Scope) -> dict[str, object]:
        """Return the names that hold saved values.

        An object that can be changed is recognised by its identity. A number or a string has none worth the name, so it
        counts only where it is assigned in saving: `n = interpose.save(0)`.
        """
        assigned = _names_of_saves(block.body)
        found: dict[str, object] = {}
        for name in dict.fromkeys((*block.writes, *block.reads)):
            try:
                value = scope.lookup(name)
            except KeyError:
                continue
            plain = isinstance(value, _IMMUTABLE)
            if (plain and name in assigned) or (not plain and any(value is saved for saved in self._saved)):
                found[name] = value
        named = list(found.values())
        for saved in self._saved:  # held by something else than a name: inside another object, say
            if not isinstance(saved, _IMMUTABLE) and not any(saved is value for value in named):
                found[f"__interpose_shared_{len(found)}__"] = saved
        return found

    def _save(self, value: Any) -> Any:
        if not any(value is saved for saved in self._saved):
            self._saved.append(value)
        return value

    def _add(self, block: capture.Block, scope: capture.Scope, prompt: Prompt, sampling: Mapping[str, object]) -> int:
        assert self._builder is not None
        index = self._builder.add_invoke(block, scope, prompt, sampling)
        self._places.append((block, scope))
        return index

    def _place_of(self, invoke: int, block: capture.Block, scope: capture.Scope) -> capture.Scope:
        """Return the scope that an invoke's names are assigned in: the caller's, unless a function of its own added it."""
        if invoke < 0 or invoke >= len(self._places):
            return scope
        inner, inner_scope = self._places[invoke]
        first, last = block.first_line, max(statement.end_lineno or 0 for statement in block.body)
        inside = inner.filename == block.filename and first <= inner.first_line <= last
        return scope if inside else inner_scope

    def _is_own(self, obj: object) -> bool:
        return obj is self or (isinstance(obj, Invoker) and obj.tracer is self)

    def _finished(self) -> Outcome:
        if self._outcome is None:
            raise InvalidArgument("the trace has not run yet: its results are there after the block")
        return self._outcome


class Invoker(_Block):
    """One prompt of a trace and its block; made by `tracer.invoke`."""

    def __init__(self, tracer: Tracer, prompt: Prompt, sampling: Mapping[str, object]) -> None:
        self.tracer = tracer
        self._prompt = prompt
        self._sampling = sampling
        self._index: int | None = None

    @property
    def result(self) -> Result:
        """After the trace, what the engine generated for this prompt."""
        if self._index is None:
            raise InvalidArgument("this prompt has no block yet: write `with tracer.invoke(prompt) as one:`")
        return self.tracer._finished().results[self._index]

    def run_block(self, block: capture.Block, scope: capture.Scope) -> None:
        """Add the captured block to the trace; it runs when the outer block has ended."""
        if not self.tracer._running:
            raise InvalidArgument(
                "this block belongs to a trace that has already been sent",
                frames=[frame_at(block.body[0], block.filename)],
            )
        self._index = self.tracer._add(block, scope, self._prompt, self._sampling)

    def __getattr__(self, name: str) -> NoReturn:
        if name in TRACER_WORDS:
            raise InvalidArgument(f"tracer.{name} belongs inside a block with a prompt, which runs in the model")
        raise AttributeError(f"an invoke has no attribute {name!r}")


def _refused(error: capture.CaptureError) -> InvalidArgument:
    frame = Frame(filename=error.filename, line=error.line, text=error.text)
    message = f"{error.message}. {error.hint}" if error.hint else error.message
    return InvalidArgument(message, frames=[frame])


def _expected_tokens(trace: Mapping[str, object], invokes: Sequence[Mapping[str, object]]) -> int | None:
    """Return how many tokens a trace generates at most, or None if it does not say."""
    total = 0
    for own in invokes:
        count = {**trace, **own}.get("max_tokens", 1)
        if not isinstance(count, int):
            return None
        total += count
    return total


def _names_of_saves(body: Sequence[ast.AST]) -> set[str]:
    """Return the names that are assigned directly from `….save()` or `save(…)`."""
    names: set[str] = set()
    for node in (node for statement in body for node in ast.walk(statement)):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        if isinstance(value, ast.Call) and "save" in (getattr(value.func, "attr", ""), getattr(value.func, "id", "")):
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names
