"""Where an engine compiles, the steps that it runs uncompiled have the kernels of one that does not, and no others have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.ir.op
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.ir.op import IrOp
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe.runner import shared_experts
from vllm.model_executor.layers.layernorm import RMSNorm

from executor.plugin.kernels import EagerKernels


def configured(mode: CompilationMode, custom_ops: list[str]) -> VllmConfig:
    return VllmConfig(compilation_config=CompilationConfig(mode=mode, custom_ops=custom_ops))


def parts(config: VllmConfig) -> torch.nn.ModuleList:
    with set_current_vllm_config(config):
        return torch.nn.ModuleList([SiluAndMul(), RMSNorm(8)])


def chosen(model: torch.nn.ModuleList) -> list[Any]:
    """What each part would call, and how vLLM's own operations are called."""
    methods = [part._forward_method for part in model]
    return [methods, IrOp.registry["rms_norm"].get_priority(), vllm.ir.op._ENABLE_TORCH_WRAP]


@pytest.fixture
def compiled() -> VllmConfig:
    return configured(CompilationMode.VLLM_COMPILE, [])


def test_a_step_has_what_an_eager_engine_chooses_and_the_next_has_what_it_had(compiled: VllmConfig) -> None:
    eager = configured(CompilationMode.NONE, [])
    model, like = parts(compiled), parts(eager)
    before = chosen(model)
    kernels = EagerKernels(model, compiled)
    assert chosen(model) == before
    with kernels.used():
        methods, _, wrapped = chosen(model)
        assert [one.__func__ for one in methods] == [part._forward_method.__func__ for part in like]  # type: ignore[union-attr]
        assert wrapped == eager.compilation_config.ir_enable_torch_wrap is False
    assert chosen(model) == before
    with pytest.raises(RuntimeError), kernels.used():
        raise RuntimeError
    assert chosen(model) == before
    assert compiled.compilation_config.custom_ops == ["none"]


def test_operations_take_the_implementations_of_an_eager_engine(
    compiled: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this machine there may be one only: the platform is asked, with and without compilation."""
    from executor.plugin import kernels as eager_kernels

    def default(config: Any) -> Any:
        eager = config.compilation_config.mode == CompilationMode.NONE
        return SimpleNamespace(rms_norm=["vllm_c", "native"] if eager else ["native"])

    monkeypatch.setattr(eager_kernels, "current_platform", SimpleNamespace(get_default_ir_op_priority=default))
    asked: list[list[str]] = []
    monkeypatch.setattr(IrOp.registry["rms_norm"], "_filter_priority_impls", lambda wanted: asked.append(wanted) or [])
    for user, expected in (([], ["vllm_c", "native"]), (["oink"], ["oink", "vllm_c", "native"])):
        compiled.kernel_config.ir_op_priority.rms_norm = [*user, "native"]
        with EagerKernels(parts(compiled), compiled).used():
            assert asked.pop() == expected


def test_an_operation_that_the_user_turned_off_stays_off() -> None:
    config = configured(CompilationMode.VLLM_COMPILE, ["none", "-silu_and_mul"])
    model = parts(config)
    silu, norm = (part._forward_method for part in model)
    with EagerKernels(model, config).used():
        assert model[0]._forward_method is silu
        assert model[1]._forward_method != norm


def test_an_engine_that_does_not_compile_has_nothing_to_change() -> None:
    config = configured(CompilationMode.NONE, [])
    model = parts(config)
    before = chosen(model)
    with EagerKernels(model, config).used():
        assert chosen(model) == before


def test_shared_experts_run_on_the_steps_own_stream_after_the_router(
    compiled: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own condition says so, in a step of few tokens too, and says again what it did when the step is over."""
    beside = object()
    monkeypatch.setattr(shared_experts.current_platform, "is_cuda_alike", lambda: True)
    parallel = SimpleNamespace(enable_eplb=False, use_fi_nvl_two_sided_kernels=False, all2all_backend="")
    config: Any = SimpleNamespace(moe_parallel_config=parallel)
    experts = shared_experts.SharedExperts(torch.nn.Identity(), config, False, lambda: False)
    experts._stream = beside  # this machine has none
    order = shared_experts.SharedExpertsOrder
    rows = torch.zeros(4, 8)
    for mode in (CompilationMode.NONE, CompilationMode.VLLM_COMPILE):
        kernels = EagerKernels(torch.nn.ModuleList([experts]), configured(mode, []))
        assert experts._determine_shared_experts_order(rows) == order.MULTI_STREAM_OVERLAPPED
        with kernels.used():
            assert experts._determine_shared_experts_order(rows) == order.NO_OVERLAP
            assert experts.maybe_forward_async(rows) is False
        assert experts._stream is beside
        with pytest.raises(RuntimeError), kernels.used():
            raise RuntimeError
        assert experts._stream is beside
