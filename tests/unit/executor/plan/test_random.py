"""Random blocks run as plans as they run in greenlets, bit for bit."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.unit.executor.plan.bench import LAYERS, both
from tests.unit.executor.plan.test_cases import block, names

# Locations in the order of the model; each is one tensor.
PLACES = [
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
] + ["model.logits.output"]
PAIRS = {f"model.layers[{i}].output[0]": f"model.layers[{i}].resid_post" for i in range(LAYERS)}


class Author:
    """Writes a loop's body that a plan can be made of."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.count = 0

    def body(self) -> str:
        chosen = sorted(self.source.sample(range(len(PLACES)), self.source.randint(1, 4)))
        places = [PLACES[i] for i in chosen]
        places = [place for place in places if PAIRS.get(place) not in places]  # both changed is an error
        lines: list[str] = []
        for place in places:
            name = f"h{self.count}"
            self.count += 1
            lines.append(f"{name} = {place}")
            for _ in range(self.source.randint(1, 4)):
                text = self.statement(name, place)
                if self.source.random() < 0.2:
                    test = self.source.choice(["step % 2 == 0", "step > 3", "step != 3", "not step % 3"])
                    text = f"if {test}:\n" + "\n".join("    " + line for line in text.splitlines())
                lines.append(text)
        return "\n".join(lines)

    def value(self, name: str) -> str:
        """Return an expression of the same shape as a tensor's."""
        x = name
        for _ in range(self.source.randint(0, 3)):
            x = self.source.choice(
                [
                    f"torch.tanh({x})",
                    f"torch.exp({x} * 0.1)",
                    f"({x}).relu()",
                    f"({x} * alpha)",
                    f"({x} - ({x}).mean(-1, keepdim=True))",
                    f"({x} / 3 + {name})",
                    f"F.layer_norm({x}, {name}.shape[-1:])",
                    f"torch.where({x} > 0, {x}, {name})",
                    f"({x}).softmax(-1)",
                    f"damped({x})",
                    f"({x}).clamp(-1, 1)",
                    f"({x}).flip(-1)",
                    f"({x} * scale)",
                    f"({x} + step)",
                    f"({x}).cumsum(-1)",
                ]
            )
        return x

    def statement(self, name: str, place: str) -> str:
        value, source = self.value(name), self.source
        forms = [
            f"kept.append(({value}).save())",
            f"kept.append({name}.save())",
            f"kept.append([({value}).norm(), step])",
            f"table[step, {self.count}, '{source.random()}'] = ({value})[:, :5]",
            f"last = ({value}).save()",
            f"kept.append(({value}).topk(3).indices)",
            f"kept.append([({value})[..., i] for i in neurons])",
            f"{name}[:] = {value}",
            f"{name}[:, :4] *= 0.5",
            f"{name}[..., index] = ({value})[..., neurons]",
            f"{name}[..., ::2] = ({value})[..., ::2].exp() * 0.1",
            f"{name}.mul_(0.5)",
            f"{name} += {value}",
            f"total = total + ({value}).sum()",
            f"peak = torch.maximum(peak, ({value}).max())",
            f"seen += ({value}).mean()",
        ]
        if not place.endswith("[0]"):
            forms += [f"{place} = {value}\n{name} = {place}", f"{place} *= 0.5"]
        if not place.startswith("model.logits"):
            forms += [f"kept.append(({value} @ w).save())", f"{name} += v", f"kept.append({value} @ shared)"]
        return source.choice(forms)


FLAGS: dict[str, Any] = {
    "derandomize": True,
    "database": None,
    "deadline": None,
    "phases": [Phase.generate],  # the failing program is printed as it is
    "suppress_health_check": list(HealthCheck),
}


@settings(max_examples=60, **FLAGS)
@given(st.randoms(use_true_random=False))
def test_random_plans(source: random.Random) -> None:
    before = "total, peak, seen = torch.zeros(()), torch.zeros(()), torch.zeros(()).save()"
    text = block(Author(source).body(), before, "total.save(), peak.save()\nended = [total, peak, len(kept)].save()")
    note(text)
    _, planned = both(text, names, requests=2, steps=6)
    assert len(planned.plans) >= 4
