"""LoRA adapters: their settings, and the model's own layers below vLLM's wrappers.

With `enable_lora` vLLM replaces linear layers, embeddings and the logits processor by wrappers that hold the adapters' weights
and do what the layer did. What runs, and is hooked, is the wrapper; what a location means, its path, class, shape and how it is
cut over ranks, is the layer's. Blocks see the same tree with adapters as without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from vllm.config.lora import MaxLoRARanks
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

_BASE = "base_layer"
_ENDS = ("lm_head", "embed_tokens", "embed_in", "embed_out", "wte")
_KNOWN = (LinearBase, VocabParallelEmbedding, LogitsProcessor)


def layer_of(module: Any) -> Any:
    """Return the model's own layer for a module that may be a wrapper around it."""
    return module.base_layer if isinstance(module, BaseLayerWithLoRA) else module


def modules_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a model's modules with their paths, as `named_modules` without wrappers would."""
    inner = {f"{path}.{_BASE}" for path, module in model.named_modules() if isinstance(module, BaseLayerWithLoRA)}
    for path, module in model.named_modules():
        if path not in inner:
            yield path, module


def adapts(module: torch.nn.Module) -> bool:
    """Return whether a module computes with the adapters' weights of the batch's rows.

    No served adapter changes embeddings or the unembedding, so their wrappers do what their layers do.
    """
    ends = (VocabParallelEmbeddingWithLoRA, LogitsProcessorWithLoRA)
    return any(isinstance(part, BaseLayerWithLoRA) and not isinstance(part, ends) for part in module.modules())


def check_wrapped(model: torch.nn.Module) -> None:
    """Refuse a model in which vLLM wraps layers of an unknown class.

    Raises:
        ValueError: with the layer.
    """
    for path, module in model.named_modules():
        if isinstance(module, BaseLayerWithLoRA) and not isinstance(module.base_layer, _KNOWN):
            raise ValueError(
                f"enable_lora is not supported with traces of this model: how {path}, a {type(module.base_layer).__name__}, "
                "lies over rows and ranks with adapters is not known"
            )


class Adapters:
    """The adapters that one model is served with.

    Args:
        folders: each adapter's folder by the name that requests use, absolute or relative to the working directory.

    Raises:
        ValueError: a folder holds no adapter, or one that traces cannot be right with.
    """

    def __init__(self, folders: Mapping[str, str]) -> None:
        self._requests: dict[str, LoRARequest] = {}
        self.rank = 0
        for number, (name, folder) in enumerate(folders.items(), 1):
            path = Path(folder).expanduser().resolve()
            self.rank = max(self.rank, _rank_of(name, path))
            self._requests[name] = LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(path))

    @property
    def names(self) -> list[str]:
        """The names by which requests choose an adapter."""
        return list(self._requests)

    @property
    def requests(self) -> list[LoRARequest]:
        """The adapters as vLLM names them."""
        return list(self._requests.values())

    def request(self, name: str) -> LoRARequest | None:
        """Return the adapter that a request carries, or None for the name "".

        Raises:
            ValueError: there is no such adapter.
        """
        if name and name not in self._requests:
            raise ValueError(unknown(name, self.names))
        return self._requests.get(name)

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the engine's arguments for the adapters, where they are not given.

        Raises:
            ValueError: a given argument is too small for the adapters.
        """
        if not self._requests:
            return {}
        if given.get("enable_lora") is False:
            raise ValueError("lora_modules need enable_lora")
        ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= self.rank]
        if not ranks:
            raise ValueError(
                f"an adapter of rank {self.rank}; the engine takes ranks up to {max(get_args(MaxLoRARanks))}"
            )
        # All have their places at once, so that no traced request waits for another's adapter to leave. The last place stays
        # empty: vLLM's CPU kernels take a row without an adapter, whose index is -1, for one of the last place's adapter.
        slots = len(self._requests) + 1
        options = {"enable_lora": True, "max_loras": slots, "max_lora_rank": ranks[0]}
        options |= {name: given[name] for name in options if given.get(name) is not None}
        if options["max_loras"] < slots:
            raise ValueError(
                f"max_loras is {options['max_loras']}, and {len(self._requests)} adapters need {slots}, one of them for requests "
                "without an adapter: leave it out"
            )
        if options["max_lora_rank"] < self.rank:
            raise ValueError(
                f"max_lora_rank is {options['max_lora_rank']}, and an adapter has {self.rank}: leave it out"
            )
        return options


def unknown(name: str, names: list[str]) -> str:
    """Return the message that there is no such adapter."""
    return f"there is no LoRA adapter {name[:80]!r}; " + (f"it has {', '.join(names)}" if names else "it has none")


def _rank_of(name: str, path: Path) -> int:
    """Return an adapter's rank; raise ValueError if the adapter cannot be served."""
    file = path / "adapter_config.json"
    try:
        config = json.loads(file.read_text())
        rank, targets, saved = int(config["r"]), config.get("target_modules") or [], config.get("modules_to_save") or []
    except OSError:
        raise ValueError(f"lora_modules: {name}: there is no {file}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"lora_modules: {name}: {file} is no adapter's configuration: {error}") from None
    targets = [targets] if isinstance(targets, str) else [str(target) for target in targets]
    ends = sorted({end for end in _ENDS for target in (*targets, *saved) if end in target})
    if ends:
        raise ValueError(
            f"lora_modules: {name} changes {', '.join(ends)}: embeddings and unembeddings that differ from request to request "
            "are not known to traces; serve an adapter of attention and MLP layers only"
        )
    if config.get("use_dora") or config.get("bias", "none") != "none":
        raise ValueError(f"lora_modules: {name}: the engine takes no DoRA and no biases in adapters")
    return rank
