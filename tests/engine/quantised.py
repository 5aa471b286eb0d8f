"""An engine with quantised weights beside transformers with the same weights as plain numbers, exact and rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from interpose.cli.demo_model import Shape, write_demo_model
from tests.engine.harness import Block, LocalEngine
from tests.oracle import Edit, Oracle, Reference
from tests.oracle.quantised import quantise, rounding_activations

PROMPT = [12, 250, 33, 8, 441, 90, 14, 61, 300, 2, 19]
OTHER = [7, 8, 9]
CHANGED = [PROMPT, OTHER, [5 + 11 * i % 480 for i in range(17)], [9 + 23 * i % 470 for i in range(12)]]
BESIDE = [[5, 9, 301, 77], [3]]
SAMPLING = {"max_tokens": 2, "ignore_eos": True}
TIMES = 2.0
SHAPE = Shape(layers=2, hidden=128, context=256)
LEAST = 4e-3  # half of bfloat16's last digit: nothing can be asked to be nearer
ATTENTION = (
    "resid_pre",
    "attn.q",
    "attn.k",
    "attn.v",
    "attn.rot_q",
    "attn.rot_k",
    "attn.pattern",
    "attn.z",
    "resid_mid",
)
NAMES = (*ATTENTION, "mlp.gate", "mlp.up", "mlp.act", "resid_post")


class Quantised:
    """An engine in bfloat16, and the truth.

    Args:
        folder: for the checkpoints.
        method: as of `quantise`.
        arch: of the demo model.
        shape: of the demo model.
        checkpoint: another model's, made already; None for the demo model.
        engine: makes the engine, given the checkpoint.
        device: where transformers rounds.
        options: of the engine.
    """

    def __init__(
        self,
        folder: Path,
        method: str,
        arch: str = "llama",
        shape: Shape = SHAPE,
        checkpoint: Path | None = None,
        engine: Any = LocalEngine,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.method = method
        made = checkpoint or write_demo_model(folder / "model", arch, shape)
        packed, plain = quantise(made, folder, method)
        self.engine = engine(packed, **{"dtype": "bfloat16", **options})
        self.exact = Oracle(plain, canonical=True)
        self.rounded = Oracle(plain, canonical=True, dtype=torch.bfloat16, device=device)
        rounding_activations(self.rounded.model, method)

    def truths(self, prompt: list[int], tokens: list[int], *edits: Edit) -> tuple[Reference, Reference]:
        """Return what transformers computes, exactly and rounded, fed with the engine's tokens."""
        exact, rounded = (oracle.run(prompt, 2, edits, force=tokens) for oracle in (self.exact, self.rounded))
        return exact, rounded

    def check(self, name: str, value: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """Assert that a value is not much further off than transformers' rounded one."""
        assert value.shape == exact.shape, name
        self.within(name, distance(value, exact), distance(rounded, exact))

    def within(self, name: str, mine: float, theirs: float) -> None:
        """Assert that a distance from the truth is not much larger than transformers' rounded one."""
        allowed = max(TIMES * theirs, LEAST)
        assert mine <= allowed, f"{name} is off by {mine:.1e}, transformers' {self.method} in bfloat16 by {theirs:.1e}"

    def check_every_value(self, names: tuple[str, ...] = NAMES) -> None:
        """Compare values and logits of two prompts in prefill and decode, with plain requests beside them."""
        reads = "\n".join(f"    values[{name!r}, step] = model.blocks[1].{name}.save()" for name in names)
        source = f"values = {{}}\nfor step in tracer.iter[:]:\n{reads}\n    values['logits', step] = model.logits.output.save()\n"
        traces = [[Block(prompt, source + "values.save()\n", SAMPLING)] for prompt in (PROMPT, OTHER)]
        rans = self.engine.run_traces(traces, plain=tuple(BESIDE))
        assert all(len(ran.token_ids) == 4 for ran in rans[2:])
        for prompt, ran in zip((PROMPT, OTHER), rans, strict=False):
            assert ran.failure is None, ran.failure
            exact, rounded = self.truths(prompt, ran.token_ids)
            for (name, step), value in ran.saved["values"].items():
                if name == "logits":
                    self.check(name, value, exact.logits[step], rounded.logits[step])
                else:
                    truths = (one.value(f"blocks.1.{name}", step=step) for one in (exact, rounded))
                    self.check(f"{name} in step {step}", value, *truths)

    def check_change(self, name: str) -> None:
        """Compare the logits after a change of a value in every step.

        Logits of one prompt are one vector: in formats of three bits of mantissa its rounding is a matter of luck. So the
        distances are the means over some prompts.
        """
        at = f"model.blocks[1].{name}"
        source = f"""\
logits = []
for step in tracer.iter[:]:
    {at}[..., ::2] = {at}[..., ::2] * 0.5
    logits.append(model.logits.output)
logits.save()
"""
        rans = self.engine.run_traces([[Block(prompt, source, SAMPLING)] for prompt in CHANGED], plain=tuple(BESIDE))
        distances: dict[int, list[tuple[float, float]]] = {}
        for prompt, ran in zip(CHANGED, rans, strict=False):
            assert ran.failure is None, ran.failure
            exact, rounded = self.truths(prompt, ran.token_ids, Edit(f"blocks.1.{name}", "output", halved))
            untouched, _ = self.truths(prompt, ran.token_ids)
            assert distance(exact.logits[0], untouched.logits[0]) > 1e-2
            for step, logits in enumerate(ran.saved["logits"]):
                pair = distance(logits, exact.logits[step]), distance(rounded.logits[step], exact.logits[step])
                distances.setdefault(step, []).append(pair)
        for step, pairs in distances.items():
            mine, theirs = (sum(found) / len(found) for found in zip(*pairs, strict=True))
            self.within(f"{name} changed, step {step}", mine, theirs)

    def check_applied(self) -> None:
        """Compare an applied MLP with transformers', and a lens through the norm and the unembedding."""
        source = """
given = model.model.layers[1].mlp.input.save()
made = model.model.layers[1].mlp(given).save()
gave = model.model.layers[1].mlp.output.save()
lens = model.lm_head(model.model.norm(model.blocks[1].resid_post)).save()
"""
        [ran] = self.engine.run(Block(PROMPT, source))
        assert ran.failure is None, ran.failure
        mlps = [oracle.model.model.layers[1].mlp for oracle in (self.exact, self.rounded)]
        with torch.no_grad():
            exact, rounded = (mlp(ran.saved["given"].to(next(mlp.parameters()))[None])[0] for mlp in mlps)
        self.check("an applied MLP", ran.saved["made"], exact, rounded.cpu())
        self.check("the MLP", ran.saved["gave"], exact, rounded.cpu())
        truth, near = self.truths(PROMPT, [0, 0])
        self.check("a lens", ran.saved["lens"][-1:], truth.logits[0], near.logits[0])

    def check_weights(self) -> None:
        """A packed weight is refused with what to write instead; weights beside it are right."""
        for name in ("down_proj.weight", "gate_up_proj.weight"):
            [ran] = self.engine.run(Block(PROMPT, f"x = model.model.layers[1].mlp.{name}.save()"))
            assert ran.failure is not None, f"{name} was given"
            assert "quantised" in ran.failure.message and f"{name.partition('.')[0]}(" in ran.failure.message, (
                ran.failure
            )
        source = (
            "x = model.lm_head.weight[3:9].save()\ny = model.model.layers[1].post_attention_layernorm.weight.save()"
        )
        [ran] = self.engine.run(Block(PROMPT, source))
        assert ran.failure is None, ran.failure
        plain = self.exact.model
        assert torch.equal(ran.saved["x"], plain.lm_head.weight[3:9].bfloat16())
        assert torch.equal(ran.saved["y"], plain.model.layers[1].post_attention_layernorm.weight.bfloat16())


def distance(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Return ‖a - b‖ / ‖b‖."""
    value, truth = value.cpu().float(), truth.cpu().float()
    return float((value - truth).norm() / truth.norm())


def halved(value: torch.Tensor) -> torch.Tensor:  # any shape
    """Halve every second column."""
    value[..., ::2] *= 0.5
    return value
