"""Random blocks that read, change and save locations with all of the language around it.

A program is text. ``KEEP[x]`` stands where it saves; `captured` and `direct` write that as a block and as plain code.
Nothing in it depends on the last bits of a tensor: decisions are made on integers.
"""

from __future__ import annotations

import random
import re
import textwrap
from dataclasses import dataclass, field

HELPERS = """
import dataclasses
import functools
FACTOR = 2

def damped(x, k=FACTOR):
    return torch.tanh(x) * k / shrink(k)

def shrink(k):
    return 1 + abs(k)

def doubled(function):
    @functools.wraps(function)
    def inner(x):
        return function(x) * 2
    return inner

@doubled
def centred(x):
    return x - x.mean(-1, keepdim=True)

@dataclasses.dataclass
class Scaler:
    by: float
    seen: list = dataclasses.field(default_factory=list)

    def __call__(self, x):
        return self.note(x) * self.by

    def note(self, x):
        self.seen.append(x.shape[0])
        return x

class Shifter(Scaler):
    def __call__(self, x):
        return super().__call__(x) + self.by

scaler, shifter = Scaler(0.5), Shifter(0.25)
"""


@dataclass
class Names:
    """What a statement may use: tensors of this step with the location's shape, integers, and functions of a tensor."""

    tensors: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=lambda: ["damped", "centred", "scaler", "shifter", "torch.tanh"])

    def inside(self) -> Names:
        return Names(list(self.tensors), list(self.numbers), list(self.functions))


