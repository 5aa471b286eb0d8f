"""TransformerLens over a served model: `run_with_cache`, `run_with_hooks`, and hook names.

    from interpose.compat.transformer_lens import HookedModel

    hooked = HookedModel(client.model())
    logits, cache = hooked.run_with_cache("The Eiffel Tower is in", names_filter=lambda name: name.endswith("resid_post"))
    cache["resid_post", 3]  # [1, tokens, width]

Values are those of `HookedTransformer.from_pretrained_no_processing`: the served model's weights are neither folded nor
centred. Each call is one trace with one prompt. A hook without a counterpart is an error with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from interpose.compat.counterpart import counterpart, layers_of
from interpose.contract import hook_names
from interpose.contract.errors import InvalidArgument, UnknownLocation
from interpose.contract.idioms import GRADIENTS
from interpose.modules.envoy import Envoy
from interpose.tracing.model import Model

Filter = str | Sequence[str] | Callable[[str], bool] | None

# Arguments of TransformerLens, and why they are refused.
_REFUSED = {
    "incl_bwd": GRADIENTS,
    "bwd_hooks": GRADIENTS,
    "prepend_bos": "a text has the tokens that the model's tokenizer gives it; give token ids for others: model.to_tokens(text)",
    "padding_side": "each call has one prompt, so nothing is padded",
    "stop_at_layer": "a request runs to its end; name the layers in names_filter, the others are not read",
    "start_at_layer": "a request begins at the first layer; write a value in a hook: (name, lambda value, hook: other)",
    "past_kv_cache": "the engine keeps keys and values itself",
    "attention_mask": "each call has one prompt, so nothing is masked",
    "loss_per_token": "compute it from the logits: log_softmax, and the entries of the next tokens",
    "pos_slice": "cut the cached values: cache[name][:, positions]",
    "device": "values arrive on the CPU of the notebook; move them: value.to(device)",
}
_OF_CACHES = {
    "accumulated_resid": 'cache.stack_activation("resid_post") has the stream after each layer',
    "decompose_resid": 'the parts are hook_embed, and cache["attn_out", i] and cache["mlp_out", i] of each layer',
    "get_full_resid_decomposition": 'heads are no parts of the stream here; multiply cache["z", i] with the output projection',
    "stack_head_results": 'multiply cache["z", i] with the output projection\'s weight, head by head',
    "compute_head_results": 'multiply cache["z", i] with the output projection\'s weight, head by head',
    "logit_attrs": "multiply parts of the stream with rows of the unembedding; see docs/experiments.md",
    "apply_ln_to_stack": "apply the norm in a block: model.model.norm(stack)",
    "to": "move a value: cache[name].to(device)",
}
# A value without which a hook has no counterpart, and what the model lacks then.
_WITH_GATE = ("gate", "its MLP has no gate; the hidden layer is mlp.hook_pre")


@dataclass(frozen=True)
class Counterpart:
    """A hook with a counterpart.

    Attributes:
        name: the hook's full name.
        envoy: the node of canonical values.
        value: the name of the value.
    """

    name: str
    envoy: Envoy
    value: str


class ActivationCache(Mapping[str, Any]):
    """The values of a run by hook name: `cache["resid_post", 3]`.

    `cache["blocks.3.hook_resid_post"]` is the same value. A negative layer counts from the last. Values have a batch dimension
    of 1 in front, unless `remove_batch_dim` took it away.

    Raises:
        KeyError: the run did not read the hook, or the hook has no counterpart; the text gives the reason.
    """

    def __init__(self, values: Mapping[str, Any], layers: int) -> None:
        self._values = dict(values)
        self._layers = layers

    def __getitem__(self, key: Any) -> Any:
        name = self._name(key)
        if name in self._values:
            return self._values[name]
        hook_names.place_of(name)
        raise KeyError(
            f"{name} was not read, names_filter left it out or the model has no such value; cache.keys() are there"
        )

    def _name(self, key: Any) -> str:
        if isinstance(key, str):
            return hook_names.full_name(key)
        if not (isinstance(key, tuple) and 2 <= len(key) <= 3 and isinstance(key[0], str) and isinstance(key[1], int)):
            raise KeyError(f"hooks are named cache['blocks.3.hook_resid_post'] or cache['resid_post', 3], not {key!r}")
        layer = key[1] + self._layers if key[1] < 0 else key[1]
        return hook_names.full_name(key[0], layer, key[2] if len(key) == 3 else None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def stack_activation(self, name: str, layer: int = -1, sublayer_type: str | None = None) -> Any:
        """Return the values of a hook in all layers, one above the other.

        Args:
            name: a short name, "resid_post".
            layer: layers from this layer on are left out; -1: none are.
            sublayer_type: "attn" or "mlp".

        Returns:
            A tensor [layers, 1, tokens, …].
        """
        last = self._layers if layer == -1 else layer
        values = [self[name, number, sublayer_type] if sublayer_type else self[name, number] for number in range(last)]
        if hasattr(values[0], "numpy"):
            import torch

            return torch.stack(values)
        import numpy as np

        return np.stack(values)

    def remove_batch_dim(self) -> ActivationCache:
        """Return the cache without the batch dimension."""
        return ActivationCache({name: value[0] for name, value in self._values.items()}, self._layers)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._values)

    if not TYPE_CHECKING:  # a type checker knows the names that there are

        def __getattr__(self, name: str) -> NoReturn:
            hint = f": {_OF_CACHES[name]}" if name in _OF_CACHES else ""
            raise AttributeError(f"a cache has no attribute {name!r}{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"<activations of {len(self)} hooks: {', '.join(list(self)[:4])}{', …' if len(self) > 4 else ''}>"


class HookedModel:
    """A served model with the methods of a `HookedTransformer`.

    Other attributes are the served model's own.

    Args:
        model: the served model.

    Raises:
        InvalidArgument: the model has no canonical values.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._blocks = layers_of(model, "hooks")

    @property
    def hook_dict(self) -> dict[str, Counterpart]:
        """The hooks that have a counterpart, by name, in the order of the forward pass."""
        names = list(hook_names.OF_MODELS)
        names += [f"blocks.{layer}.{name}" for layer in range(len(self._blocks)) for name in hook_names.OF_LAYERS]
        found = {name: self._place(name) for name in names}
        return {name: one for name, one in found.items() if isinstance(one, Counterpart)}

    @property
    def cfg(self) -> SimpleNamespace:
        """The facts of the model's configuration under the names of TransformerLens."""
        config = self.model.config
        heads, width = (
            config.get("num_attention_heads", config.get("n_head")),
            config.get("hidden_size", config.get("n_embd")),
        )
        return SimpleNamespace(
            n_layers=len(self._blocks),
            n_heads=heads,
            d_model=width,
            d_head=config.get("head_dim") or (width // heads if heads and width else None),
            d_vocab=config.get("vocab_size"),
            n_ctx=self.model.max_model_len,
            model_name=self.model.name,
        )

    def run_with_cache(
        self,
        prompt: Any,
        *,
        names_filter: Filter = None,
        return_type: str | None = "logits",
        remove_batch_dim: bool = False,
        **options: Any,
    ) -> tuple[Any, ActivationCache]:
        """Run the model on a prompt; return its logits and the values of its hooks.

        Args:
            prompt: one prompt: a str, token ids, or a tensor of shape [tokens] or [1, tokens].
            names_filter: names of hooks, or a function that says whether a hook is read; None: all hooks are.
            return_type: "logits", or None for no logits.
            remove_batch_dim: whether the cached values have no batch dimension.
            options: sampling parameters, `edits` and `lora` of `model.trace`.

        Returns:
            The logits [1, tokens, vocabulary], None without; and the values, e.g. [1, tokens, width].

        Raises:
            UnknownLocation: a named hook has no counterpart, or does not exist.
            InvalidArgument: an argument of TransformerLens has no counterpart.
        """
        wanted = [(one.name, one.envoy, one.value) for one in self._chosen(names_filter)]
        found, logits = self._run(prompt, wanted, {}, return_type, options)
        cache = ActivationCache({name: value[None] for name, value in found.items()}, len(self._blocks))
        return logits, cache.remove_batch_dim() if remove_batch_dim else cache

    def run_with_hooks(
        self,
        prompt: Any,
        *,
        fwd_hooks: Sequence[tuple[str | Callable[[str], bool], Callable[..., Any]]] = (),
        return_type: str | None = "logits",
        **options: Any,
    ) -> Any:
        """Run the model on a prompt, with functions that change values; return the logits.

        Args:
            prompt: as for `run_with_cache`.
            fwd_hooks: for each hook a name, or a function that chooses names, and a function `f(value, hook)`. The function
                changes the value in place, or returns a new value. It travels to the engine as source. `hook.name` and
                `hook.layer()` say where it runs. Values have a batch dimension of 1 in front.
            return_type: "logits", or None for no logits.
            options: as for `run_with_cache`.

        Returns:
            The logits [1, tokens, vocabulary]; None without.

        Raises:
            UnknownLocation, InvalidArgument: as for `run_with_cache`.
        """
        functions: dict[str, list[Callable[..., Any]]] = {}
        for chosen, function in fwd_hooks:
            for one in self._chosen(chosen):
                functions.setdefault(one.name, []).append(function)
        wanted = [(one.name, one.envoy, one.value) for name, one in self.hook_dict.items() if name in functions]
        return self._run(prompt, wanted, functions, return_type, options)[1]

    def _run(
        self,
        prompt: Any,
        wanted: list[tuple[str, Envoy, str]],
        functions: dict[str, list[Callable[..., Any]]],
        return_type: str | None,
        options: dict[str, Any],
    ) -> tuple[dict[str, Any], Any]:
        if return_type not in ("logits", None):
            raise InvalidArgument(
                f"return_type={return_type!r} is not computed; the logits are [1, tokens, vocabulary], so compute it from them"
            )
        for name in options:
            if name in _REFUSED:
                raise InvalidArgument(f"{name} has no counterpart in a served model: {_REFUSED[name]}")
        if isinstance(prompt, list | tuple) and prompt and not isinstance(prompt[0], int):
            raise InvalidArgument("a call has one prompt, as prompts are not padded here; call it for each of them")
        model: Any = self.model
        with_logits = return_type == "logits"
        found: Any = {}
        logits: Any = None
        with model.trace(prompt, **{"max_tokens": 1, "temperature": 0.0, **options}):
            found = {}.save()  # type: ignore[attr-defined]
            for name, envoy, value in wanted:
                activation = getattr(envoy, value)
                if not functions:
                    found[name] = activation.clone()
                for function in functions.get(name, ()):
                    hook = SimpleNamespace(name=name, layer=lambda name=name: int(name.split(".")[1]))
                    changed = function(activation[None], hook=hook)
                    if changed is not None:
                        setattr(envoy, value, changed[0])
                        activation = changed[0]
            if with_logits:
                logits = model.logits(model.final_norm.output).save()
        return found, logits[None] if with_logits else None

    def _chosen(self, names: Filter) -> list[Counterpart]:
        """Return the hooks that a filter chooses, in the order of the forward pass."""
        there = self.hook_dict
        if names is None:
            return list(there.values())
        if callable(names):
            return [one for name, one in there.items() if names(name)]
        full = [hook_names.full_name(name) for name in ([names] if isinstance(names, str) else names)]
        for name in full:
            refusal = self._place(name)
            if isinstance(refusal, str):
                raise UnknownLocation(refusal, location=name)
        return [one for name, one in there.items() if name in full]

    def _place(self, name: str) -> Counterpart | str:
        """Return a hook's value; a str is the reason why there is none."""
        try:
            layer, part, values = hook_names.place_of(name)
        except KeyError as error:
            return str(error.args[0])
        if layer is not None and layer >= len(self._blocks):
            return f"there is no hook {name!r}: the model has {len(self._blocks)} layers"
        only_with = _WITH_GATE if name.endswith("mlp.hook_pre_linear") else ("", "")
        found = counterpart(self.model, name, layer, (part, values), only_with)
        return found if isinstance(found, str) else Counterpart(name, *found)

    if not TYPE_CHECKING:  # a type checker knows the names that there are

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or name == "model":
                raise AttributeError(name)
            return getattr(self.model, name)

    def __repr__(self) -> str:
        return f"<{self.model.name} with the hook names of TransformerLens>"
