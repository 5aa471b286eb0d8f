"""Random small programs, for properties that must hold for whatever a block may contain."""

from __future__ import annotations

import random
import textwrap

NAMES = "abcde"


def random_program(source: random.Random, depth: int = 3) -> str:
    """A program over the names a to e that ends soon, though often with an exception."""
    return "\n".join(_statement(source, depth) for _ in range(source.randint(1, 3)))


def _expression(source: random.Random, depth: int) -> str:
    name = source.choice(NAMES)
    if depth <= 0:
        return source.choice([name, name, "0", "1", "[]", "(1, 2)", "'text'"])
    first, second, third = (_expression(source, depth - 2) for _ in range(3))
    forms = [
        first,
        f"({first} or {second})",
        f"({first} if {second} else {third})",
        f"({name} := {first})",
        f"[{name} for {name} in [{first}] if {second}]",
        f"[{second} for {name} in [{first}]]",
        f"(lambda {name}: {first})(1)",
        f"({first} == {second} != {third})",
        f"f'{{{name}}}{{{first}!r}}'" if "'" not in first else first,
    ]
    return source.choice(forms)


def _statement(source: random.Random, depth: int) -> str:
    name, other = source.choice(NAMES), source.choice(NAMES)
    value = _expression(source, depth)
    simple = [
        f"{name} = {value}",
        f"{name} = {value}",
        f"{name}, {other} = {value}, 1",
        f"{name}: {other} = {value}",
        value,
        f"del {name}",
        f"{name} += 1",
        f"import sys as {name}",
        f"if {value}: raise KeyError",
    ]
    if depth <= 0:
        return source.choice(simple)

    def block() -> str:
        return textwrap.indent(random_program(source, depth - 1), "  ")

    leave = source.choice(["pass", "break", "continue"])
    compound = [
        lambda: f"if {value}:\n{block()}\nelse:\n{block()}",
        lambda: f"for {name} in (0, 1):\n{block()}\n  if {value}: {leave}\nelse:\n{block()}",
        lambda: f"try:\n{block()}\nexcept Exception as {name}:\n{block()}\nelse:\n{block()}\nfinally:\n{block()}",
        lambda: f"def {name}({other}=0):\n{block()}\n  return {other}\n{name}()",
        lambda: f"class {name}:\n{block()}",
        lambda: f"match {value}:\n  case 0:\n{textwrap.indent(block(), '  ')}\n  case [*{name}] | {name}:\n    pass",
        lambda: f"while True:\n{block()}\n  break",
    ]
    return source.choice(compound)() if source.random() < 0.7 else source.choice(simple)
