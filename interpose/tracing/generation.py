"""A generation without a `with` block: `model.generate(prompt, max_new_tokens=3).text`.

The call cannot know whether a `with` enters its value. So the generation runs later: when the code first reads a field of the
result, or prints it. Where the call is a statement of its own, the generation runs at once.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from dataclasses import fields
from typing import Any

from interpose import capture
from interpose.capture.parsing import parse_text
from interpose.capture.source import parse
from interpose.contract.errors import InvalidArgument
from interpose.contract.result import Result
from interpose.results.outcome import Outcome
from interpose.tracing.tracer import Tracer
from interpose.tracing.unused import Written

_FIELDS = frozenset(field.name for field in fields(Result))


class Generation(Tracer):
    """A trace that needs no block; made by `model.generate`.

    In a `with` statement it is a `Tracer`. Without `with` it has the fields of a `Result`: `.text`, `.token_ids`,
    `.finish_reason` and the others. With `n` it is a list with a `Result` for each sequence.
    """

    _alone = False  # whether the generation runs or ran without a block

    def run_alone(self) -> Result | list[Result]:
        """Run the generation without a block, unless it ran already; return the result."""
        if self._outcome is None:
            self._check_alone()
            written = self.used()
            self._alone = True
            self.run_block(_no_block(written), capture.Scope(sys._getframe()))
        return self.result

    def dropped(self) -> None:
        """Run the generation: the call is a statement of its own."""
        self.run_alone()

    def _check_alone(self) -> None:
        if self._prompt is None:
            raise InvalidArgument("model.generate(prompt, max_new_tokens=n) without a `with` block takes a prompt")
        if self._streams or not self._options.blocking:
            option = "stream=True" if self._streams else "blocking=False"
            raise InvalidArgument(
                f"model.generate(…, {option}) needs a block: write `with model.generate(…, {option}) as tracer: pass`"
            )

    def _finished(self) -> Outcome:
        if self._outcome is None and self.unused:
            self.run_alone()
        return super()._finished()

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            super().__getattr__(name)  # type: ignore[misc]
        result = self.result
        if isinstance(result, list):
            raise InvalidArgument(f"there are {len(result)} sequences: write [0].{name}, or go through them in a loop")
        return getattr(result, name)

    def __getitem__(self, index: Any) -> Any:
        return self._sequences()[index]

    def __len__(self) -> int:
        return len(self._sequences())

    def __iter__(self) -> Iterator[Result]:
        return iter(self._sequences())

    def _sequences(self) -> list[Result]:
        result = self.result
        if not isinstance(result, list):
            raise InvalidArgument("there is one sequence: read its .text or .token_ids")
        return result

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return repr(self.result) if self.unused or self._alone else super().__repr__()


class AsyncGeneration(Generation):
    """A generation of a client for asyncio: `result = await model.generate(…)`."""

    def __await__(self) -> Generator[Any, None, Result | list[Result]]:
        return self._run_awaited().__await__()

    async def _run_awaited(self) -> Result | list[Result]:
        if self._outcome is None:
            self._check_alone()
            written = self.used()
            self._alone = True
            await self.run_block_async(_no_block(written), capture.Scope(sys._getframe()))
        return self.result

    def run_alone(self) -> Result | list[Result]:
        raise InvalidArgument("on an event loop the result is awaited: write `result = await model.generate(…)`")

    def __repr__(self) -> str:
        return super().__repr__() if self._outcome is not None else Tracer.__repr__(self)


def _no_block(written: Written | None) -> capture.Block:
    """Return an empty block at the line of the user's call."""
    filename, line = (written.filename, written.line) if written is not None else ("<generate>", 1)
    source = parse(filename, ["pass\n"])
    body = parse_text("pass", filename).body
    body[0].lineno = body[0].end_lineno = line
    return capture.Block("pass\n", filename, line, 0, (), (), body, None, True, source)
