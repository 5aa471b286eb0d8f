"""`model.scan(prompt)`: a block runs on shapes and types, and nothing is generated.

The model runs on as many dummy tokens as the prompt has, beside no request, as vLLM has it run to warm up; attention, which
needs a cache, gives its queries instead. Every location is what a real pass would have there but for its elements. Those the
block does not see: its tensors are torch's fake tensors, so code whose result depends on elements is an error and never a
wrong shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention

from executor.core.ended import Ending
from executor.core.errors import Refusal
from executor.core.location import Kind
from executor.core.request import Batch, InvokeRequest, Span
from executor.interleave.interleaver import Interleaver
from executor.model.items import Path
from executor.model.layouts import Layout
from executor.model.meta_tensors import Fakes
from executor.model.node import Node
from executor.model.rows import Rows
from executor.model.shapes import Shapes
from executor.model.tree import LOGITS, SAMPLES, ModuleTree
from executor.plan.forms import Form, Own
from interpose.contract.result import Result


def scan(
    interleaver: Interleaver,
    model: torch.nn.Module,
    dummy_run: Callable[[int], object],
    request: InvokeRequest,
    prompt: list[int],
    steps: int,
    sampled: torch.dtype,
) -> Ending:
    """Run a block on shapes; called on every rank, between two steps of the engine.

    Args:
        interleaver: runs the block.
        model: the model.
        dummy_run: runs the model on so many dummy tokens.
        request: the only invoke of the trace, which it carries.
        prompt: the prompt's ids; their number is all that matters.
        steps: of a generation; each after the first has one token.
        sampled: the type of the token ids that the runner samples.

    Returns:
        As `Interleaver.finish`.
    """
    key = f"{request.trace}:scan"
    try:
        interleaver.admit(key, request, len(prompt), 0)
        interleaver.admitted([key])
        interleaver.start_early([key])
        for step in range(steps):
            if interleaver.waits(key):
                _step(interleaver, model, dummy_run, key, len(prompt) if step == 0 else 1, sampled)
    except BaseException:  # of the model or of this code; what the block raises is an answer
        interleaver.drop(request.trace)
        interleaver.break_off()
        raise
    finally:
        interleaver.ended.pop(key, None)
    return interleaver.finish(request.trace, request.invoke, Result(prompt_token_ids=prompt))


def _step(
    interleaver: Interleaver,
    model: torch.nn.Module,
    dummy_run: Callable[[int], object],
    key: str,
    tokens: int,
    sampled: torch.dtype,
) -> None:
    hidden: list[torch.Tensor] = []
    with _eager(model, interleaver.padded_to, hidden):
        try:
            # Before the model is called: hooks of its own that come during the call would miss it.
            interleaver.begin_step(Batch({key: Span(0, 0, tokens)}, tokens, tokens, 1))
            dummy_run(tokens)
        finally:
            interleaver.end_forward()
    logits = model.compute_logits(hidden[0][tokens - 1 : tokens])
    if logits is not None:
        interleaver.visit_logits(logits)
    interleaver.visit_samples(torch.zeros(1, 1, dtype=sampled, device=hidden[0].device))
    interleaver.end_step()


@contextmanager
def _eager(model: torch.nn.Module, padded_to: Callable[[int], object], hidden: list[torch.Tensor]) -> Iterator[None]:
    """Have dummy passes call the modules, with attention's queries in place of its outputs.

    Args:
        padded_to: called with the rows of the tensors.
        hidden: gets what the model gives: [rows, hidden].
    """

    def begin(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        get_forward_context().skip_compiled = True
        given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
        padded_to(next(tensor.shape[0] for tensor in given if isinstance(tensor, torch.Tensor)))

    def end(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden.append(output[0] if isinstance(output, tuple) else output)

    kernels = [module for module in model.modules() if isinstance(module, Attention)]
    hooks = [module.register_forward_hook(_queries) for module in kernels]
    hooks += [model.register_forward_pre_hook(begin, with_kwargs=True), model.register_forward_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def forms_of(
    tree: ModuleTree, model: torch.nn.Module, dummy_run: Callable[[int], object], sampled: torch.dtype
) -> dict[tuple[str, str], Form]:
    """Return the forms of the locations' values for one row, by path and kind.

    The values are whole over the ranks. A location that no block can be given has none. The function is called on every rank,
    between two steps of the engine.

    Args:
        tree: the model's modules.
        model, dummy_run, sampled: as of `scan`.
    """
    forms: dict[tuple[str, str], Form] = {}
    fakes, rows = Fakes(), [1]

    def note(node: Node, kind: str, value: Any, total: int) -> None:
        def layout(path: Path) -> Layout:
            return node.layouts.of(kind, path)

        try:
            shown = Shapes(f"{node.path}.{kind}", value, Rows(0, 1, 1, total, tree.axes), layout, fakes.like)
            form = Form.of(shown.value, Own(), lambda tensor, _: tensor)
        except Refusal:
            return
        if form.rows == 1:
            forms.setdefault((node.path, kind), form)

    def before(node: Node) -> Callable[..., None]:
        return lambda _module, args, kwargs: note(node, Kind.INPUT, (args, kwargs), rows[0])

    def after(node: Node) -> Callable[..., None]:
        return lambda _module, _args, output: note(node, Kind.OUTPUT, output, rows[0])

    hidden: list[torch.Tensor] = []
    handles = []
    with _eager(model, lambda padded: rows.__setitem__(0, padded), hidden):
        for node in tree.nodes.values():
            if node.module is not None:
                handles.append(node.module.register_forward_pre_hook(before(node), with_kwargs=True))
                handles.append(node.module.register_forward_hook(after(node)))
        try:
            dummy_run(1)
        finally:
            for handle in handles:
                handle.remove()
    logits = model.compute_logits(hidden[0][:1])
    if logits is not None:
        note(tree.pseudo[LOGITS], Kind.OUTPUT, logits, logits.shape[0])
    note(tree.pseudo[SAMPLES], Kind.OUTPUT, torch.zeros(1, 1, dtype=sampled, device=hidden[0].device), 1)
    return forms


def _queries(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Let an attention kernel give its queries instead of memory that no kernel wrote.

    So the ranks can be compared.
    """
    if not args or not isinstance(output, torch.Tensor):
        return output
    queries = args[0]
    same = isinstance(queries, torch.Tensor) and queries.numel() == output.numel()
    return queries.reshape(output.shape).clone() if same else torch.zeros_like(output)
