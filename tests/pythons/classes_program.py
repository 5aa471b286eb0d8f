# ruff: noqa
"""Makes classes of every kind again from their source, with plain asserts: run by each installed interpreter."""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import linecache
import os
import sys
import typing

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))

from interpose.capture import GUARD, SAVE, class_source, compile_class


def again(cls):
    """The class, made a second time from its source and the values that travel with it."""
    found = class_source(cls)
    assert found is not None, cls
    assert not found.unbound, (cls, found.unbound)
    namespace = {SAVE: lambda value: value, GUARD: lambda: None, "__name__": "__main__", **found.needs}
    code = compile_class(
        found.source, found.filename, found.first_line, found.indent, found.name, frozenset(found.needs)
    )
    exec(code, namespace)
    made = namespace[found.name]
    namespace.update(found.reads)
    for name, value in found.attributes.items():
        setattr(made, name, value)
    assert made is not cls and made.__qualname__.rpartition(".")[2] == cls.__name__
    return made


step = 2


class Plain:
    """Has a text."""

    first = step
    second: int = step + 1
    __private = "p"

    def __init__(self, x, y=step, *, z=[step]):
        self.x, self.y, self.z = x, y, z

    def total(self):
        return self.x + self.y + step + self.first

    def hidden(self):
        return self.__private + __class__.__name__

    @staticmethod
    def one_line(a): ...

    @functools.lru_cache
    def cached(self):
        return lambda: self.second


step = 10
made = again(Plain)(1)
assert made.total() == Plain(1).total() == 15 and made.hidden() == "pPlain" and made.cached()() == 3
assert made.z == [2] and made.one_line(1) is None and made.first == 2


class Base(abc.ABC):
    def __init_subclass__(cls, **keywords):
        cls.tag = keywords

    @abc.abstractmethod
    def f(self): ...

    @property
    @abc.abstractmethod
    def g(self):
        """Doc."""


class Sub(Base, a=1):
    def f(self):
        return super().f()

    @property
    def g(self):
        return 1

    @g.setter
    def g(self, value):
        self.set = value


assert again(Base).__abstractmethods__ == {"f", "g"}
made = again(Sub)()
made.g = 5
assert (made.f(), made.g, made.set, made.tag) == (None, 1, 5, {"a": 1}) and isinstance(made, Base)


@dataclasses.dataclass(order=True)
class Data:
    a: int
    b: list = dataclasses.field(default_factory=list, compare=False)
    c: int = step

    def d(self):
        return self.a + self.c


step = 20
made = again(Data)
assert made(1).d() == 11
assert made(1) < made(2) and made(1, [2]) == made(1) and repr(made(1)).endswith("(a=1, b=[], c=10)")


@dataclasses.dataclass(frozen=True)
class Fields:
    a: int
    b: str = "b"


class Color(enum.Enum):
    RED = 1
    BLUE = enum.auto()


class Level(enum.IntFlag):
    LOW = 1
    HIGH = 2

    def both(self):
        return self | Level.HIGH


class Pair(typing.NamedTuple):
    x: int
    y: int = 4


class Oops(ValueError):
    pass


assert again(Fields)(1).b == "b" and again(Color).BLUE.value == 2 and again(Level).LOW.both() == 3
assert again(Pair)(1) == (1, 4) and issubclass(again(Oops), ValueError)


def factory(k):
    base = [k]

    class Local:
        size = k * 2

        class Inner:
            def get(self):
                return base

        def total(self, d=k):
            return [k + d + b for b in base]

    return Local


one, two = again(factory(1))(), again(factory(5))()
assert (one.total(), two.total(), one.size, two.size) == ([3], [15], 2, 10) and two.Inner().get() == [5]

# Cells: the same name in two of them, and a class without methods.

for number, text in enumerate(
    ["class Cell:\n    a = 1\n", "class Cell:\n    a = 2\n", "class Cell:\n    a = 2\n    b = 3\n"]
):
    name = f"<cell {number}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"))
    assert again(Cell).a == Cell.a and hasattr(again(Cell), "b") == hasattr(Cell, "b")

# Changed since.

Plain.total = lambda self: "changed"
Plain.extra = {"k": 1}
found = class_source(Plain)
assert set(found.attributes) == {"total", "extra"}, found.attributes
assert class_source(type("Made", (), {})) is None
text = "class Edited:\n    def f(self): return 1\n"
exec(compile(text, "<edited>", "exec"))
linecache.cache["<edited>"] = (len(text), None, text.replace("1", "2").splitlines(True), "<edited>")
assert class_source(Edited) is None
print("ok")
