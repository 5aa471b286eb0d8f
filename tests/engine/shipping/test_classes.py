"""Classes and objects of a notebook's own mean in a block what they mean outside of it."""

from __future__ import annotations

import abc
import collections
import dataclasses
import enum
import functools
import typing
from typing import Any

import pytest
import torch

import interpose
from tests.engine.shipping.worker import Shipped, envoy

LATER = 3


class Plain:
    """With everything that may stand on a class."""

    size = LATER
    table: typing.ClassVar = [1, 2]

    def __init__(self, start: int) -> None:
        self.start = start
        self.__hidden = 5

    def go(self, more: int = LATER) -> int:
        return self.start + more + self.size + self.__hidden

    @property
    def double(self) -> int:
        return self.start * 2

    @staticmethod
    def static(x: int) -> int:
        return x + LATER

    @classmethod
    def of(cls, x: int) -> Plain:
        return cls(x)

    def __add__(self, other: Plain) -> Plain:
        return Plain(self.start + other.start)

    def keep(self) -> Any:
        return [self.start].save()  # type: ignore[attr-defined]

    alias = go


LATER = 100  # defaults and class attributes keep what they were made with


def test_methods_properties_and_attributes() -> None:
    plain = Plain(1)
    with Shipped():
        found = [
            plain.go(), plain.double, plain.static(1), Plain.of(4).start, (plain + plain).start, plain.table,
            Plain(7).go(1), isinstance(plain, Plain), plain.alias(),
        ].save()  # fmt: skip
        kept = plain.keep()
    assert found == [12, 2, 101, 4, 2, [1, 2], 16, True, 12]
    assert kept == [1]


@dataclasses.dataclass
class Stats:
    mean: float
    items: list = dataclasses.field(default_factory=list)
    scale: int = LATER

    def total(self) -> float:
        return self.mean * self.scale + len(self.items)


@dataclasses.dataclass(frozen=True)
class WithoutMethods:
    x: int
    y: int = 2


class Color(enum.Enum):
    RED = 1
    BLUE = enum.auto()

    def low(self) -> str:
        return self.name.lower()


class Pair(typing.NamedTuple):
    x: int
    y: int = 4

    def total(self) -> int:
        return self.x + self.y


Made = collections.namedtuple("Made", "a b", defaults=[7])


def test_dataclasses_enumerations_and_named_tuples() -> None:
    stats, frozen, color, pair, made = Stats(2.0, [1]), WithoutMethods(1), Color.BLUE, Pair(1), Made(1)
    with Shipped():
        fresh = Stats(1.0)
        a = [stats.total(), fresh.total(), stats == Stats(2.0, [1]), repr(fresh)].save()
        b = [frozen.x + frozen.y, WithoutMethods(3).x, frozen == WithoutMethods(1)].save()
        c = [color is Color.BLUE, color.low(), Color(1).name, color.value].save()
        x, y = pair
        d = [x, y, pair.total(), pair._replace(x=9).x, made.b, made._asdict()].save()
    assert a == [201.0, 100.0, True, repr(Stats(1.0))]
    assert b == [3, 3, True]
    assert c == [True, "blue", "RED", 2]
    assert d == [1, 4, 5, 9, 7, {"a": 1, "b": 7}]


class Base(abc.ABC):
    def __init_subclass__(cls, **keywords: Any) -> None:
        cls.registered = keywords

    @abc.abstractmethod
    def value(self) -> int: ...

    def more(self) -> int:
        return self.value() + 1

    def child(self) -> Base:
        return Sub()


class Sub(Base, tag="t"):
    def value(self) -> int:
        return 10

    def more(self) -> int:
        return super().more() + 1


class Meta(type):
    def __new__(mcs, name: str, bases: Any, body: Any, **keywords: Any) -> Any:
        return super().__new__(mcs, name, bases, {**body, "tag": keywords["tag"]})

    def __init__(cls, name: str, bases: Any, body: Any, **keywords: Any) -> None:
        super().__init__(name, bases, body)


