"""Makes programs without in-place operations for `torch.func.vmap`; lists stable operations.

A row's result must not depend, to the last bit, on how many rows an operation is given. Operations that only move elements, or
whose result for each element IEEE 754 fixes, keep that (`STABLE`). Other operations may not. On CPUs a product of one float32 row
with a matrix differs from the product of several rows. `sigmoid`, `silu` and `pow` differ where a row's width is no multiple of
the vector's, and so does `rsqrt` of bfloat16: the end of a loop runs other code than its vectorised part.
`tests/unit/executor/plan/test_stable.py` measures the stable operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

_OPEN_END = 1 << 62

_MOVES = """clone detach alias view reshape _unsafe_view slice select unsqueeze squeeze expand permute transpose t cat stack
split split_with_sizes unbind slice_scatter select_scatter flip roll copy fill full_like zeros_like ones_like zeros ones full
arange scalar_tensor lift_fresh_copy new_zeros new_ones new_full _to_copy getitem constant_pad_nd repeat unfold diagonal
_reshape_alias as_strided_scatter"""
_EXACT = """add sub mul div neg abs relu sqrt eq ne lt le gt ge where clamp clamp_min clamp_max maximum minimum logical_and
logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor masked_fill sign ceil floor round trunc isnan
isinf rsub argmax argmin reciprocal any all"""
_INEXACT = frozenset({"alpha", "rounding_mode", "decimals"})
STABLE = frozenset(f"{_MOVES} {_EXACT}".split())


def interpret(graph: fx.Graph, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a graph on its inputs, in order; return its results."""
    env: dict[fx.Node, object] = {}
    given = iter(values)
    results: list[torch.Tensor] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "call_function":
            args = fx.node.map_arg(node.args, env.__getitem__)
            env[node] = node.target(*args, **fx.node.map_arg(node.kwargs, env.__getitem__))
        elif node.op == "output":
            results = list(fx.node.map_arg(node.args[0], env.__getitem__))
    return results


def functional(program: fx.Graph) -> fx.Graph:
    """Return a program without in-place operations, tidied for vmap."""
    if not any(_writes(node) for node in program.nodes):
        made = fx.Graph()
        results = made.graph_copy(program, {})
        made.output(results)
        tidy(made)
        return made
    from torch.fx.experimental.proxy_tensor import make_fx  # takes seconds, and most workers make no plan

    fakes = [node.meta["val"] for node in program.nodes if node.op == "placeholder"]
    mode = fakes[0].fake_mode if fakes else FakeTensorMode()

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        return interpret(program, values)

    with _disable_current_modes(), torch.no_grad(), mode:
        traced = make_fx(torch.func.functionalize(run), tracing_mode="real")(*fakes).graph
    tidy(traced)
    return traced


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def tidy(graph: fx.Graph) -> None:
    """Drop whole slices and copies, and give open ends of slices their size: vmap takes neither."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.target in (aten.slice.Tensor, aten.slice_scatter.default):
            first = 1 if node.target is aten.slice.Tensor else 2
            source = node.args[0]
            given = [*node.args[first:], *[None] * 4][:4]
            dim = given[0] or 0
            size = source.meta["val"].shape[dim]
            start, stride = given[1] or 0, given[3] or 1
            start = max(0, start + size if start < 0 else start)
            end = _OPEN_END if given[2] is None else given[2]
            end = min(end + size if end < 0 else end, size)
            if start == 0 and end == size and stride == 1:
                node.replace_all_uses_with(source if first == 1 else node.args[1])
            else:
                node.args = (*node.args[:first], dim, start, end, stride)
        elif node.target is aten.copy.default and _alike(node.args[0], node.args[1]):
            node.replace_all_uses_with(node.args[1])
        elif node.target in (aten.zero.default, aten.fill.Scalar):
            source = node.args[0]
            with graph.inserting_before(node):
                filled = graph.call_function(aten.full_like.default, (source, *(node.args[1:] or (0,))))
            filled.meta["val"] = source.meta["val"]
            node.replace_all_uses_with(filled)
        elif node.target is aten.fill.Tensor:
            _spread(graph, node, node.args[1])
    _choose_once(graph)
    graph.eliminate_dead_code()


def spread_copies(graph: fx.Graph) -> None:
    """Put other operations in the place of copies: vmap of torch 2.11 takes none."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy.default:
            _spread(graph, node, node.args[1])
            graph.erase_node(node)


def _spread(graph: fx.Graph, node: fx.Node, value: fx.Node) -> None:
    """Put a value, in the shape and dtype of the node's first argument, in the node's place."""
    aten = torch.ops.aten
    like = node.args[0].meta["val"]
    with graph.inserting_before(node):
        spread = graph.call_function(aten.expand.default, (value, list(like.shape)))
        cast = graph.call_function(aten._to_copy.default, (spread,), {"dtype": like.dtype})
    spread.meta["val"] = cast.meta["val"] = like
    node.replace_all_uses_with(cast)


def _choose_once(graph: fx.Graph) -> None:
    """Drop copies that only a choice reads, and choices between a value and itself."""
    aten = torch.ops.aten
    readers = (aten.where.self, aten._to_copy.default)
    for node in graph.nodes:
        if node.target is aten.clone.default and node.users and all(user.target in readers for user in node.users):
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.where.self and node.args[1] is node.args[2] and _alike(node, node.args[1]):
            node.replace_all_uses_with(node.args[1])


def _alike(one: fx.Node, other: fx.Node) -> bool:
    first, second = one.meta["val"], other.meta["val"]
    return bool(first.shape == second.shape and first.dtype == second.dtype)


def first_unstable(graph: fx.Graph, shared: frozenset[str], inputs: Sequence[str]) -> str:
    """Return the first operation whose last bits may depend on the number of rows.

    It is "" if there is none.

    Args:
        shared: the inputs that all rows have in common.
        inputs: the names of the inputs, in the order of the graph's placeholders.
    """
    batched: set[fx.Node] = set()
    names = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            if next(names) not in shared:
                batched.add(node)
                # A number beside a tensor is rounded otherwise than a tensor of numbers, one for each row.
                if node.meta["val"].dim() == 0:
                    return node.name
        elif node.op == "call_function" and any(one in batched for one in node.all_input_nodes):
            batched.add(node)
            name = _name_of(node)
            if name not in STABLE or not _INEXACT.isdisjoint(node.kwargs):
                return name
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                return name
    return ""


def _name_of(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(getattr(node.target, "__name__", node.target) if schema is None else schema.name.partition("::")[2])
