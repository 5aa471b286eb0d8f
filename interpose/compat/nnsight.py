"""nnsight's names over a served model: `LanguageModel`, its arguments, and `save`.

    from interpose.compat.nnsight import LanguageModel, save

    model = LanguageModel("smollm2", address="localhost:9000")
    with model.trace("The Eiffel Tower is in", remote=True):
        hidden = model.model.layers[2].output[0].save()

The blocks are interpose's own: docs/from-nnsight.md says what behaves differently. Arguments that say what holds anyway are left
out, arguments of transformers get their names here, and others are refused with what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from interpose.contract.errors import InvalidArgument, NotFound
from interpose.contract.idioms import OF_MODELS
from interpose.contract.saving import save
from interpose.tracing.client import Client, connect
from interpose.tracing.generation import Generation
from interpose.tracing.model import Model
from interpose.tracing.session_block import SessionBlock
from interpose.tracing.tracer import Tracer

__all__ = ["VLLM", "LanguageModel", "save", "session"]

# Where a trace runs, and that its names are checked: both hold for every trace.
_HOLDS = frozenset({"remote", "validate", "scan", "strict"})
# Of a model: where and when weights are loaded, which the server has done.
_LOADED = frozenset(
    {"device_map", "dispatch", "low_cpu_mem_usage", "trust_remote_code", "tokenizer", "attn_implementation"}
)


def _ids(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value]


# Arguments of transformers' `generate`: the engine's parameter, and its value.
_RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "max_new_tokens": ("max_tokens", lambda value: value),
    "num_return_sequences": ("n", lambda value: value),
    "eos_token_id": ("stop_token_ids", _ids),
}


def sampling_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a trace in nnsight as those of `Model.trace`.

    Raises:
        InvalidArgument: two arguments say the same.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in _HOLDS:
            continue
        if name == "do_sample":
            if value:
                continue
            name, value = "temperature", 0.0
        elif name in _RENAMED:
            name, convert = _RENAMED[name]
            value = convert(value)
        if name in found:
            raise InvalidArgument(f"two arguments set {name}: {', '.join(options)}")
        found[name] = value
    return found


class LanguageModel(Model):
    """A served model with the arguments of nnsight's `LanguageModel`.

    Args:
        model: the name of a served model, also with an organisation in front, "org/name"; or a model of `client.model`.
        address, api_key: as for `interpose.connect`; left out if `client` is given.
        client: a client to use.
        options: arguments that say where transformers loads a model are left out; others are refused.

    Raises:
        NotFound: the server serves no model of that name.
        InvalidArgument: an argument has no counterpart.
    """

    __slots__ = ()

    def __init__(
        self,
        model: str | Model,
        *,
        address: str | None = None,
        api_key: str | None = None,
        client: Client | None = None,
        **options: Any,
    ) -> None:
        for name in options:
            if name not in _LOADED:
                hint = OF_MODELS.get(name, OF_MODELS["dtype"])
                raise InvalidArgument(f"a served model takes no {name!r}: {hint}")
        if isinstance(model, Model):
            super().__init__(model._client, model._description)
            return
        known = client or connect(address, api_key)
        short = model.rpartition("/")[2]
        try:
            description = known.describe(model)
        except NotFound:
            if short == model or short not in known.models:
                raise
            description = known.describe(short)
        super().__init__(known, description)

    def trace(self, prompt: Any = None, **options: Any) -> Tracer:
        """Run a block inside the model: `with model.trace("Hello", remote=True) as tracer:`.

        Args:
            prompt: as for `Model.trace`.
            options: as for `Model.trace`, and nnsight's; without `max_tokens` the model runs once, as in nnsight.
        """
        return super().trace(prompt, **{"max_tokens": 1, **sampling_of(options)})

    def generate(self, prompt: Any = None, *, max_new_tokens: int | None = None, **options: Any) -> Generation:
        """Generate text, with or without a block; arguments as for `Model.generate`, and nnsight's."""
        return super().generate(prompt, max_new_tokens=max_new_tokens, **sampling_of(options))


class VLLM(LanguageModel):
    """A served model with the arguments of nnsight's `VLLM`, whose traces generate as vLLM does."""

    __slots__ = ()

    def trace(self, prompt: Any = None, **options: Any) -> Tracer:
        """Run a block inside the model; arguments as for `LanguageModel.trace`."""
        return Model.trace(self, prompt, **sampling_of(options))


def session(model: LanguageModel) -> SessionBlock:
    """Return a session, as nnsight's `model.session()`: `with session(model):`."""
    client: Any = model._client
    found: SessionBlock = client.session()
    return found