class WithMeta(metaclass=Meta, tag="m"):
    def get(self) -> str:
        return self.tag  # type: ignore[attr-defined]


REGISTRY: dict[str, Any] = {}


def register(name: str) -> Any:
    def note(cls: Any) -> Any:
        REGISTRY[name] = cls
        return cls

    return note


@register("x")
class Registered:
    def same(self) -> bool:
        return REGISTRY["x"] is Registered


def test_bases_metaclasses_and_decorators() -> None:
    sub, registered = Sub(), Registered()
    with Shipped():
        found = [sub.more(), sub.child().more(), isinstance(sub, Base), Sub.registered].save()
        meta = [WithMeta().get(), type(WithMeta).__name__].save()
        noted = [registered.same(), REGISTRY["x"] is Registered].save()
    assert found == [12, 12, True, {"tag": "t"}]
    assert meta == ["m", "Meta"] and noted == [True, True]


class MyDict(dict):
    def twice(self, key: str) -> int:
        return self[key] * 2


class MyList(list):
    def __init__(self) -> None:
        raise RuntimeError("an object is not made by calling its class")


class MyTuple(tuple):
    __slots__ = ()

    def first(self) -> int:
        return self[0]


class Name(str):
    def loud(self) -> str:
        return self.upper()


class Slots:
    __slots__ = ("__dict__", "a", "b")

    def __init__(self) -> None:
        self.a = 1
        self.c = 3


def test_subclasses_of_builtin_types_and_slots() -> None:
    table = MyDict(a=1)
    table.extra = 5  # type: ignore[attr-defined]
    items = MyList.__new__(MyList)
    items.append(3)
    row, name, slots = MyTuple((4, 5)), Name("ab"), Slots()
    with Shipped():
        found = [table.twice("a"), table.extra, items[0], row.first(), name.loud(), type(table).__name__].save()
        held = [slots.a, slots.c, hasattr(slots, "b")].save()
    assert found == [2, 5, 3, 4, "AB", "MyDict"] and held == [1, 3, False]


class Outer:
    class Inner:
        def one(self) -> int:
            return 1

    def make(self) -> Any:
        return Outer.Inner()


def local_class(k: int) -> Any:
    base = 10

    class Local:
        size = k * 2

        def total(self, d: int = k) -> int:
            return k + d + base

    return Local


def test_classes_in_classes_and_in_functions() -> None:
    inner, outer = Outer.Inner(), Outer()
    one, two = local_class(1)(), local_class(5)()
    with Shipped():
        found = [inner.one(), isinstance(outer.make(), type(inner)), Outer.Inner is type(inner)].save()
        local = [one.total(), two.total(), one.size, two.size, type(one) is type(two)].save()
    assert found == [1, True, True] and local == [12, 20, 2, 10, False]


class Changed:
    k = 1

    def f(self) -> int:
        return 1

    def g(self) -> int:
        return 2


def other(self: Any) -> int:
    return 99


def test_what_was_put_on_a_class_after_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Changed, "f", other)
    monkeypatch.setattr(Changed, "k", 5)
    monkeypatch.setattr(Changed, "extra", {"z": 1}, raising=False)
    monkeypatch.setattr(Changed, "small", lambda self: self.k + 1, raising=False)
    changed = Changed()
    with Shipped():
        found = [changed.f(), changed.g(), changed.k, changed.extra, changed.small()].save()
    assert found == [99, 2, 5, {"z": 1}, 6]


class Linked:
    def __init__(self, parent: Linked | None = None) -> None:
        self.parent = parent
        self.children: list[Linked] = []
        if parent is not None:
            parent.children.append(self)

    def child(self) -> Linked:
        return Linked(self)


def test_objects_that_lead_to_each_other() -> None:
    top = Linked()
    low = Linked(top)
    with Shipped():
        found = [low.parent is top, top.children[0] is low, len(top.child().parent.children)].save()
    assert found == [True, True, 2]


