"""Applies a module of the model to a block's values: `model.lm_head(model.model.norm(h))`.

The block prepares a `Call` and parks. When all ranks are known to have parked with the same call, the module runs beside
the forward pass, in the engine's inference mode, in a forward context that has no batch, with nobody's hooks. What goes in
and what comes out is whole: inputs of row-parallel layers are cut for this rank, column-parallel outputs and the
unembedding's vocabulary are gathered. The values are copies on both ways, so modules that write into their arguments
(fused norms, rotary embeddings) change nothing of the block's.

vLLM's kernels trust the shapes that its own model code gives them, so widths, index ranges and dtypes are checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from executor.core.errors import Refusal
from executor.model.call import Call
from executor.model.items import kind_of, made_of
from executor.model.layouts import Layouts
from executor.model.lora import adapts, layer_of
from executor.model.node import Node
from executor.model.parameters import Parameters
from executor.model.remote_module import RemoteModule
from executor.model.skips import holds_attention
from executor.model.tree import LOGITS, SAMPLES, ModuleTree
from interpose.v1 import trace_pb2 as pb

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)
_SCALARS = (type(None), bool, int, float, str)


def why_not_applied(node: Node) -> str:
    """Return why a module cannot be applied to values and what to write instead; "" if it can."""
    module, path = node.layer, node.path or "the model"
    if isinstance(module, RemoteModule):
        return module.described.not_applied
    if node.title:
        if node.applies is None:
            return f"{path} is a name for values, not a module; apply a module of the model"
        return why_not_applied(node.applies) if node.applies.adapted else ""
    if node.adapted:
        return "where LoRA adapters are served, the logits processor looks for those of the batch's rows; write model.lm_head(h)"
    if module is None:
        return f"{path} is where sampled tokens are read, not a module" if node.path == SAMPLES else ""
    if isinstance(module, _CONTAINERS):
        return f"{path} is a list of modules; apply one of them: {path}[0](…)"
    if isinstance(module, LogitsProcessor):
        return "for logits write model.logits(h); for the unembedding without scale and soft cap, model.lm_head(h)"
    parts = list(module.modules())
    if holds_attention(module):
        return (
            f"{path} holds attention, which needs the batch's positions and KV cache and cannot be applied to values; apply "
            f"the parts that have none (norms, mlp, linear layers), or read and change what the model gives {path} where it "
            "runs it"
        )
    if node.module is not None and adapts(node.module):
        return (
            f"{path} computes with the LoRA adapters of the batch's rows, so it cannot be applied to values; read and change "
            "what the model gives it where it runs it, or apply norms, the embedding and the unembedding, which have none"
        )
    if len(parts) > 1 and any(isinstance(part, VocabParallelEmbedding | torch.nn.Embedding) for part in parts):
        return f"{path} holds an embedding; apply the embedding and the modules after it one by one"
    return ""


class Applier:
    """Runs modules of one worker's model for its blocks.

    Args:
        tree: the model's modules.
        config: the engine's VllmConfig.
        memory_bytes: bound on the largest value that one call makes, in bytes.

    Attributes:
        parameters: reads the model's weights.
    """

    def __init__(self, tree: ModuleTree, config: Any, memory_bytes: int) -> None:
        self._tree = tree
        self._config = config
        self._memory_bytes = memory_bytes
        self._tp_size = config.parallel_config.tensor_parallel_size
        self._dtype: torch.dtype = config.model_config.dtype
        self._layouts: dict[str, Layouts] = {}
        widths = (config.model_config.get_hidden_size(), config.model_config.get_head_size())
        self.parameters = Parameters(self._tp_size, memory_bytes, widths)

    # The block's side: nothing here waits for other ranks, and the module may be on another stage.

    def prepare(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Check a call's arguments as far as possible without the module, and copy them.

        Raises:
            Refusal: INVALID_ARGUMENT, the module cannot be applied, or not to such values.
        """
        reason = why_not_applied(node)
        if reason:
            raise _refuse(node, reason)
        values = [*args, *kwargs.values()]
        if not any(isinstance(value, torch.Tensor) for value in values):
            raise _refuse(node, f"{node.path}(…) needs a tensor to be applied to")
        for value in values:
            self._check_value(node, value)
        floats = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        single = len(floats) == len(tensors) and all(value.dim() == 1 for value in floats)
        return Call(
            node,
            tuple(self._copy(value, single) for value in args),
            {name: self._copy(value, single) for name, value in kwargs.items()},
            single,
        )

    def _check_value(self, node: Node, value: Any) -> None:
        if isinstance(value, _SCALARS):
            return
        if not isinstance(value, torch.Tensor):
            raise _refuse(
                node, f"{node.path}(…) takes tensors, numbers, strings and None, and was given a {type(value).__name__}"
            )
        if value.is_complex() or value.layout is not torch.strided or value.is_meta:
            raise _refuse(node, f"{node.path}(…) was given a {value.dtype} tensor ({value.layout}, {value.device})")
        if value.requires_grad and torch.is_grad_enabled():
            raise _refuse(
                node,
                f"{node.path}(…) runs in the engine's inference mode, so no gradient goes through it; pass x.detach()",
            )

    def _copy(self, value: Any, single: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with torch.inference_mode(False), torch.no_grad():
            copy = torch.empty(value.shape, dtype=value.dtype, device=self._tree.device)
            copy.copy_(value)
        return copy.unsqueeze(0) if single else copy

    # The engine's side: all ranks are here with the same call.

    def check(self, call: Call) -> None:
        """Check a call's arguments against the module, on a rank that has the module.

        Raises:
            Refusal: INVALID_ARGUMENT, the module cannot be applied to these values; QUOTA_EXCEEDED, too many rows.
        """
        node = call.node
        tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, torch.Tensor)]
        kinds = {self._dtype}
        if node.layer is not None:
            kinds |= {parameter.dtype for parameter in node.layer.parameters() if parameter.is_floating_point()}
        for value in tensors:
            if value.is_floating_point() and value.dtype not in kinds:
                raise _refuse(
                    node,
                    f"{node.path} computes in {self._dtype} and was given {value.dtype}; pass x.to({self._dtype})",
                )
        self._check_size(node, tensors)
        module = node.layer or self._head()
        check_arguments(module, call.args, call.kwargs, node.path, whole=True, unembeds=node.module is None)

    def _check_size(self, node: Node, tensors: list[torch.Tensor]) -> None:  # any shape
        """Bound the memory of the call: its rows times the widest value in the module."""
        largest = max(tensors, key=lambda value: value.numel())
        width = largest.shape[-1] if largest.is_floating_point() and largest.dim() else 1
        rows = largest.numel() // max(1, width)
        row_bytes = self._widest(node) * max(self._dtype.itemsize, 4)
        if rows * row_bytes > self._memory_bytes:
            raise Refusal(
                pb.ERROR_CODE_QUOTA_EXCEEDED,
                f"{node.path}(…) on {rows} rows makes {rows * row_bytes >> 20} MiB, more than the "
                f"{self._memory_bytes >> 20} MiB a block may use; apply it to at most {self._memory_bytes // row_bytes} rows "
                "at a time",
                location=node.path,
            )

    def _widest(self, node: Node) -> int:
        if node.path == LOGITS and node.module is None:
            return self._config.model_config.get_vocab_size()
        assert node.layer is not None
        widths = [1]
        for part in node.layer.modules():
            if isinstance(part, LinearBase):
                widths += [part.input_size, part.output_size]
            elif isinstance(part, ParallelLMHead):
                widths.append(part.num_embeddings_padded)
            elif isinstance(part, VocabParallelEmbedding | torch.nn.Embedding):
                widths.append(part.embedding_dim)
        return max(widths)

    def run(self, call: Call) -> Any:
        """Apply the module; return its whole output as tensors of the block's own.

        Raises:
            Refusal: the module cannot be applied to these values, or the result is spread over the ranks in an unknown way.
            Exception: the error that the module raised.
        """
        node = call.node
        if call.wanted is not None:
            return self.parameters.read(node, call.wanted)
        self.check(call)
        context = set_forward_context(None, self._config, skip_compiled=True)
        hook = register_module_forward_pre_hook(_check_inner)
        try:
            with torch.inference_mode(), context:
                # Find the experts by name, not by the order of the calls in a forward pass.
                get_forward_context().all_moe_layers = None
                if node.module is None:
                    result = self._tree.root.module.compute_logits(*call.args, **call.kwargs)  # type: ignore[union-attr]
                elif isinstance(node.layer, ParallelLMHead):
                    result = self._unembed(node.layer, *call.args, **call.kwargs)
                else:
                    assert node.layer is not None
                    return self._own(self._forward(node.layer, call), (), self._layouts_of(node), call.single)
                return self._own(result, (), None, call.single)
        finally:
            hook.remove()

    def _forward(self, module: torch.nn.Module, call: Call) -> Any:
        layouts = self._layouts_of(call.node)
        args = [self._cut(value, layouts, (0, i)) for i, value in enumerate(call.args)]
        kwargs = {name: self._cut(value, layouts, (1, name)) for name, value in call.kwargs.items()}
        return module.forward(*args, **kwargs)

    def _unembed(self, head: ParallelLMHead, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden @ weight + bias, [rows, vocab], before the scale.

        It is computed as the model's logits processor computes it.
        """
        processor = next(part for part in map(layer_of, self._tree.paths) if isinstance(part, LogitsProcessor))
        logits = processor._get_logits(hidden, head, getattr(head, "bias", None))
        assert logits is not None, "the platform gathers logits on one rank only"
        return logits

    def _head(self) -> torch.nn.Module:
        """The unembedding: the model's head, or the embedding with which it shares its weights."""
        embeddings = [part for part in map(layer_of, self._tree.paths) if isinstance(part, VocabParallelEmbedding)]
        return max(embeddings, key=lambda part: isinstance(part, ParallelLMHead))

    def _layouts_of(self, node: Node) -> Layouts:
        """Return the layouts of a module's values when a block applies the module.

        The layouts of a location may hold for the forward pass only.
        """
        layouts = self._layouts.get(node.path)
        if layouts is None:
            assert node.layer is not None
            layouts = self._layouts[node.path] = Layouts(f"{node.path}(…)", node.layer, self._tp_size)
        return layouts

    @staticmethod
    def _cut(value: Any, layouts: Layouts, path: tuple[object, ...]) -> Any:
        return layouts.of("input", path).scatter(value).contiguous() if isinstance(value, torch.Tensor) else value

    def _own(self, value: Any, path: tuple[object, ...], layouts: Layouts | None, single: bool) -> Any:
        """Return a result for the block: whole, and in no memory of the engine's."""
        if isinstance(value, torch.Tensor):
            whole = layouts.of("output", path).gather(value) if layouts is not None else value
            with torch.inference_mode(False), torch.no_grad():
                own = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device)
                own.copy_(whole)
            return own.squeeze(0) if single and own.dim() > 1 else own
        if isinstance(value, tuple | list):
            items = [self._own(item, (*path, i), layouts, single) for i, item in enumerate(value)]
            return made_of(kind_of(value), items)
        if isinstance(value, _SCALARS):
            return value
        raise Refusal(
            pb.ERROR_CODE_INVALID_ARGUMENT, f"the module returned a {type(value).__name__}, which blocks cannot have"
        )


