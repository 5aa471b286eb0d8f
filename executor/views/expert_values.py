"""What single experts of a mixture compute, recomputed for one request.

An engine's kernel runs all chosen experts at once and returns the sum of their outputs. For the rows of a request that asks, the
layer's own kernel runs once more: each row once for each of its experts, with the weight 1, which gives the experts' outputs.
A kernel that chooses the experts itself is given logits that leave one expert alone. Their hidden layers come from the same
kernel with the identity in the place of the projection back, or from the weights themselves where the engine keeps them as they
are.

The result is checked against the engine: the weighted sum of the outputs, with the shared experts' output, must be what the layer
returned for these rows. Otherwise the values are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, apply_moe_activation
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.router.zero_expert_router import ZeroExpertRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from executor.core.errors import Refusal
from executor.core.location import Kind
from executor.model.node import Node, View
from executor.model.rows import Rows
from executor.model.values import Served
from interpose.v1 import trace_pb2 as pb

KINDS = (str(Kind.EXPERT_ACT), str(Kind.EXPERT_OUT))
_LARGEST = 1 << 30  # bytes of one rank's part
_STRIPE = 512  # columns of a hidden layer at a time
_LARGE = 1e4  # a logit: the softmax over it and its negative is 1 and 0 in every dtype
# The chosen experts' weights are the softmax of their own logits.
_SOFTMAX_OF_CHOSEN = (RoutingMethodType.Renormalize, RoutingMethodType.RenormalizeNaive)
_HINT = "use mlp.router_logits, the MLP's input and its output"


@dataclass(frozen=True, eq=False)
class ExpertValue(View):
    """The chosen experts' hidden layers or outputs, [tokens, chosen, width]; read only."""

    def read(self, served: Served) -> torch.Tensor:  # [tokens, chosen, width]
        value: torch.Tensor = served.value
        return value

    def write(self, served: Served, value: object) -> None:
        served.assign(value)