def test_bound_methods() -> None:
    plain, acc = Plain(1), [0]
    go, add, of, later = plain.go, acc.append, Plain.of, functools.partial(plain.go, more=1)
    with Shipped():
        add(1)
        found = [go(1), acc, of(3).start, later(), go.__self__ is plain].save()
    assert found == [10, [0, 1], 3, 10, True]


@functools.cache
def cached(x: int) -> int:
    return x + LATER


def times(k: int) -> Any:
    def outer(function: Any) -> Any:
        @functools.wraps(function)
        def inner(*args: Any) -> Any:
            return function(*args) * k

        return inner

    return outer


@times(3)
def thrice(x: int) -> int:
    return x + 1


@torch.no_grad()
def without_gradients(x: torch.Tensor) -> bool:
    return (x * 2).requires_grad


class Decorated:
    @torch.no_grad()
    def a(self, x: int) -> int:
        return x * 2

    @functools.lru_cache  # noqa: B019
    def b(self) -> int:
        return 7

    @functools.cached_property
    def c(self) -> int:
        return 8

    @times(2)
    def d(self) -> int:
        return 4

    e = property(lambda self: 11)


def test_decorators() -> None:
    weights, decorated = torch.ones(2, requires_grad=True), Decorated()
    with Shipped():
        found = [cached(1), thrice(1), thrice.__name__].save()
        with torch.enable_grad():
            flags = [without_gradients(weights), (weights * 2).requires_grad].save()
        methods = [decorated.a(1), decorated.b(), decorated.c, decorated.d(), decorated.e].save()
    assert found == [101, 6, "thrice"] and flags == [False, True] and methods == [2, 7, 8, 8, 11]


class Saver:
    def __init__(self) -> None:
        self.saved = 0

    def save(self) -> int:
        self.saved += 1
        return self.saved


def test_a_save_method_of_a_class_is_its_own() -> None:
    saver = Saver()
    with Shipped():
        first, second = saver.save(), saver.save()
        found = [first, second].save()
    assert found == [1, 2]


class Failing:
    def fail(self) -> None:
        print("before")
        raise KeyError("k")


def test_an_exception_in_a_method_names_its_line() -> None:
    failing, tracer = Failing(), Shipped()
    with pytest.raises(interpose.InterventionError) as caught, tracer:
        failing.fail()
    assert 'raise KeyError("k")' in str(caught.value) and __file__ in caught.value.remote_traceback
    assert tracer.logs == "before\n"


class Odd:
    def __iter__(self) -> Any:
        yield from (1, 2)

    def __call__(self, x: int) -> int:
        return x

    def __getattr__(self, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name

    def __hash__(self) -> int:
        return 3

    def __eq__(self, other: object) -> bool:
        return True

    def __enter__(self) -> int:
        return 5

    def __exit__(self, *error: object) -> bool:
        return True

    def __reduce__(self) -> Any:
        raise AssertionError("nothing is pickled")

    __getstate__ = __setstate__ = __reduce__


def test_special_methods() -> None:
    odd = Odd()
    with Shipped():
        with odd as value:
            raise ValueError
        found = [list(odd), odd(4), odd.anything, hash(odd), value].save()
    assert found == [[1, 2], 4, "anything", 3, 5]


class Reader:
    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def read(self) -> Any:
        return self.layer.mlp.output


def test_a_module_of_the_model_in_an_object() -> None:
    reader = Reader(envoy().layer)
    with Shipped():
        shown = [repr(reader.layer)].save()
    assert shown == ["<layer: Identity>"]


def test_objects_as_keys() -> None:
    one, color = WithoutMethods(1), Color.RED
    table, members, rows = {one: "a", (one, 2): "b", color: "c", Pair(1): "d"}, {one, color}, frozenset([one, 3])
    with Shipped():
        found = [table[WithoutMethods(1)], table[one, 2], table[Color.RED], table[Pair(1)], table[1, 4]].save()
        inside = [WithoutMethods(1) in members, color in members, one in rows, len(rows)].save()
    assert found == ["a", "b", "c", "d", "d"] and inside == [True, True, True, 2]
