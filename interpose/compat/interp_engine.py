"""interp-engine's names over a served model: `capture` and addresses of points.

    from interpose.compat.interp_engine import Address, capture, load_model

    model = load_model("smollm2", address="localhost:9000")
    point = Address("resid_post", 10)  # or the text "resid_post.10"
    cache = capture(model, model.to_tokens("Hello, world"), [point])
    cache[point]  # [1, tokens, width]

Each call is one trace with one prompt. A point without a counterpart is an error with its reason.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from interpose.compat.counterpart import Values, counterpart, layers_of
from interpose.compat.nnsight import LanguageModel
from interpose.contract.errors import InvalidArgument, UnknownLocation
from interpose.contract.idioms import GRADIENTS
from interpose.modules.envoy import Envoy
from interpose.tracing.client import Client
from interpose.tracing.model import Model

__all__ = ["Address", "Cache", "ServedModel", "capture", "load_model", "parse_address", "run_with_cache", "to_address"]

# The values of each point of a layer, in `model.blocks[i]`.
_OF_LAYERS: dict[str, Values] = {
    "resid_pre": ("", ("resid_pre",)),
    "attn_in": ("", ("attn_in",)),
    "q_norm_in": ("attn", ("q",)),
    "k_norm_in": ("attn", ("k",)),
    "q_norm_out": ("attn", ("norm_q",)),
    "k_norm_out": ("attn", ("norm_k",)),
    "value": ("attn", ("norm_v", "v")),
    "attn_probs": ("attn", ("pattern",)),
    "z": ("attn", ("z",)),
    "attn_out_post": ("", ("attn_out",)),
    "resid_mid": ("", ("resid_mid",)),
    "mlp_in": ("", ("mlp_in",)),
    "router_logits": ("mlp", ("router_logits",)),
    "expert_indices": ("mlp", ("experts",)),
    "expert_weights": ("mlp", ("expert_weights",)),
    "mlp_pre": ("mlp", ("gate", "up")),
    "mlp_pre_linear": ("mlp", ("up",)),
    "mlp_act": ("mlp", ("act",)),
    "mlp_out_post": ("", ("mlp_out",)),
    "resid_post": ("", ("resid_post",)),
}
_OF_MODEL: dict[str, Values] = {
    "embeddings": ("embed", ("output",)),
    "final_norm": ("final_norm", ("output",)),
}
# The values of a layer in the order of the forward pass.
_ORDER = (
    "resid_pre attn_in q k v norm_q norm_k norm_v pattern z attn_out resid_mid "
    "mlp_in router_logits experts expert_weights gate up act mlp_out resid_post"
).split()
# A point that there is only where the model has another value too, and what the model lacks otherwise.
_ONLY_WITH = {
    "q_norm_in": ("norm_q", "no norm of queries; the queries are model.blocks[i].attn.q"),
    "k_norm_in": ("norm_k", "no norm of keys; the keys are model.blocks[i].attn.k"),
    "mlp_pre_linear": ("gate", "no gate in its MLP; the hidden layer is mlp_pre"),
}
# Heads and their width are one dimension there.
_FLAT = frozenset({"z", "value"})

_RAW = (
    "it is the module's own output, before a norm or a multiplier of the layer; what is added to the stream is {post}, and "
    "without such a norm or multiplier both are equal"
)
_REFUSED = {
    "attn_scores": "attention kernels hold no scores; the probabilities are attn_probs",
    "attn_gate": "it is the raw projection, in another order for each architecture; the gate is model.blocks[i].attn.gate",
    "attn_out": _RAW.format(post="attn_out_post"),
    "mlp_out": _RAW.format(post="mlp_out_post"),
    "lm_head": "it is the product without scale and soft cap; model.logits(model.final_norm.output) has the model's logits",
}
# Arguments of `capture`, and why they are refused.
_ARGUMENTS = {
    "attention_mask": "each call has one prompt, so nothing is padded",
    "position_ids": "the engine counts the positions of a prompt from 0",
    "steering_spec": "write the change in a block: model.blocks[10].resid_post += scale * vector",
    "rows": "cut the captured values: cache[point][:, rows]",
    "detach": GRADIENTS,
}
# Of a model: where and how weights are loaded, which the server has done.
_LOADED = frozenset(
    "backend device dtype num_gpus trust_remote_code static_points static_writes quantization kv_cache_dtype".split()
)


@dataclass(frozen=True)
class Address:
    """A point of the forward pass: `Address("resid_post", 10)`; its text is "resid_post.10".

    Attributes:
        name: the point's name.
        layer: the layer's number from 0; None for a point of the whole model.
        stream: one of several residual streams; no served model has several, so a number is refused.
    """

    name: str
    layer: int | None = None
    stream: int | None = None

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name}.{self.layer}"


def parse_address(text: str) -> Address:
    """Return the address that a text names: "resid_post.10", "final_norm".

    Raises:
        InvalidArgument: it is the path of a module, which has another name in the engine, or no address.
    """
    name, *rest = text.split(".")
    if name == "path":
        raise InvalidArgument(
            f"{text!r} is a module of transformers; a block reads the engine's own modules: "
            "model.model.layers[5].mlp.down_proj.output; see print(model)"
        )
    if not name.isidentifier() or len(rest) > 1 or not all(part.isdecimal() for part in rest):
        raise InvalidArgument(f"{text!r} is no address; write 'resid_post.10', or 'final_norm'")
    return Address(name, int(rest[0]) if rest else None)


def to_address(value: Any) -> Address:
    """Return an address given as a text, as a tuple, or as an address of either package.

    Raises:
        InvalidArgument: it is nothing of the kind, or has a stream.
    """
    if isinstance(value, str):
        return parse_address(value)
    fields = value if isinstance(value, tuple) else [getattr(value, name, None) for name in ("name", "layer", "stream")]
    if not fields or len(fields) > 3 or not isinstance(fields[0], str):
        raise InvalidArgument(f"{value!r} is no address; write Address('resid_post', 10)")
    found = Address(*fields)
    if found.stream is not None:
        raise InvalidArgument(f"stream={found.stream}: a served model has one residual stream; leave the stream out")
    return found


class Cache(Mapping[Address, Any]):
    """The captured values by address: `cache["resid_post.10"]`, `cache.get("resid_post", 10)`.

    Raises:
        KeyError: the point was not captured.
    """

    def __init__(self, values: Mapping[Address, Any]) -> None:
        self.tensors = dict(values)

    def __getitem__(self, key: Any) -> Any:
        address = to_address(key)
        if address not in self.tensors:
            raise KeyError(f"{address} was not captured; there are {', '.join(map(str, self.tensors)) or 'none'}")
        return self.tensors[address]

    def get(self, name: Any, layer: Any = None) -> Any:
        """Return the value of a point, by its name and layer or by its address."""
        return self[name if layer is None else (name, layer)]

    def __contains__(self, key: object) -> bool:
        try:
            return to_address(key) in self.tensors
        except InvalidArgument:
            return False

    def __iter__(self) -> Iterator[Address]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"<{len(self)} captured points: {', '.join(map(str, self.tensors))}>"


class ServedModel(LanguageModel):
    """A served model with what `capture` needs of interp-engine's models."""

    __slots__ = ()

    @property
    def n_layers(self) -> int:
        """The number of layers."""
        return len(layers_of(self, "points"))

    def to_tokens(self, text: str, **options: Any) -> np.ndarray:
        """Return a text's token ids, int64 [1, tokens], by the model's own tokenizer.

        Raises:
            InvalidArgument: an option is given: none has a counterpart.
        """
        if options:
            raise InvalidArgument(
                f"to_tokens takes no {', '.join(options)}: a text has the tokens that the model's tokenizer gives it; "
                "give other tokens as ids"
            )
        encoded = self.tokenizer.encode(text)
        return np.asarray([getattr(encoded, "ids", encoded)], dtype=np.int64)

    def refuses(self, point: Any, layer: int | None = None) -> str | None:
        """Return the reason why a point is not given; None: it is given. Nothing runs."""
        found = _counterpart(self, to_address(point if layer is None else (point, layer)))
        return found if isinstance(found, str) else None