class Experts:
    """Computes the hidden layers or the outputs of the experts that a layer's router chose.

    Args:
        kind: of `KINDS`.
        node: the module that runs the experts.
        router: the router's node, if the router runs inside of the module.
        shared: the shared experts' node, if there are any.
    """

    def __init__(self, kind: str, node: Node, router: Node | None, shared: Node | None) -> None:
        assert isinstance(node.layer, MoERunner)
        self.needs = [one for one in (router, shared) if one is not None]
        self._kind = kind
        self._node = node
        self._runner: Any = node.layer
        self._router = router
        self._shared = shared
        self._takes = inspect.signature(node.layer.forward)

    def compute(self, given: tuple[Any, Any], returned: Any, rows: Rows, index: int) -> torch.Tensor:
        """Return the value of a request's rows, [rows, chosen, width].

        The dtype is the dtype of the hidden states.

        Raises:
            Refusal: this code cannot follow the layer's arithmetic. Every rank raises the same error.
        """
        why, parts = "", None
        try:
            parts = self._parts(given, rows)
        except ValueError as error:
            why = str(error)
        self._agree(why)
        assert parts is not None
        out, total = self._summed(parts.out), self._summed(parts.total)
        gave = rows.of(returned)
        if self._runner.moe_config.skip_final_all_reduce:
            gave = self._summed(gave.contiguous())
        if not _near(total, gave):
            why = "what the layer returned is not what its experts and its router give by themselves"
        self._agree(why)
        return out if parts.act is None else self._side_by_side(parts.act)

    def _parts(self, given: tuple[Any, Any], rows: Rows) -> _Parts:
        """Return what this rank's parts of the experts give.

        Raises:
            ValueError: the layer computes something else.
        """
        runner, config = self._runner, self._runner.moe_config
        self._check()
        bound = self._takes.bind(*given[0], **given[1]).arguments
        hidden = rows.of(bound["hidden_states"])
        logits = self._logits(bound, hidden, rows)
        size = hidden.shape[0] * config.experts_per_token * 4
        if size * max(config.hidden_dim, config.intermediate_size_per_partition) > _LARGEST:
            raise ValueError(f"{hidden.shape[0]} tokens' experts are more than fit")
        weights, experts = runner.router.select_experts(
            hidden_states=hidden,
            router_logits=logits.clone(),
            topk_indices_dtype=runner.routed_experts.quant_method.topk_indices_dtype,
        )
        out = self._outputs(hidden, experts)
        fused = (out.float() * weights.float().unsqueeze(-1)).sum(1) * runner.routed_scaling_factor
        if self._shared is not None:
            if self._shared.kept is None:
                raise ValueError("the shared experts had run when the block asked for it; ask before the layer begins")
            beside = rows.of(self._shared.kept).float()
            if runner.routed_scaling_factor != 1.0 and hidden.dtype == torch.float16:
                fused, beside = fused / runner.routed_scaling_factor, beside / runner.routed_scaling_factor
            fused = fused + beside
        act = self._hidden_layers(hidden, experts, out) if self._kind == Kind.EXPERT_ACT else None
        return _Parts(out, fused, act)

    def _check(self) -> None:
        runner, config = self._runner, self._runner.moe_config
        beside = (
            runner.routed_input_transform is not None
            or runner.routed_output_transform is not None
            or isinstance(runner.router, ZeroExpertRouter)
            or runner.routed_experts.apply_router_weight_on_input
        )
        if beside:
            raise ValueError("the layer does more than to weigh and to add what its experts give")
        if runner.routed_experts.quant_method.is_monolithic and config.routing_method not in _SOFTMAX_OF_CHOSEN:
            raise ValueError("the kernel chooses the experts itself, and cannot be given one of them")
        if config.num_local_experts != config.num_experts or config.num_experts != config.num_logical_experts:
            raise ValueError("the experts are spread over ranks, or kept more than once")

    def _logits(self, bound: dict[str, Any], hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the router's logits as the experts were chosen by them, [rows, experts]."""
        if self._router is None:
            return rows.of(bound["router_logits"])
        kept = self._router.kept
        if isinstance(kept, tuple):
            kept = kept[0]
        if kept is None:
            raise ValueError("the router had run when the block asked for it; ask before the layer begins")
        return rows.of(kept)

    def _outputs(self, hidden: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return each chosen expert's output, [rows, chosen, width].

        Args:
            hidden: the rows, [rows, width].
            experts: the chosen experts, [rows, chosen].
        """
        count, routed = experts.shape[1], self._runner.routed_experts
        x = hidden.repeat_interleave(count, dim=0)
        if not routed.quant_method.skip_forward_padding:
            x = torch.nn.functional.pad(x, (0, self._runner.moe_config.hidden_dim - x.shape[1]))
        if routed.quant_method.is_monolithic:
            alone = x.new_full((x.shape[0], self._runner.moe_config.num_logical_experts), -_LARGE)
            alone.scatter_(1, experts.reshape(-1, 1).long(), _LARGE)
            made: torch.Tensor = routed.forward_monolithic(x=x, router_logits=alone, input_ids=None)
        else:
            made = routed.forward_modular(
                x=x,
                topk_weights=torch.ones(experts.numel(), 1, dtype=torch.float32, device=hidden.device),
                topk_ids=experts.reshape(-1, 1).contiguous(),
                shared_experts=None,
                shared_experts_input=None,
            )
        return made[:, : hidden.shape[1]].unflatten(0, (-1, count))

    def _hidden_layers(self, hidden: torch.Tensor, experts: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return each chosen expert's hidden layer, [rows, chosen, width].

        Args:
            hidden: the rows, [rows, width].
            experts: the chosen experts, [rows, chosen].
            out: their outputs, [rows, chosen, width].
        """
        method, config = self._runner.routed_experts.quant_method, self._runner.moe_config
        kernel = method.moe_kernel.fused_experts if method.moe_kernel is not None else None
        if not isinstance(method, UnquantizedFusedMoEMethod):
            raise ValueError("the experts' weights are quantised, so their hidden layers cannot be computed apart")
        if isinstance(kernel, CPUUnquantizedExperts) and not kernel._use_zentorch:
            one = self._by_identity
        elif type(kernel) is TritonExperts:
            one = self._by_weights
        else:
            raise ValueError(f"{type(kernel).__name__} keeps the experts' weights in an order of its own")
        width = config.intermediate_size_per_partition_unpadded
        made = hidden.new_empty(*experts.shape, width)
        for expert in experts.unique().tolist():
            token, position = torch.where(experts == expert)
            made[token, position] = one(kernel, expert, hidden[token], out[token, position])[:, :width]
        return made

    def _by_identity(self, kernel: Any, expert: int, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return an expert's hidden layer, [rows, width], from a kernel that packs its weights.

        The kernel computes it as for the output, so there is nothing to compare.

        Args:
            kernel: the layer's.
            expert: the expert's number.
            hidden, out: what the expert is given, and its output, [rows, width] each.
        """
        weight = self._runner.routed_experts.w13_weight[expert : expert + 1]
        bias = kernel.w1_bias[expert : expert + 1] if kernel.w1_bias is not None else None
        width = weight.shape[1] // 2
        rows = hidden.shape[0]
        chosen = torch.zeros(rows, 1, dtype=torch.int32)
        stripes = []
        for start in range(0, width, _STRIPE):
            identity = torch.zeros(1, min(_STRIPE, width - start), width, dtype=hidden.dtype)
            identity[0].diagonal(start).fill_(1)
            stripe = hidden.new_empty(rows, identity.shape[1])
            cpu_fused_moe(
                stripe,
                hidden.contiguous(),
                weight,
                cpu_prepack_moe_weight(identity, kernel.isa),
                bias,
                None,
                torch.ones(rows, 1),
                chosen,
                self._runner.routed_experts.activation.value,
                kernel.isa,
            )
            stripes.append(stripe)
        return torch.cat(stripes, dim=-1)

    def _by_weights(self, kernel: Any, expert: int, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return an expert's hidden layer, [rows, width], from its weights as they are.

        Args:
            kernel, expert, hidden, out: as of `_by_identity`.

        Raises:
            ValueError: its output does not follow from the hidden layer.
        """
        routed = self._runner.routed_experts
        bias = kernel.w1_bias[expert] if kernel.w1_bias is not None else None
        before = torch.nn.functional.linear(hidden, routed.w13_weight[expert], bias)
        activation = routed.activation
        made = before.new_empty(before.shape[0], before.shape[1] // 2 if activation.is_gated else before.shape[1])
        config = ApplyMoEActivationConfig.from_configs(self._runner.moe_config, kernel.quant_config)
        apply_moe_activation(activation, made, before, activation_config=config)
        back = kernel.w2_bias[expert] if kernel.w2_bias is not None else None
        if not _near(torch.nn.functional.linear(made, routed.w2_weight[expert], back), out):
            raise ValueError("an expert's output does not follow from the hidden layer that its weights give")
        return made

    def _summed(self, value: torch.Tensor) -> torch.Tensor:  # any shape
        """Return the sum of the ranks' parts."""
        group = get_tp_group()
        if not self._node.layouts.sharded:
            return value
        made: torch.Tensor = group.all_reduce(value.contiguous())
        return made

    def _side_by_side(self, act: torch.Tensor) -> torch.Tensor:  # [rows, chosen, part] -> [rows, chosen, width]
        """Return the ranks' columns side by side."""
        if not self._node.layouts.sharded:
            return act
        made: torch.Tensor = get_tp_group().all_gather(act.contiguous(), dim=-1)
        return made

    def _agree(self, why: str) -> None:
        """Refuse on every rank if one rank cannot give the value.

        Args:
            why: why this rank cannot; "" if it can.

        Raises:
            Refusal: with the reason.
        """
        if self._node.layouts.sharded:
            group = get_tp_group()
            failed = [torch.zeros(1) for _ in range(group.world_size)]
            dist.all_gather(failed, torch.tensor([float(bool(why))]), group=group.cpu_group)
            if any(bool(one) for one in failed):
                why = why or "another tensor-parallel rank could not compute its part"
        if why:
            raise Refusal(
                pb.ERROR_CODE_UNKNOWN_LOCATION,
                f"what single experts of {self._node.path} compute cannot be given: {why}; {_HINT}",
                location=self._node.path,
            )


def _near(mine: torch.Tensor, gave: torch.Tensor) -> bool:  # [rows, width] each
    """Return whether a value is what the engine gave, up to rounding."""
    tolerance = 1e-3 if gave.dtype == torch.float32 else 5e-2
    off = (mine.float() - gave.float()).abs().max()
    return bool(off <= tolerance * max(1.0, float(gave.abs().max())))


@dataclass(frozen=True)
class _Parts:
    """What one rank's parts of the experts give.

    The parts of several ranks in `out` and `total` are still to be added up.

    Attributes:
        out: the outputs, [rows, chosen, width].
        total: what the layer returns, [rows, width].
        act: the hidden layers, [rows, chosen, the rank's columns]; None if they are not asked for.
    """

    out: torch.Tensor
    total: torch.Tensor
    act: torch.Tensor | None


def shapes_of(runner: Any) -> Sequence[str]:
    """Return the shapes of the values of `KINDS`, as the documentation gives them."""
    config = runner.moe_config
    top = config.experts_per_token
    width = config.intermediate_size_per_partition_unpadded * config.moe_parallel_config.tp_size
    return [f"[tokens, {top}, {width}]", f"[tokens, {top}, {config.hidden_dim_unpadded}]"]
