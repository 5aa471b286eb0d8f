"""Describes a loaded model for clients: modules, whole parameter shapes, engine limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
import vllm
from vllm.sampling_params import SamplingParams

from executor.core.errors import Refusal
from executor.core.request import step_tokens
from executor.model.apply import why_not_applied
from executor.model.layouts import Unknown
from executor.model.node import Node, Unreachable
from executor.model.parameters import described
from executor.model.remote_module import RemoteModule
from executor.model.tree import ModuleTree
from interpose.v1 import model_pb2 as pb
from interpose.wire.arrays import dtype_of

# Set by the system or by vLLM itself, or meaningless for one request of a trace.
_NOT_OFFERED = {
    "extra_args",
    "output_kind",
    "output_text_buffer_length",
    "skip_clone",
    "skip_reading_prefix_cache",
    "n",
}
# Outputs are cumulative, and vLLM sends each of these at once, whatever this parameter says.
_NOT_OFFERED |= {"stream_interval"}
# They ask for values that no trace's result has.
_NOT_OFFERED |= {"prompt_logprob_token_ids", "prompt_logprob_start", "routed_experts_prompt_start"}


def sampling_parameters() -> list[str]:
    """Return the names of the sampling parameters that a trace may set."""
    names = [field.name for field in msgspec.structs.fields(SamplingParams)]
    return [name for name in names if not name.startswith("_") and name not in _NOT_OFFERED]


def describe_model(config: Any, tree: ModuleTree) -> pb.ModelDescription:
    """Describe the model of one worker.

    Args:
        config: the engine's VllmConfig.
        tree: the worker's module tree.
    """
    model_config = config.model_config
    tp_size = config.parallel_config.tensor_parallel_size
    description = pb.ModelDescription(
        name=str(model_config.served_model_name or model_config.model),
        class_name=type(tree.root.module).__name__,
        max_model_len=model_config.max_model_len,
        max_prompt_tokens=_longest_prompt(config),
        dtype=dtype_of(model_config.dtype),  # type: ignore[arg-type]
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=config.parallel_config.pipeline_parallel_size,
        vocab_size=model_config.get_vocab_size(),
        engine_version=f"vllm {vllm.__version__}",
        execution_order=tree.execution_order(),
        sampling_parameters=sampling_parameters(),
        layers=model_config.get_total_num_hidden_layers(),
        config_json=json.dumps(model_config.hf_config.to_dict(), default=str),
        generation_config_json=json.dumps(model_config.try_get_generation_config(), default=str),
    )
    description.MergeFrom(describe_tree(tree))
    return description


def describe_tree(tree: ModuleTree) -> pb.ModelDescription:
    """Describe the modules and the canonical values of a model, and nothing else."""
    description = pb.ModelDescription()
    for node in tree.nodes.values():
        one = description.modules.add()
        one.CopyFrom(describe_module(node))
        one.output_refused, one.input_refused = (_why_refused(tree, node, kind) for kind in ("output", "input"))
    for node in tree.pseudo.values():
        description.canonical.extend(_canonical(node))
    return description


def describe_untraced(config: Any, tree: ModuleTree, why: str) -> pb.ModelDescription:
    """Describe a model of which no location is given.

    Args:
        config: the engine's VllmConfig.
        tree: the worker's module tree, as it was made.
        why: the reason.
    """
    description = describe_model(config, tree)
    for one in description.modules:
        one.output_refused = one.input_refused = one.not_applied = why
    return description


def _longest_prompt(config: Any) -> int:
    """Return the most tokens of a traced prompt. Over pipeline stages it comes in one step."""
    whole = int(config.model_config.max_model_len) - 1
    if config.parallel_config.pipeline_parallel_size > 1:
        return min(whole, step_tokens(config.scheduler_config))
    return whole


def describe_module(node: Node) -> pb.Module:
    """Describe one module, on any pipeline stage."""
    module = node.layer
    assert module is not None
    if isinstance(module, RemoteModule):
        return module.described
    return pb.Module(
        path=node.path,
        class_name=type(module).__name__,
        detail=_detail(module),
        parameters=described(module),
        not_applied=why_not_applied(node),
    )


def _why_refused(tree: ModuleTree, node: Node, kind: str) -> str:
    """Return why a raw location cannot be given, as a block is told; "" if it can."""
    try:
        tree.order_of(node.path, kind)
    except Refusal as error:
        return error.message
    layout = node.layouts.main(kind)
    return layout.refusal().message if isinstance(layout, Unknown) else ""


def _canonical(node: Node) -> Iterator[pb.CanonicalNode]:
    """Describe a canonical node and its descendants, parents first.

    A location that is no canonical node yields nothing.
    """
    if node.title:
        values = [
            pb.CanonicalValue(name=name, shape=view.shape, refusal=view.why if isinstance(view, Unreachable) else "")
            for name, view in node.views.items()
        ]
        yield pb.CanonicalNode(path=node.path, title=node.title, values=values, not_applied=why_not_applied(node))
        for child in node.children.values():
            yield from _canonical(child)


def _detail(module: torch.nn.Module) -> str:
    try:
        return module.extra_repr()
    except Exception:
        return ""