def load_model(
    hf_model_id: str,
    *,
    address: str | None = None,
    api_key: str | None = None,
    client: Client | None = None,
    **options: Any,
) -> ServedModel:
    """Return a served model by its name, also with an organisation in front.

    Args:
        hf_model_id: the name; "org/name" is the served model "name".
        address, api_key: as for `interpose.connect`; left out if `client` is given.
        client: a client to use.
        options: arguments that say where and how weights are loaded are left out; others are refused.

    Raises:
        NotFound: the server serves no model of that name.
        InvalidArgument: an argument has no counterpart.
    """
    kept = {name: value for name, value in options.items() if name not in _LOADED}
    return ServedModel(hf_model_id, address=address, api_key=api_key, client=client, **kept)


def capture(model: Model, tokens: Any, points: Sequence[Any], *, detach: bool = True, **options: Any) -> Cache:
    """Run the model once on a prompt, and return the values of points.

    Args:
        model: a served model, of `load_model` or `client.model`.
        tokens: one prompt: a str, token ids, or a tensor of shape [tokens] or [1, tokens].
        points: addresses, or their texts.
        detach: True; a served model has no graph of gradients.
        options: sampling parameters, `edits` and `lora` of `model.trace`.

    Returns:
        The values by address, with a batch dimension of 1: [1, tokens, width]; `attn_probs` [1, heads, tokens, keys]; queries and
        keys of norms [1, tokens, heads, head width].

    Raises:
        UnknownLocation: a point has no counterpart, or does not exist.
        InvalidArgument: an argument has no counterpart.
    """
    for name in [*options, *([] if detach else ["detach"])]:
        if name in _ARGUMENTS:
            raise InvalidArgument(f"{name} has no counterpart in a served model: {_ARGUMENTS[name]}")
    asked = [to_address(point) for point in points]
    known = []
    for address in dict.fromkeys(asked):
        found = _counterpart(model, address)
        if isinstance(found, str):
            raise UnknownLocation(found, location=str(address))
        known.append((address, *found))
    wanted = [(str(address), envoy, value) for address, envoy, value in sorted(known, key=_when)]
    served: Any = model
    values: Any = {}
    with served.trace(tokens, **{"max_tokens": 1, "temperature": 0.0, **options}):
        values = {}.save()  # type: ignore[attr-defined]
        for point, envoy, value in wanted:
            values[point] = getattr(envoy, value).clone()
    return Cache({address: _shaped(address.name, values[str(address)]) for address in asked})


