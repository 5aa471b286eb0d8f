# ruff: noqa
# fmt: off
"""What Python's statements do in and around a block, with plain asserts: run by each installed interpreter."""

from __future__ import annotations

import contextlib
import functools

from capturing import CaptureError, Outer, Trace


# In a block


def expressions(words):
    with Trace():
        if (count := len(words)) > 1:
            lengths = {word: n for word in words if (n := len(word))}.save()
        nested = [[row * column for column in range(row)] for row in range(count)].save()
        kinds = ({*words}, sum(len(word) for word in words), n).save()
        text = f"{words[0]!r:>{count + 4}}{count:0{count}d}{'=' if count else ''}".save()
        first, *rest = words
        kept = [first, rest].save()
    assert lengths == {"a": 1, "bb": 2, "ccc": 3} and nested == [[], [0], [0, 2]]
    assert kinds == ({"a", "bb", "ccc"}, 6, 3) and text == "    'a'003=" and kept == ["a", ["bb", "ccc"]]


expressions(["a", "bb", "ccc"])


def statements(values):
    with Trace():
        seen = []
        for value in values:
            match value:
                case {"kind": str(kind), **others} if others:
                    seen.append((kind, others))
                case [int(first), *_] | (first, _):
                    seen.append(first)
                case None:
                    continue
                case _:
                    break
        else:
            seen.append("else")
        while len(seen) < 5:
            seen.append(len(seen))
            if len(seen) == 4: break
        try:
            try:
                raise KeyError("k")
            except KeyError as error:
                seen.append(error.args[0])
                raise ValueError from error
            finally:
                seen.append("finally")
        except (ValueError, TypeError):
            seen.append("caught")
        else:
            seen.append("never")
        with contextlib.suppress(ZeroDivisionError), contextlib.nullcontext(3) as three:
            seen.append(three)
            1 / 0
        del value
        assert seen, "an assert"
        seen = seen.save()
    return seen


assert statements([{"kind": "x", "a": 1}, [4, 5], None, "stop", [6]]) == [
    ("x", {"a": 1}), 4, 2, 3, "k", "finally", "caught", 3
]


def definitions():
    def times(number):
        def decorate(function):
            @functools.wraps(function)
            def inside(*arguments, **named):
                return number * function(*arguments, **named)
            return inside
        return decorate

    with Trace():
        total = 0

        @times(2)
        @times(5)
        def add(a, /, b=1, *more, c=2, **named):
            nonlocal total
            total += a + b + c
            return total

        class Counter:
            """Counts."""

            start: int = total

            def __init__(self):
                self.count = self.start

            def up(self):
                self.count += 1
                return lambda by=self.count: by + self.count

        def early(values):
            for value in values:
                if value > 1:
                    return value
            return None

        def steps():
            yield from (1, 2)
            yield total

        found = [add(1), total, Counter().up()(), early([0, 3, 4]), [*steps()]].save()
    assert found == [40, 4, 2, 3, [1, 2, 4]], found


definitions()


# Around a block


def early_return(words):
    for word in words:
        with Trace():
            length = len(word).save()
        if length > 1:
            return word, length
        with contextlib.nullcontext():
            continue
    return None


assert early_return(["a", "bb", "ccc"]) == ("bb", 2) and early_return("abc") is None


def loops_around_invokes(words):
    with Outer() as tracer:
        kept = [].save()
        for number, word in enumerate(words):
            if word == "skip":
                continue
            with tracer.invoke(word):
                kept.append(word)
            if number == 3:
                break
        else:
            kept.append("else")
        while True:
            with tracer.invoke("once") as last:
                text = last_word = f"{word}!"
            break
        try:
            for word in words:
                with tracer.invoke(word):
                    kept.append("twice")
                raise KeyError
        except KeyError:
            kept.append("caught")
        finally:
            kept.append("end")
    return kept, text, last.prompt


assert loops_around_invokes(["a", "skip", "b", "c", "d"]) == (["a", "b", "c", "twice", "caught", "end"], "c!", "once")
assert loops_around_invokes(["a"]) == (["a", "else", "twice", "caught", "end"], "a!", "once")


def out_of_an_outer_block():
    with Outer() as tracer:
        for word in "ab":
            with tracer.invoke(word):
                value = word
            return word


try:
    out_of_an_outer_block()
except CaptureError as error:
    assert "`return` cannot leave a block" in str(error) and error.text.strip() == "return word", error
else:
    raise AssertionError


# How a block is written


def headers_over_lines(a, b):
    with Trace() \
            as \
            tracer:
        joined = a + \
            b
        spread = [
            joined,
            b,
        ].save()
    with contextlib.nullcontext() as nothing, \
            Trace() as tracer: one = (a, b).save(); never = 2
    with Trace(
        # a comment in the header
    ) as tracer:  # and behind it

        # before the first statement

        two = (b, a).save()
        # after the last
    return spread, one, two


assert headers_over_lines(1, 2) == ([3, 2], (1, 2), (2, 1))


def tabs():
	with Trace():
		if True:
			value = "a	b".save()
	return value


assert tabs() == "a\tb"


def größe(wörter):
    with Trace():
        länge = {"ä😀": len(wörter), "𝔵": 1}["ä😀"]; ñ = f"{länge}→".save()
        𝔵 = "normalised to x".save()
    return ñ, x_of(locals())


def x_of(names):
    return names["x"]


assert größe("λμ") == ("2→", "normalised to x")
print("ok")