def _refuse(node: Node, message: str) -> Refusal:
    return Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, message, location=node.path)


def _check_inner(module: torch.nn.Module, args: Any) -> None:
    """Check the arguments of the parts of an applied module.

    torch shows a hook of all modules the positional arguments only.
    """
    check_arguments(module, args, {}, type(module).__name__, whole=False)


def check_arguments(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    name: str,
    *,
    whole: bool,
    unembeds: bool = False,
) -> None:
    """Refuse values with a wrong layout that a kernel would not notice.

    Args:
        module: the module that gets the values.
        args, kwargs: the module's arguments.
        name: what the message calls the module.
        whole: whether the values are not yet cut for this rank.
        unembeds: whether an embedding gets the stream, because it is the head that shares its weights.

    Raises:
        Refusal: INVALID_ARGUMENT with both sizes.
    """

    def refuse(message: str) -> Refusal:
        return Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, f"{name}(…) {message}", location=name)

    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    floats = [value for value in tensors if value.is_floating_point()]
    unembeds = unembeds or isinstance(module, ParallelLMHead)
    if isinstance(module, VocabParallelEmbedding | torch.nn.Embedding) and not unembeds:
        _check_ids(module, tensors, refuse)
    elif isinstance(module, RotaryEmbeddingBase):
        _check_rotary(module, tensors, floats, refuse)
    else:
        width = _width(module, whole)
        if width is not None and (len(floats) < len(tensors) or any(value.shape[-1:] != (width,) for value in floats)):
            shapes = ", ".join(f"{value.dtype} {list(value.shape)}" for value in tensors)
            raise refuse(f"takes floating-point values of shape [rows, {width}] and was given {shapes}")
        if "Norm" in type(module).__name__ and len({value.shape for value in floats}) > 1:
            raise refuse(f"takes values of one shape and was given {[list(value.shape) for value in floats]}")
        if type(module).__name__.endswith("AndMul") and any(value.shape[-1] % 2 for value in floats):
            raise refuse("takes [gate | up] side by side, an even width")