def run_with_cache(model: Model, tokens: Any, points: Sequence[Any], **options: Any) -> Cache:
    """Run the model once on a prompt; the same as `capture`, as in interp-engine."""
    return capture(model, tokens, points, **options)


def _shaped(name: str, value: Any) -> Any:
    """Return a value in the point's shape, with a batch dimension in front."""
    return (value.reshape(value.shape[0], -1) if name in _FLAT else value)[None]


def _when(found: tuple[Address, Envoy, str]) -> tuple[int, int]:
    """Return where a value stands in the forward pass, for sorting."""
    address, _, value = found
    if address.layer is None:
        return (-1 if address.name == "embeddings" else 1 << 30), 0
    return address.layer, _ORDER.index(value)


def _counterpart(model: Model, address: Address) -> tuple[Envoy, str] | str:
    """Return a point's module and the name of its value; a str is why there is none."""
    name, layers = address.name, layers_of(model, "points")
    if name in _REFUSED:
        return f"{address} has no counterpart in a served model: {_REFUSED[name]}"
    if name in _OF_MODEL:
        if address.layer is not None:
            return f"{name} belongs to the whole model and takes no layer"
    elif name in _OF_LAYERS:
        if address.layer is None:
            return f"{name} belongs to a layer; write {name}.0"
        if not 0 <= address.layer < len(layers):
            return f"there is no {address}: the model has {len(layers)} layers"
    else:
        near = difflib.get_close_matches(name, [*_OF_LAYERS, *_OF_MODEL], n=3) or [*_OF_MODEL, *_OF_LAYERS]
        return f"there is no point {name!r}; there are {', '.join(near)}"
    values = (_OF_LAYERS | _OF_MODEL)[name]
    return counterpart(model, str(address), address.layer, values, _ONLY_WITH.get(name, ("", "")))