class Writer:
    """Writes one program.

    Args:
        source: makes all choices.
        locations: how many there are.
    """

    def __init__(self, source: random.Random, locations: int) -> None:
        self.source = source
        self.locations = locations
        self.count = 0

    def program(self) -> tuple[str, int]:
        """Return a program and the number of steps it wants."""
        steps = self.source.choice([1, 1, 2, 3])
        lines = ["bag, table = KEEP[[]], KEEP[{}]", f"many = {self.source.randint(0, 3)}"]
        if steps == 1 and self.source.random() < 0.7:
            lines.append(self.forward(Names(numbers=["many"])))
        else:
            lines.append("for step in STEPS:\n" + indent(self.forward(Names(numbers=["many", "step"]))))
        return "\n".join([*lines, "ended = KEEP[[many, len(bag), list(table)]]"]) + "\n", steps

    def forward(self, names: Names) -> str:
        """Write the code of one step: some locations in order, and statements at each."""
        chosen = sorted(self.source.sample(range(self.locations), self.source.randint(1, min(4, self.locations))))
        lines: list[str] = []
        for location in chosen:
            name = self.new("h")
            lines.append(f"{name} = spots[{location}].output")
            names.tensors.append(name)
            for _ in range(self.source.randint(1, 4)):
                lines.append(self.statement(names, location, 2))
        return "\n".join(lines)

    def statement(self, names: Names, location: int, depth: int) -> str:
        forms = [self.assign, self.number, self.save, self.save, self.edit, self.unpack, self.comprehension]
        if depth:
            forms += [self.branch, self.loop, self.function, self.guarded, self.match, self.local_class, self.closure]
        return self.source.choice(forms)(names, location, depth)

    # Statements.

    def assign(self, names: Names, location: int, depth: int) -> str:
        value, name = self.tensor(names), self.new("t")
        names.tensors.append(name)
        return f"{name} = {value}"

    def number(self, names: Names, location: int, depth: int) -> str:
        value = self.integer(names)
        if self.source.random() < 0.4:
            return f"many += {value}\nmany %= 5"
        name = self.new("n")
        names.numbers.append(name)
        return f"{name}: int = {value}"

    def save(self, names: Names, location: int, depth: int) -> str:
        forms = [
            f"bag.append(KEEP[{self.tensor(names)}])",
            f"bag += [KEEP[{self.tensor(names)}], {self.integer(names)}]",
            f"table[{self.integer(names)}] = ({self.integer(names)}, {self.tensor(names)}.clone())",
            f'table[f"k{{{self.integer(names)}:>2}}"] = [KEEP[spots[{location}].output]]',
            f"{self.new('s')} = KEEP[{self.tensor(names)}]",
            f"{self.new('s')} = KEEP[spots[{location}].output]",
            f"{self.new('s')} = KEEP[spots[{location}].output[-1]]",
        ]
        return self.source.choice(forms)

    def edit(self, names: Names, location: int, depth: int) -> str:
        at, value = f"spots[{location}].output", f"torch.tanh({self.tensor(names)})"
        forms = [
            f"{at}[:] = {value}",
            f"{at}[-1] = {value}[0] * 0.5",
            f"{at}[..., ::2] = {value}[..., 1::2]",
            f"{at}[:, :4] *= 0.5",
            f"{at} += {value}",
            f"{at} = {value} + {at}",
            f"{at}.mul_(0.5)",
        ]
        return self.source.choice(forms)

    def unpack(self, names: Names, location: int, depth: int) -> str:
        a, b, c = self.new("n"), self.new("t"), self.new("c")
        text = f"{a}, ({b}, *{c}) = {self.integer(names)}, ({self.tensor(names)}, {self.integer(names)}, 3)"
        names.numbers += [a, f"len({c})", f"{c}[0]"]
        names.tensors.append(b)
        return text

    def comprehension(self, names: Names, location: int, depth: int) -> str:
        name, value, number = self.new("c"), self.tensor(names), self.integer(names)
        forms = [
            f"{name} = [{value}[0, i] * i for i in range(3) if i != {number}]\nbag.extend(KEEP[part] for part in {name})",
            f"{name} = {{i: {value}[..., i].sum() for i in range({number} % 3 + 1)}}\ntable['c'] = [*{name}.values()]",
            f"{name} = [[i * j for j in range(i)] for i in range({number} % 4)]\ntable['n'] = {name}",
            f"{name} = [(w := x + {number}) for x in range(2)]\nbag.append((w, {name}))",
        ]
        return self.source.choice(forms)

    def branch(self, names: Names, location: int, depth: int) -> str:
        first, second = self.block(names, location, depth), self.block(names, location, depth)
        return f"if {self.condition(names)}:\n{first}\nelif {self.condition(names)}:\n    pass\nelse:\n{second}"

    def loop(self, names: Names, location: int, depth: int) -> str:
        name = self.new("i")
        inner = names.inside()
        inner.numbers.append(name)
        body = self.block(inner, location, depth)
        leave = self.source.choice(["break", "continue", "pass"])
        head = self.source.choice(
            [f"for {name} in range({self.source.randint(1, 3)}):", f"for {name}, _ in enumerate('ab'):"]
        )
        return f"{head}\n{body}\n    if {self.condition(inner)}: {leave}\nelse:\n    many = (many + 1) % 5"

    def function(self, names: Names, location: int, depth: int) -> str:
        name = self.new("f")
        inner = names.inside()
        inner.tensors, inner.numbers = [*names.tensors, "x"], [*names.numbers, "k"]
        text = f"def {name}(x, k={self.integer(names)}):\n    {self.assign(inner, location, 0)}\n"
        text += f"    return {self.tensor(inner)}"
        names.functions.append(name)
        return text

    def closure(self, names: Names, location: int, depth: int) -> str:
        name, number = self.new("f"), self.integer(names)
        names.functions.append(f"{name}()")
        return (
            f"def {name}(calls=[]):\n    n = {number}\n    def inner(x):\n        nonlocal n\n        n += 1\n"
            f"        calls.append(n)\n        return x * (n % 3) * 0.1\n    return inner"
        )

    def guarded(self, names: Names, location: int, depth: int) -> str:
        first = self.block(names, location, depth)
        return self.source.choice(
            [
                f"try:\n{first}\n    raise KeyError({self.integer(names)})\nexcept KeyError as error:\n"
                "    bag.append(error.args[0])\nfinally:\n    many = (many + 2) % 5",
                f"with contextlib.suppress(ZeroDivisionError):\n{first}\n    1 // (many - many)",
            ]
        )

    def match(self, names: Names, location: int, depth: int) -> str:
        first = indent(self.block(names, location, depth))
        return (
            f"match ({self.integer(names)}, many):\n    case (0, n) | (n, 0):\n        bag.append(n)\n"
            f"    case (a, b) if a > b:\n{first}\n    case _:\n        pass"
        )

    def local_class(self, names: Names, location: int, depth: int) -> str:
        name = self.new("C")
        names.functions.append(f"{name}().go")
        value = self.tensor(Names(["x"], ["self.k"], ["damped", "scaler"]))
        return f"class {name}:\n    k = {self.integer(names)}\n    def go(self, x):\n        return {value}"

    def block(self, names: Names, location: int, depth: int) -> str:
        inner = names.inside()
        lines = [self.statement(inner, location, depth - 1) for _ in range(self.source.randint(1, 2))]
        return indent("\n".join(lines))

    # Expressions.

    def tensor(self, names: Names, depth: int = 2) -> str:
        one = self.source.choice(names.tensors)
        if not depth:
            return one
        inner, number = self.tensor(names, depth - 1), self.integer(names, depth - 1)
        forms = [
            one,
            f"{self.source.choice(names.functions)}({inner})",
            f"({inner} * {self.source.choice(['0.5', '-1', number])})",
            f"({inner} + {one})",
            f"{inner}.flip(-1)",
            f"(lambda v, k={number}: v * k)({inner})",
            f"({inner} if {self.condition(names)} else {one})",
            f"torch.where({one} > 1e9, {one}, {inner})",
        ]
        return self.source.choice(forms)

    def integer(self, names: Names, depth: int = 1) -> str:
        one = self.source.choice([*names.numbers, "0", "1", "2", "3"])
        if not depth:
            return one
        inner = self.integer(names, depth - 1)
        forms = [
            one,
            f"({inner} + {one}) % 5",
            f"max({inner}, {one})",
            f"len('ab' * ({inner} % 3))",
            f"{self.source.choice(names.tensors)}.shape[0] % 4" if names.tensors else one,
            f"sum(z for z in range({inner} % 4))",
            f"int(not {inner})",
        ]
        return f"({self.source.choice(forms)})"

    def condition(self, names: Names) -> str:
        one, other = self.integer(names), self.integer(names)
        return self.source.choice(
            [f"{one} > {other}", f"{one} % 2", f"0 <= {one} < {other}", f"not {one} or {other} == 1"]
        )

    def new(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"


def captured(program: str, steps: int) -> str:
    """Return a program as a notebook's cell."""
    body = _keeps(program, lambda inner: f"({inner}).save()").replace("STEPS", f"tracer.iter[:{steps}]")
    head = f"with model.trace(prompt, max_tokens={steps}, ignore_eos=True, temperature=0.0) as tracer:\n"
    return head + indent(body)


def direct(program: str, steps: int) -> str:
    """Return a program as the body of a `tests.oracle.direct.Direct`."""
    return _keeps(program, lambda inner: f"keep({inner})").replace("STEPS", f"steps({steps})")


def saved_names(program: str) -> list[str]:
    """Return the names that a program saves."""
    return ["bag", "table", "ended", *re.findall(r"^\s*(s\d+) = KEEP", program, re.M)]


def _keeps(text: str, write: object) -> str:
    """Replace each ``KEEP[x]``, whose brackets balance."""
    assert callable(write)
    while (start := text.find("KEEP[")) >= 0:
        depth, end = 1, start + 5
        while depth:
            depth += {"[": 1, "]": -1}.get(text[end], 0)
            end += 1
        text = text[:start] + write(text[start + 5 : end - 1]) + text[end:]
    return text


def indent(text: str) -> str:
    return textwrap.indent(text, "    ")
