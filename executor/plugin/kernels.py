"""The kernels for the steps that a compiling engine runs uncompiled.

vLLM chooses kernels when it loads a model. An engine that compiles leaves norms, activations and rotary embeddings to its
compiler, as many small torch operations. Uncompiled, these cost several times as much as vLLM's own kernels, and some of them
are compiled on their own when they first see a number of rows. A step with a block calls the modules one by one. So in such a
step every module takes the kernel of an engine that does not compile. The compiled code and the CUDA graphs exist by then and
call no module, so plain steps do not change.

vLLM also runs the shared experts of a mixture on a stream of their own: ahead of the router in steps of up to 256 tokens, after
the router in longer steps. In a step with a block they always run after the router, on the step's own stream. So the order in
which modules run is the same in every step, and what they compute is ready where a block reads it.

What a step replaces for its time, since vLLM asks nothing else when a module runs:

- `CustomOp._forward_method`, which `CustomOp.forward` calls: a module is given its kernel once, when it is made;
- `SharedExperts._stream`: without a stream, a module runs its experts on the step's own.

The priority of an operation of `vllm.ir` has a context manager of vLLM's.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import vllm.ir
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.ir.op import IrOp
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts
from vllm.platforms import current_platform


class EagerKernels:
    """What a model's modules call in a step that runs uncompiled.

    Args:
        model: the model, loaded and warmed up.
        vllm_config: the engine's configuration. For an engine that does not compile, nothing changes.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._beside = [
            part for part in model.modules() if isinstance(part, SharedExperts) and part._stream is not None
        ]
        self._methods: list[tuple[CustomOp, Callable[..., Any]]] = []
        self._priorities: list[tuple[IrOp, list[str]]] = []
        if vllm_config.compilation_config.mode == CompilationMode.NONE:
            return
        eager = _uncompiled(vllm_config)
        parts = [part for part in model.modules() if isinstance(part, CustomOp)]
        with set_current_vllm_config(vllm_config):
            left_to_compiler = [part for part in parts if not (part._enforce_enable or part.enabled())]
        with set_current_vllm_config(eager):
            for part in left_to_compiler:
                if part.enabled():
                    self._methods.append((part, part.dispatch_forward(compile_native=False)))
        chosen = vllm_config.kernel_config.ir_op_priority
        compiled = current_platform.get_default_ir_op_priority(vllm_config)
        for name, default in vars(current_platform.get_default_ir_op_priority(eager)).items():
            if name in IrOp.registry:
                wanted = [one for one in getattr(chosen, name) if one not in getattr(compiled, name)]
                self._priorities.append((IrOp.registry[name], [*wanted, *default]))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Return a context in which the modules take these kernels."""
        if not self._methods and not self._priorities and not self._beside:
            yield
            return
        streams = [part._stream for part in self._beside]
        before = [part._forward_method for part, _ in self._methods]
        with ExitStack() as stack:
            if self._methods or self._priorities:
                stack.enter_context(vllm.ir.enable_torch_wrap(False))
            for op, priority in self._priorities:
                stack.enter_context(op.set_priority(priority))
            try:
                for part, method in self._methods:
                    part.__dict__["_forward_method"] = method
                for experts in self._beside:
                    experts._stream = None
                yield
            finally:
                for (part, _), method in zip(self._methods, before, strict=True):
                    part.__dict__["_forward_method"] = method
                for experts, stream in zip(self._beside, streams, strict=True):
                    experts._stream = stream


def _uncompiled(vllm_config: Any) -> Any:
    """Return a copy of a configuration that chooses kernels as `enforce_eager` does.

    The copy keeps the custom ops that the user named.
    """
    eager = copy.copy(vllm_config)
    eager.compilation_config = compilation = copy.copy(vllm_config.compilation_config)
    compilation.mode = CompilationMode.NONE
    compilation.custom_ops = ["all", *(one for one in compilation.custom_ops if one not in ("all", "none"))]
    # vLLM counts its choices in these counters; the copy has counters of its own.
    compilation.enabled_custom_ops, compilation.disabled_custom_ops = Counter(), Counter()
    return eager
