"""Random loops that the tables take give what their greenlets give, bit for bit."""

from __future__ import annotations

import random

from hypothesis import given, note, settings
from hypothesis import strategies as st

from executor.graphs.operations import Refused
from tests.unit.executor.graphs.test_blocks import STEPS, InTables, names, same
from tests.unit.executor.plan.bench import LAYERS, Run, steps_of
from tests.unit.executor.plan.test_cases import block
from tests.unit.executor.plan.test_random import FLAGS

# Locations in the order of the model.
LOCATIONS = [
    place
    for i in range(LAYERS)
    for place in (
        f"model.layers[{i}].attn.qkv.q",
        f"model.layers[{i}].attn.output",
        f"model.layers[{i}].mlp.input",
        f"model.layers[{i}].mlp.output",
        f"model.layers[{i}].output[0]",
        f"model.layers[{i}].resid_post",
    )
]


class Author:
    """Writes a loop's body whose changes are mostly operations of the tables."""

    def __init__(self, source: random.Random) -> None:
        self.source = source

    def body(self) -> str:
        lines: list[str] = []
        for i in sorted(self.source.sample(range(len(LOCATIONS)), self.source.randint(1, 4))):
            lines.append(f"h = {LOCATIONS[i]}")
            lines += [self.statement(LOCATIONS[i]) for _ in range(self.source.randint(1, 4))]
        return "\n".join(lines)

    def part(self) -> str:
        return self.source.choice(
            ["[:]", "[:, 3:9]", "[-1]", "[..., 4:]", "[:, 7]", "[:, [2, 3, 11]]", "[..., ::5]", "[:, 0:1]"]
        )

    def operand(self, part: str) -> str:
        width = {"[:]": 19, "[:, 3:9]": 6, "[-1]": 19, "[..., 4:]": 15, "[:, [2, 3, 11]]": 3, "[..., ::5]": 4}.get(
            part, 1
        )
        vector = self.source.choice(["v", "mean", "(alpha * v)", "(v - mean)", "v.abs()"])
        number = self.source.choice(["0.5", "-2", "alpha", "0", "scale"])
        return self.source.choice([number, f"{vector}[:{width}]" if width > 1 else number])

    def kept(self) -> str:
        return self.source.choice(
            ["h", "h.clone()", "h[-1]", "h[:, 3:9]", "h.double()", "h - mean", "h * 2", "h[:, neurons]", "(h > 0)", "h[..., ::3]",
             "torch.cat([h, h.neg()])", "h.reshape(-1)", "(h + v).abs()", "torch.where(h > mean, h, mean)"]
        )  # fmt: skip

    def statement(self, place: str) -> str:
        part = self.part()
        forms = [
            f"kept.append({self.kept()})",
            f"kept.append(({self.kept()}).save())",
            f"table[step, {self.source.random()}] = {self.kept()}",
            f"h{part} += {self.operand(part)}",
            f"h{part} -= {self.operand(part)}",
            f"h{part} *= {self.operand(part)}",
            f"h{part} = {self.operand(part)}",
            "h.clamp_(-0.5, 0.75)",
            "last = h.save()",
            f"total = total + ({self.kept()})[-1].double().sum(-1) * 0"
            if self.source.random() < 0.1
            else "total = total + h[-1]",
            "previous = h[-1].clone()\nkept.append(previous - h[-1])",
        ]
        if not place.endswith("[0]"):
            forms += [f"{place} = {place} * 0.5\nh = {place}", f"{place} = h + v\nh = {place}"]
        return self.source.choice(forms)


taken = []


@settings(max_examples=60, **FLAGS)
@given(st.randoms(use_true_random=False))
def compare(source: random.Random) -> None:
    before = "total, previous, last = torch.zeros(19), torch.zeros(19), None"
    text = block(Author(source).body(), before, "total, previous = total.save(), previous.save()")
    note(text)
    inputs = steps_of(2, STEPS)
    plain = Run(text, [names(i) for i in range(2)])
    try:
        made = InTables(text, [names(i) for i in range(2)]).go(inputs)
    except Refused as refused:
        note(str(refused))
        taken.append(False)
        return
    taken.append(True)
    same(plain.go(inputs), made)


def test_random_loops_in_the_tables() -> None:
    compare()
    assert sum(taken) > len(taken) // 4, (sum(taken), len(taken))
