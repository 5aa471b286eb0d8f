# ruff: noqa
# fmt: off
"""Captures blocks in every kind of place, with plain asserts: run by each installed interpreter, and by the test suite."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading

from capturing import CaptureError, CapturedContext, Outer, Trace, function_source


# Module level

ran = []
with Trace() as tracer:
    ran.append("here")
    first = [1, 2].save()
    other = 5
assert first == [1, 2] and ran == ["here"] and tracer.block.reads == ("ran",), tracer.block
assert "other" not in globals()

with Trace() as tracer: one_line = (3).save(); two = 4
assert one_line == 3 and "two" not in globals()

with Trace(): without_target = "x".save()
assert without_target == "x"


def in_function():
    scale = 2
    with Trace() as tracer:
        result = [scale].save()
    assert isinstance(tracer, Trace)
    return result


assert in_function() == [2]


def unbound_is_not_the_module_s():
    with Trace() as tracer:
        first = (lambda: 7)().save()
    assert "first" not in tracer.block.reads
    return first


assert unbound_is_not_the_module_s() == 7 and first == [1, 2]


def in_closure():
    count = 1

    def read():
        return count

    def change():
        nonlocal count
        with Trace():
            count = (count + 1).save()

    with Trace():
        count = (count + 10).save()
    assert read() == 11
    change()
    assert read() == count == 12
    return read


assert in_closure()() == 12


def declared_global():
    global first
    with Trace():
        first = "changed".save()


declared_global()
assert first == "changed"


class Holder:
    factor = 3
    with Trace():
        product = (factor * 2).save()

    def method(self, factor):
        with Trace():
            value = (self.factor * factor).save()
        return value


assert Holder.product == 6 and Holder().method(5) == 15


async def in_coroutine():
    await asyncio.sleep(0)
    with Trace():
        value = "async".save()
    await asyncio.sleep(0)
    return value


assert asyncio.run(in_coroutine()) == "async"


def in_generator():
    for step in range(3):
        with Trace():
            value = [step].save()
        yield value


assert list(in_generator()) == [[0], [1], [2]]


def headers():
    noted = []

    class Note:
        def __enter__(self):
            noted.append("in")

        def __exit__(self, *error):
            noted.append("out")

    with (
        Note(),
        Trace()
        as tracer
    ):
        value = [
    1,
            2].save()
    assert value == [1, 2] and noted == ["in", "out"]
    with Note() as a, Trace() as tracer: value = 8 .save()
    assert value == 8 and noted == ["in", "out"] * 2
    with Trace() as tracer, Note() as b:
        value = 9 .save()
    assert value == 9 and noted == ["in", "out"] * 3, (value, noted)
    with Note() as a, Outer() as outer, Note() as b, outer.invoke(1) as c, Note() as d: value = [11].save()
    assert value == [11] and noted == ["in", "out"] * 3 + ["in", "in", "in", "out", "out", "out"], (value, noted)
    with (Trace() as tracer, Note() as b):
        value = 10 .save()
    assert value == 10, value


headers()


def texts():
    with Trace() as tracer:
        # a comment
        text = """one
  two
    three""".save()
        if text:  # another
            more = f"{text}!".save()
    assert text == "one\n  two\n    three" and more == text + "!"
    with Trace():
        text = "joined \
  here".save()
    assert text == "joined   here"
    with Trace():
        def greek(ä): return "λ" + ä
        text = greek("ä").save(); y = 2
    assert text == "λä"
    with Trace():
        @staticmethod
        def helper():
            return 1
        result = helper.__func__().save()
    assert result == 1


texts()


def bodies_that_begin_guarded():
    with Trace():
        try: value = [1].save()
        except: raise SystemExit("the skip was caught by the body")
        finally: other = 2
    assert value == [1]
    for kind in range(2):
        with Trace():
            while True: break
        with Trace() as tracer: pass
        assert tracer.block.empty
        with Trace() as tracer: "only text"; ...
        assert tracer.block.empty and isinstance(tracer, Trace)
        if kind:
            continue
    with Trace():
        with Trace.__new__(Trace) if False else open(os.devnull) as null:
            value = null.name.save()
    assert value == os.devnull


bodies_that_begin_guarded()


def in_finally():
    found = []
    for fail in (False, True):
        try:
            try:
                if fail:
                    raise KeyError
            finally:
                with Outer() as a, a.invoke(0) as b, contextlib.nullcontext(): pass
                with contextlib.nullcontext() as a, Trace() as b: value = [fail].save()
                with Trace() as c:
                    value = [fail].save()
                found.append(value)
        except KeyError:
            pass
    return found


assert in_finally() == [[False], [True]]


def threads():
    results = {}

    def work(number):
        for turn in range(50):
            with Trace():
                value = (number, turn).save()
            assert value == (number, turn)
        results[number] = sys.gettrace()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == dict.fromkeys(range(4)), results


threads()


def under_a_tracer():
    events = []

    def local(frame, event, argument):
        events.append((event, frame.f_lineno - start))
        return local

    def everything(frame, event, argument):
        return local if frame.f_code is traced.__code__ else None

    def traced():
        before = 1
        with Trace():
            value = [before].save()
            never = 1
        after = value
        return after

    start = traced.__code__.co_firstlineno
    previous = sys.gettrace()
    sys.settrace(everything)
    try:
        assert traced() == [1]
        assert sys.gettrace() is everything
    finally:
        sys.settrace(previous)
    lines = [line for event, line in events if event == "line"]
    assert 1 in lines and 2 in lines and 5 in lines and 6 in lines, lines
    assert 3 not in lines and 4 not in lines, lines
    assert not [event for event, line in events if event == "opcode"]


under_a_tracer()
assert sys.gettrace() is None and sys._getframe().f_trace is None


def errors_propagate():
    class Failing(CapturedContext):
        def run_block(self, block, scope):
            raise ValueError("boom")

    try:
        with Failing():
            anything = 1
    except ValueError as error:
        assert error.__context__ is None and error.__cause__ is None
        assert error.__traceback__.tb_lineno in (errors_propagate.__code__.co_firstlineno + 6, error.__traceback__.tb_lineno)
    else:
        raise AssertionError
    try:
        with Trace():
            value = 1
            value / 0
    except ZeroDivisionError as error:
        at = error.__traceback__
        while at.tb_next is not None:
            at = at.tb_next
        assert at.tb_frame.f_code.co_filename == errors_propagate.__code__.co_filename
        assert at.tb_lineno == errors_propagate.__code__.co_firstlineno + 16, at.tb_lineno
    else:
        raise AssertionError
    assert sys.gettrace() is None


errors_propagate()


class Overriding(Trace):
    def __enter__(self):
        return super().__enter__()

    def __exit__(self, *error):
        return super().__exit__(*error)


with Overriding() as tracer:
    overridden = "yes".save()
assert overridden == "yes" and isinstance(tracer, Overriding)


def refused(text):
    """The error of a block in a function in a file of its own."""
    import linecache

    name = f"<refused {abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    namespace = {"Trace": Trace, "Outer": Outer}
    try:
        exec(compile(text, name, "exec"), namespace)
    except CaptureError as error:
        assert sys.gettrace() is None
        return error
    raise AssertionError(text)


for body, line in {
    "def f():\n    with Trace():\n        x = 1\n        return x\nf()": 4,
    "def f():\n    with Trace():\n        x = yield 1\nlist(f())": 3,
    "for i in 'a':\n    with Trace():\n        if i:\n            break": 4,
    "for i in 'a':\n    with Trace():\n        continue": 3,
    "for i in 'a':\n    with Trace():\n        for j in i:\n            pass\n        else:\n            break": 6,
    "with Trace():\n    for i in 'ab':\n        with i.iter[:] as t:\n            break": 4,
    "with Trace():\n    from os import *": 2,
    "x = 1\ndef f():\n    with Trace():\n        global x\n        x = 1\nf()": 4,
    "class T: pass\nt = T()\nwith Trace() as t.x:\n    pass": 3,
    "class A:\n    def f(self):\n        with Trace():\n            super().f()\nA().f()": 4,
    "class A:\n    def f(self):\n        with Trace():\n            self.__f()\nA().f()": 4,
    "async def f():\n    with Trace():\n        x = await f()\nf().send(None)": 3,
    "t = Trace()\nt.__enter__()": None,
    "import contextlib\nwith contextlib.ExitStack() as s:\n    s.enter_context(Trace())": None,
}.items():
    error = refused(body)
    assert line is None or error.line == line and error.text == body.splitlines()[line - 1], (body, error)
    assert error.hint and str(error.line) in str(error)

try:
    exec(compile("with Trace():\n    x = 1\n", "<nowhere>", "exec"), {"Trace": Trace})
except CaptureError as error:
    assert "source" in str(error)
else:
    raise AssertionError


# Outer blocks

acc = None
with Outer() as outer:
    acc = [].save()
    for prompt in ("a", "b"):
        with outer.invoke(prompt):
            acc.append(1)
            last = (prompt if False else "last").save()
    seen: str = prompt
    doubled = [item * 2 for item in (acc, seen)]
assert acc == [1, 1] and outer.saved == [acc] and last == "last" and seen == "b" and prompt == "b"
assert doubled == [[1, 1, 1, 1], "bb"]


def outer_in_function(prompts, missing=None):
    calls = 0

    def note():
        nonlocal calls
        calls += 1

    global made_global
    total = 0
    with Outer() as tracer:
        kept = [].save()
        for number, prompt in enumerate(prompts):
            note()
            total += len(prompt)
            with tracer.invoke(prompt) as inner:
                value = [prompt, total].save()
                kept.append(value)

        def later():
            nonlocal total
            total += 100
            return total

        later()
        made_global = [x for x in prompts if len(x) < total]
        try:
            raise KeyError("k")
        except KeyError as error:
            text = str(error)
    assert calls == 2, calls
    assert total == 103 and tracer.saved == [kept] and number == 1, total
    return kept, value, text, inner.block.first_line


kept, value, text, line = outer_in_function(["a", "bb"])
assert kept == [["a", 1], ["bb", 3]] and value == ["bb", 3] and text == "'k'"
assert line == outer_in_function.__code__.co_firstlineno + 15, line
assert made_global == ["a", "bb"]


def outer_fails():
    before = 1
    try:
        with Outer() as tracer:
            before = 2
            with tracer.invoke("x"):
                pass
            before / 0
    except ZeroDivisionError as error:
        at = error.__traceback__
        while at.tb_next is not None:
            at = at.tb_next
        assert at.tb_lineno == outer_fails.__code__.co_firstlineno + 7, at.tb_lineno
        assert at.tb_frame.f_code.co_filename == outer_fails.__code__.co_filename
        assert at.tb_frame.f_code.co_name == "outer_fails"
        assert error.__context__ is None
    assert before == 2


outer_fails()


def outer_with_helper():
    def one(tracer, prompt):
        with tracer.invoke(prompt):
            inside = prompt.save()

    with Outer() as tracer, tracer.invoke("both") as both:
        here = both.prompt if False else "h".save()
    assert here == "h"
    with Outer() as tracer:
        def two(prompt):
            with tracer.invoke(prompt):
                inside = [prompt].save()
        one(tracer, "p")
        two("q")
    assert len(tracer.pending) == 2


outer_with_helper()


class OuterInClass:
    base = 2
    with Outer() as tracer:
        twice = base * 2
        with tracer.invoke("p"):
            four = twice.save()
    assert twice == 4 and four == 4


# Functions

offset = 10


def plain(x, y=3, *, z=offset):
    return x + y + z + offset


def make():
    captured = 5
    pair = lambda a, b=captured: a + b + captured, lambda a: a - captured  # noqa: E731
    return pair


found = function_source(plain)
assert found is not None and set(found.reads) == {"offset", "__interpose_default_z__"}, found
assert found.bindings == {"offset": 10, "__interpose_default_z__": 10} and found.name == "plain"
one, two = make()
assert function_source(one).bindings == {"captured": 5, "__interpose_default_b__": 5}
assert function_source(two).source == "lambda a: a - captured"
assert function_source(len) is None and function_source(Holder) is None
print("ok")