def _width(module: torch.nn.Module, whole: bool) -> int | None:
    """Return the width of a module's input values, or None if it is unknown or may differ."""
    if isinstance(module, RowParallelLinear):
        return module.input_size if whole or not module.input_is_parallel else module.input_size_per_partition
    if isinstance(module, LinearBase):
        return module.input_size
    if isinstance(module, VocabParallelEmbedding):
        return module.embedding_dim
    weight = getattr(module, "weight", None) if "Norm" in type(module).__name__ else None
    return weight.numel() if isinstance(weight, torch.Tensor) and weight.dim() == 1 else None


def _check_ids(module: Any, tensors: list[torch.Tensor], refuse: Any) -> None:  # any shape
    count = getattr(module, "org_vocab_size", module.num_embeddings)
    for ids in tensors:
        if ids.dtype not in (torch.int64, torch.int32):
            raise refuse(f"takes token ids as integers and was given {ids.dtype} {list(ids.shape)}")
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= count):
            raise refuse(f"takes ids from 0 to {count - 1} and was given {int(ids.min())} to {int(ids.max())}")


def _check_rotary(
    module: Any, tensors: list[torch.Tensor], floats: list[torch.Tensor], refuse: Any
) -> None:  # positions [rows], floats [rows, heads * head size]
    positions = [value for value in tensors if not value.is_floating_point()]
    count = module.cos_sin_cache.shape[0]
    if len(positions) != 1 or positions[0].dim() != 1 or positions[0].dtype != torch.int64 or not floats:
        raise refuse("takes positions, int64 of shape [rows], then query and key of shape [rows, heads * head size]")
    if positions[0].numel() and (int(positions[0].min()) < 0 or int(positions[0].max()) >= count):
        raise refuse(f"takes positions from 0 to {count - 1}")
    for value in floats:
        if value.dim() != 2 or value.shape[0] != positions[0].shape[0] or value.shape[1] % module.head_size:
            raise refuse(
                f"takes query and key of shape [{positions[0].shape[0]}, heads * {module.head_size}] and was given "
                f"{list(value.shape)}"
            )
