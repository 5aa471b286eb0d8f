"""The oracle generates greedily with transformers, one step at a time, and reports what it saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.activations import XIELUActivation

from tests.oracle import gpt2, gptj, llama, opt, stale, views
from tests.oracle.binding import Bindings, Visit
from tests.oracle.location import Edit, Kind, Location, Reference, copy_of, layout_of, write_into

Binder = Callable[[Any, Bindings], None]
# Architectures of which only canonical values are compared.
CANONICAL_ONLY = ("mixtral", "qwen2_moe", "granitemoe", "phimoe", "gpt_oss")
_LIKE_LLAMA = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmoe", "qwen3_moe")
BINDERS: dict[str, Binder] = {
    "gpt2": gpt2.bind,
    "gptj": gptj.bind,
    "opt": opt.bind,
    "cohere": stale.bind_cohere,
    "stablelm": stale.bind_stablelm,
    **dict.fromkeys(_LIKE_LLAMA, llama.bind),
    **dict.fromkeys(CANONICAL_ONLY, lambda model, to: None),
}


class Oracle:
    """A checkpoint in transformers, float32, with eager attention.

    Args:
        checkpoint: the model's directory.
        canonical: report values under their canonical names ("blocks.1.attn.z") instead of vLLM's modules; `run` may say
            otherwise.
        dtype: another precision.
        device: where it computes.
    """

    def __init__(
        self, checkpoint: Path, canonical: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        self._canonical = canonical
        self._device = device
        self.config = AutoConfig.from_pretrained(checkpoint)
        self.model = _as_in_vllm(
            _auto(self.config)
            .from_pretrained(checkpoint, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
            .eval()
            .to(device)
        )

    @torch.no_grad()
    def run(
        self,
        prompt_ids: list[int],
        steps: int = 1,
        edits: Sequence[Edit] = (),
        force: Sequence[int] | None = None,
        canonical: bool | None = None,
    ) -> Reference:
        """Generate greedily and return every value of every step.

        Args:
            prompt_ids: the prompt; step 0 computes all its rows.
            steps: how many tokens to generate; each step after the first computes the one row of the token before.
            edits: changes made as the forward pass reaches them, in this order where several name one location.
            force: tokens that take the place of the chosen ones, from the first on; the rest is chosen as usual.
            canonical: under which names to report; None for those that the oracle was made with.

        Raises:
            ValueError: an edit changed a value's layout, or names a location or steps that the run did not reach.
        """
        reference = Reference()
        visit = _Recorder(reference, edits)
        bindings = _bind(self.model, visit, self._canonical if canonical is None else canonical)
        try:
            cache = DynamicCache(config=self.config)
            ids = list(prompt_ids)
            for step in range(steps):
                visit.step = step
                output = self.model(
                    torch.tensor([ids], device=self._device), past_key_values=cache, use_cache=True, logits_to_keep=1
                )
                logits = visit("logits", "output", output.logits[0].clone())
                token = force[step] if force is not None and step < len(force) else int(logits.argmax())
                reference.logits.append(logits)
                reference.tokens.append(token)
                ids = [token]
        finally:
            bindings.remove()
        visit.check_all_applied()
        return reference


def locations(checkpoint: Path, canonical: bool = False) -> list[Location]:
    """Return every location of a checkpoint that can be compared, in the order of execution; see `Oracle`."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(checkpoint)
        model = _auto(config).from_config(config)
    bindings = _bind(model, lambda path, kind, value: value, canonical)
    bindings.remove()
    return bindings.locations


def _auto(config: Any) -> Any:
    """Return the factory of transformers that makes a model of a configuration."""
    return AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText


def _as_in_vllm(model: Any) -> Any:
    """Return a model with the two numbers of xIELU in bfloat16, in which vLLM keeps them whatever the precision."""
    for module in model.modules():
        if isinstance(module, XIELUActivation):
            module.to(torch.bfloat16)
    return model


def _bind(model: Any, visit: Visit, canonical: bool) -> Bindings:
    bindings = Bindings(visit)
    binder = views.bind if canonical else BINDERS.get(model.config.model_type, _no_modules)
    binder(model, bindings)
    # The head is applied to the last row alone, after the module tree: its value is served by the generation loop.
    bindings.add("logits", "output", "logits")
    return bindings


def _no_modules(model: Any, to: Bindings) -> None:
    """Bind nothing: of this architecture only canonical values are compared."""


class _Recorder:
    """Keeps a copy of each value and applies the edits of its location.

    Attributes:
        step: the step that is being computed.
    """

    def __init__(self, reference: Reference, edits: Sequence[Edit]) -> None:
        self.step = 0
        self._values = reference.values
        self._edits = list(edits)
        self._applied = [False] * len(self._edits)

    def __call__(self, path: str, kind: Kind, value: Any) -> Any:
        self._values[path, kind, self.step] = copy_of(value)
        for i, edit in enumerate(self._edits):
            if (edit.path, edit.kind) == (path, kind) and (edit.steps is None or self.step in edit.steps):
                edited = edit.apply(copy_of(value))
                if layout_of(edited) != layout_of(value):
                    raise ValueError(
                        f"the edit of {path}.{kind} made {layout_of(edited)} of {layout_of(value)} in step {self.step}"
                    )
                if edit.in_place:
                    write_into(value, edited)
                value = edited
                self._applied[i] = True
        return value

    def check_all_applied(self) -> None:
        for edit, applied in zip(self._edits, self._applied, strict=True):
            if not applied:
                steps = "any step" if edit.steps is None else f"steps {sorted(edit.steps)}"
                raise ValueError(f"the run did not reach {edit.path}.{edit.kind} in {steps}")
