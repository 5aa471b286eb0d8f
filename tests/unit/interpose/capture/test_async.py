"""The block of an `async with` is captured like any other; its end is awaited."""

from __future__ import annotations

import asyncio
import sys

import pytest

from interpose.capture import CapturedContext, CaptureError


class Context(CapturedContext):
    """Notes what it captured, after the event loop has done something else."""

    def __init__(self, **values: object) -> None:
        self.values = values
        self.sources: list[str] = []

    async def run_block_async(self, block, scope):
        await asyncio.sleep(0.001)
        self.sources.append(block.source)
        self.reads = {name: scope.lookup(name) for name in block.reads if name in ("given", "self")}
        scope.assign({name: self.values[name] for name in block.writes if name in self.values})
        if "error" in self.values:
            raise self.values["error"]


def test_the_body_is_captured_and_names_are_assigned():
    async def main():
        given = 5
        async with Context(x=given + 1) as context:
            x = given
            raise ZeroDivisionError
        async with Context() as other:
            pass
        return x, context, other, given

    x, context, other, given = asyncio.run(main())
    assert x == 6 and given == 5
    assert context.sources == ["x = given\nraise ZeroDivisionError\n"] and context.reads == {"given": 5}
    assert other.sources == ["pass\n"]


def test_many_at_once_and_in_loops():
    async def one(number):
        seen = []
        for i in range(3):
            async with Context(y=(number, i)):
                y = 0
            seen.append(y)
            await asyncio.sleep(0)
        return seen

    async def main():
        return await asyncio.gather(*(one(number) for number in range(20)))

    assert asyncio.run(main()) == [[(number, i) for i in range(3)] for number in range(20)]


def test_exceptions_of_the_end_go_on():
    async def main():
        async with Context(error=KeyError("mine")):
            y = 1

    with pytest.raises(KeyError, match="mine") as caught:
        asyncio.run(main())
    assert caught.value.__context__ is None


def test_cancelling_while_the_end_is_awaited():
    class Slow(Context):
        async def run_block_async(self, block, scope):
            await asyncio.sleep(60)

    async def main():
        async with Slow():
            y = 1

    async def outer():
        task = asyncio.create_task(main())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(outer())


def test_several_items_of_which_the_last_is_the_block():
    class Plain:
        async def __aenter__(self):
            return self

        async def __aexit__(self, *error):
            self.left = True

    async def main():
        async with Plain() as plain, Context(y=2):
            y = 1
        return plain.left, y

    assert asyncio.run(main()) == (True, 2)


def test_what_is_refused():
    async def awaits():
        async with Context():
            await asyncio.sleep(0)

    async def later_items():
        async with Context(), Context():
            y = 1

    for function, words in ((awaits, "cannot await"), (later_items, "are awaited")):
        with pytest.raises(CaptureError, match=words):
            asyncio.run(function())
    assert sys.gettrace() is None or "coverage" in repr(sys.gettrace())
