"""The canonical tree of a served model.

It has `model.blocks[i]`, `model.embed`, `model.final_norm` and `model.unembed`.

Everything is found by the engine's layer classes, by the model's configuration and by recorded dummy forwards. The name of an
architecture or a module never counts. A value that cannot be established refuses its use, with the reason.

Size: one builder, which gives each canonical value its name; the finders are files of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from executor.model.items import Path
from executor.model.layouts import Layouts, Unknown
from executor.model.node import Node, Unreachable
from executor.model.remote_module import RemoteModule
from executor.model.tree import LOGITS, ModuleTree
from executor.views.cache import why_not_read
from executor.views.expert_values import KINDS, Experts, ExpertValue, shapes_of
from executor.views.experts import Chosen
from executor.views.heads import Heads, find_heads
from executor.views.joining import events_of, probe_of, tell, told
from executor.views.mlp import MLP, find_mlp, part_of_mlp
from executor.views.overrides import numbers_of
from executor.views.pattern import PATTERN, AttentionPattern, Pattern
from executor.views.probe import ProbeRun, multiple, record, same
from executor.views.sides import SIDES, Layer, Side, SideFinder, check_sides, view_of
from executor.views.stale import find_unused
from executor.views.stream import Point, StreamFinder
from executor.views.tripwire import why_no_pattern
from executor.views.view import Part, Shared, Stream

ROOTS = ("blocks", "embed", "final_norm", "unembed")
ATTENTION = ("q", "k", "v", "gate", "norm_q", "norm_k", "norm_v", "rot_q", "rot_k", "pattern", "z")


def add_views(
    tree: ModuleTree, config: Any, run: Callable[[], object], gather: Callable[[Any], list[Any]] = lambda mine: [mine]
) -> None:
    """Find a model's canonical values and add them to its tree, beside the raw modules.

    If the root of a model has a module with one of these names, the model keeps that module and gets no canonical tree.

    Args:
        tree: the modules, with their order recorded.
        config: the model's configuration, of its text part.
        run: runs a dummy forward.
        gather: sends a value to all pipeline stages and returns the value of each. Every stage calls it equally often.
    """
    if any(name in tree.root.children for name in ROOTS):
        return
    stages = gather(events_of(record(tree.paths, run)))
    root = tree.root.layer
    assert root is not None
    probe = probe_of(stages, next(root.parameters()).device)
    layers = _layers(tree, probe)
    if not all(gather(bool(layers))):
        return
    width = config.hidden_size
    pairs = StreamFinder(probe, width).unsummed([layer for layer, _ in layers])
    finder = StreamFinder(probe, width, find_unused(tree.paths, run, gather, probe, pairs, width))
    builder = _Builder(tree, probe, finder, config, len(stages) > 1)
    found = {
        i: builder.block(f"blocks.{i}", f"blocks[{i}]", layer, kernels)
        for i, (layer, kernels) in enumerate(layers)
        if not isinstance(tree.nodes[layer].layer, RemoteModule)
    }
    builder.check_middles(run)
    check_sides(tree, builder.sides, config.hidden_size, run)
    embed = builder.embed(layers[0][0])
    everyone = gather(({i: tell(block) for i, block in found.items()}, tell(embed)))
    theirs = {i: block for blocks, _ in everyone for i, block in blocks.items()}
    blocks = _node("blocks", "Blocks")
    for i in range(len(layers)):
        blocks.children[str(i)] = found[i] if i in found else told(tree, theirs[i])
    tree.pseudo["blocks"] = blocks
    tree.pseudo["embed"] = embed if 0 in found else told(tree, everyone[0][1])
    tree.pseudo["final_norm"] = builder.final_norm(layers[-1][0])
    tree.pseudo["unembed"] = builder.unembed()


def _node(path: str, title: str) -> Node:
    return Node(path, None, Layouts(path, nn.Identity(), 1), title=title)


def _layers(tree: ModuleTree, probe: ProbeRun) -> list[tuple[str, list[str]]]:
    """Return the decoder layers in order, each with its attention kernels.

    The layers are the items of the outermost module list whose items hold attention layers that the forward runs.
    """
    lists: dict[str, dict[str, list[str]]] = {}
    for path, node in tree.nodes.items():
        if not isinstance(node.layer, AttentionLayerBase) or probe.at(path, "output") is None:
            continue
        parts = path.split(".")
        for end in range(1, len(parts)):
            above = ".".join(parts[:end])
            if isinstance(tree.nodes[above].layer, nn.ModuleList):
                lists.setdefault(above, {}).setdefault(f"{above}.{parts[end]}", []).append(path)
                break
    if not lists:
        return []
    found = max(lists, key=lambda above: len(lists[above]))
    items = [node.path for node in tree.nodes[found].children.values() if probe.at(node.path, "output")]
    return [(item, lists[found].get(item, [])) for item in items]


class _Builder:
    """Makes canonical nodes from what is found.

    Attributes:
        sides: the sides of each layer, with the layer's node.
    """

    def __init__(self, tree: ModuleTree, probe: ProbeRun, finder: StreamFinder, config: Any, pipelined: bool) -> None:
        self._tree = tree
        self._probe = probe
        self._finder = finder
        self._width = config.hidden_size
        self._numbers = numbers_of(type(tree.root.layer).__name__, config)
        self._pipelined = pipelined
        self._why_no_pattern = why_no_pattern(config.to_dict())
        self._middles: list[tuple[Node, Point, list[str], Point]] = []
        self.sides: list[tuple[Node, Layer, dict[str, Side]]] = []

    def block(self, path: str, name: str, layer: str, kernels: list[str]) -> Node:
        """Return the node of one layer."""
        node = _node(path, "Block")
        pre, post = (self._finder.boundary(layer, kind) for kind in ("input", "output"))
        children = [child.path for child in self._tree.nodes[layer].children.values()]
        self._stream(node, name, "resid_pre", pre)
        heads, part = None, layer
        if len(kernels) == 1:
            heads = find_heads(self._tree, self._probe, self._tree.nodes[kernels[0]], layer)
            part = next((child for child in children if (kernels[0] + ".").startswith(child + ".")), layer)
            middle = self._finder.middle(layer, children, part, post)
            if not middle.why:
                self._middles.append((node, middle, children, post))
        elif kernels:
            middle = Point(why=f"the layer has {len(kernels)} attention kernels")
        else:
            middle = Point(
                why="this layer has no attention, so the stream has no middle here; use resid_pre and resid_post"
            )
        self._stream(node, name, "resid_mid", middle)
        self._stream(node, name, "resid_post", post)
        node.children["attn"] = self._attention(f"{path}.attn", f"{name}.attn", heads, bool(kernels))
        mlp = find_mlp(self._tree, self._probe, layer, heads.path if heads is not None else "")
        node.children["mlp"] = self._mlp(f"{path}.mlp", f"{name}.mlp", mlp)
        attention = part if part != layer else ""
        mlp_part, into = part_of_mlp(self._tree, self._probe, children, attention)
        sides = Layer(children, attention, mlp_part, into, pre, middle, post)
        found = SideFinder(self._probe, self._width, sides).find()
        self.sides.append((node, sides, found))
        for attribute in SIDES:
            numbers = self._numbers
            node.views[attribute] = view_of(
                self._tree, node, f"{name}.{attribute}", found[attribute], self._width, numbers
            )
        return node

    def _stream(self, node: Node, name: str, attribute: str, point: Point) -> None:
        name = f"{name}.{attribute}"
        if point.why:
            node.views[attribute] = Unreachable(name, node.path, node, "output", "", why=point.why)
            return
        raw = self._tree.nodes[point.path]
        node.views[attribute] = Stream(name, node.path, raw, point.kind, f"[tokens, {self._width}]", at=point.at)

    def check_middles(self, run: Callable[[], object]) -> None:
        """Check each layer's middle with a second dummy forward; refuse it if it has no effect.

        The dummy forward changes the stream in the middle of every layer. The residual connection must go on with the changed
        value, and not with a copy that it holds elsewhere.
        """
        points = {point.path: point for _, point, _, _ in self._middles}

        def change(path: str, kind: str, value: Any) -> None:
            point = points.get(path)
            for at in point.at if point is not None and kind == point.kind else ():
                tensor = value
                for key in at:
                    tensor = tensor[key]
                tensor += torch.linspace(-1, 1, tensor.shape[-1], device=tensor.device, dtype=tensor.dtype)

        changed = record(self._tree.paths, run, change)
        finder = self._finder.of(changed)
        for node, point, children, post in self._middles:
            if not finder.completes(point, children, post, changed):
                name = node.views["resid_mid"].name
                why = f"the engine holds the stream elsewhere when {point.path} begins, so a change would be lost"
                node.views["resid_mid"] = Unreachable(name, node.path, node, "output", "", why=why)

    def _attention(self, path: str, name: str, heads: Heads | None, any_kernel: bool) -> Node:
        node = _node(path, "Attention")
        if heads is None or not isinstance(heads.kernel.layer, Attention):
            for attribute in ATTENTION:
                self._refuse(node, name, attribute, self._no_heads(heads, any_kernel))
            return node
        width, value_width = heads.widths
        kernel: Attention = heads.kernel.layer
        if heads.projection is None:
            for attribute in ATTENTION:
                why = f"this layer attends to the keys and values of {kernel.kv_sharing_target_layer_name}"
                self._refuse(node, name, attribute, why if heads.queries is not None else heads.why)
            if heads.queries is not None:
                self._part(node, name, "q", heads.queries, "output", (0,), None, (heads.counts[0], width))
                self._norms(node, name, heads, {"q": (heads.counts[0], width)})
                self._kernel(node, name, heads)
            return node
        queries, keys = heads.counts
        start = 0
        stride = 2 * width if heads.gated else width  # of a query head in the projection's output
        for attribute, count, size in (("q", queries, stride), ("k", keys, width), ("v", keys, value_width)):
            columns = (start, start + count * size)
            start = columns[1]
            within = (0, width) if heads.gated and attribute == "q" else None
            self._part(node, name, attribute, heads.projection, "output", (0,), columns, (count, size), within)
        if heads.gated:
            columns, within = (0, queries * stride), (width, stride)
            self._part(node, name, "gate", heads.projection, "output", (0,), columns, (queries, stride), within)
        else:
            self._refuse(node, name, "gate", "this architecture has no gate of the heads' outputs")
        self._norms(node, name, heads, {"q": (queries, width), "k": (keys, width), "v": (keys, value_width)})
        self._part(node, name, "rot_k", heads.kernel, "input", (0, 1), None, (keys, width))
        self._kernel(node, name, heads)
        return node

    def _kernel(self, node: Node, name: str, heads: Heads) -> None:
        """Give a node what the attention kernel is given and returns."""
        queries, _ = heads.counts
        width, value_width = heads.widths
        self._part(node, name, "rot_q", heads.kernel, "input", (0, 0), None, (queries, width))
        quantised = why_not_read(heads.kernel.layer)
        if quantised:
            quantised += "; use attn.rot_q, attn.rot_k and attn.z, or serve the model with kv_cache_dtype auto"
        if why := self._why_no_pattern or quantised:
            self._refuse(node, name, "pattern", why)
        else:
            shape = f"[{queries}, tokens, keys]"
            node.views["pattern"] = Pattern(f"{name}.pattern", node.path, heads.kernel, PATTERN, shape)
            heads.kernel.computed[PATTERN] = AttentionPattern(heads.kernel)
            self._tree.place_before(heads.kernel.path, "output", PATTERN)
        if heads.out is None:
            self._refuse(node, name, "z", "no projection of the heads' outputs could be found")
        else:
            self._part(node, name, "z", heads.out, "input", (0, 0), None, (queries, value_width))

    @staticmethod
    def _no_heads(heads: Heads | None, any_kernel: bool) -> str:
        if not any_kernel:
            return "this layer has no attention; use mlp_in, mlp_out and the parts of mlp"
        if heads is not None and isinstance(heads.kernel.layer, MLAAttention):
            return (
                "this layer has latent attention, whose kernel is given one latent of each token and no keys and values of "
                f"heads; use attn_in, attn_out and the modules of {heads.path}"
            )
        if heads is None or not isinstance(heads.kernel.layer, MambaBase):
            return "this layer does not have one attention kernel of the usual kind"
        kind = type(heads.kernel.layer).__name__
        return f"this layer has no attention heads: tokens are mixed by a {kind}; use attn_in, attn_out, {heads.path}"

    def _norms(self, node: Node, name: str, heads: Heads, sizes: dict[str, tuple[int, int]]) -> None:
        """Give a node the results of the norms of queries, keys and values."""
        for one, size in sizes.items():
            if one not in heads.norms:
                self._refuse(node, name, f"norm_{one}", self._no_norm(heads, one))
                continue
            raw, at = heads.norms[one]
            event = self._probe.at(raw.path, "output")
            assert event is not None
            split = size if event.tensors[at].dim() == 2 else None
            shape = f"[tokens, {size[0]}, {size[1]}]"
            made = Part(f"{name}.norm_{one}", node.path, raw, "output", shape, at=at, heads=split)
            node.views[f"norm_{one}"] = made

    def _no_norm(self, heads: Heads, one: str) -> str:
        """Return why no norm of queries ("q"), keys ("k") or values ("v") is given."""
        norm = self._tree.find(f"{heads.path}.{one}_norm")
        if one == "v" or norm is None or self._probe.at(norm.path, "output") is not None:
            return f"this architecture has no norm of {one} alone; use attn.{one}"
        return (
            "the engine computes the norm and the rotation in one kernel; "
            f"use attn.{one}, which is before it, or attn.rot_{one}, which is after it"
        )

    def _mlp(self, path: str, name: str, mlp: MLP) -> Node:
        node = _node(path, "MLP" if mlp.experts is None else "MixtureOfExperts")
        for attribute, found, why in (("gate", mlp.gate, mlp.why_gate), ("up", mlp.up, mlp.why_up)):
            if found is None:
                self._refuse(node, name, attribute, why)
            else:
                self._part(node, name, attribute, found[0], "output", (0,), found[1], None)
        if mlp.down is None:
            self._refuse(node, name, "act", mlp.why_down)
        else:
            self._part(node, name, "act", mlp.down, "input", (0, 0), None, None)
        if mlp.experts is not None:
            self._experts(node, name, mlp)
        if mlp.shared is not None:
            node.children["shared"] = self._mlp(f"{path}.shared", f"{name}.shared", mlp.shared[1])
        return node

    def _experts(self, node: Node, name: str, mlp: MLP) -> None:
        if mlp.router is None or mlp.experts is None:
            for attribute in ("router_logits", "experts", "expert_weights", *KINDS):
                self._refuse(node, name, attribute, "the layer that the experts are chosen by could not be found")
            return
        self._part(node, name, "router_logits", mlp.router, "output", (0,), None, None)
        if self._pipelined:
            for attribute in ("experts", "expert_weights"):
                why = "only the pipeline stage that has the router could choose them; use mlp.router_logits"
                self._refuse(node, name, attribute, why)
        else:
            self._choices(node, name, mlp.router, mlp.experts.layer)
        self._single(node, name, mlp.experts, mlp)

    @staticmethod
    def _choices(node: Node, name: str, router: Node, runner: Any) -> None:
        """Give a node what its router chooses."""
        top = runner.moe_config.experts_per_token
        for attribute, item in (("expert_weights", 0), ("experts", 1)):
            node.views[attribute] = Chosen(
                f"{name}.{attribute}",
                node.path,
                router,
                "output",
                f"[tokens, {top}]",
                runner=runner,
                item=item,
            )

    def _single(self, node: Node, name: str, experts: Node, mlp: MLP) -> None:
        """Give a node what single experts compute."""
        runner: Any = experts.layer
        if runner.shared_experts is not None and mlp.shared is None:
            for attribute in KINDS:
                self._refuse(node, name, attribute, "the shared experts of the layer could not be found")
            return
        shared = mlp.shared[0] if mlp.shared is not None else None
        for kind, shape in zip(KINDS, shapes_of(runner), strict=True):
            node.views[kind] = ExpertValue(f"{name}.{kind}", node.path, experts, kind, shape)
            experts.computed[kind] = Experts(kind, experts, mlp.inside, shared)
        self._tree.place_before(experts.path, "output", *KINDS)
        if mlp.inside is not None:
            mlp.inside.beside = (mlp.inside,)
        if shared is not None:  # it begins when the router has run, and a hook is of no use to a module that has begun
            inner = [one for path, one in self._tree.nodes.items() if (path + ".").startswith(shared.path + ".")]
            for one in inner:
                one.beside = tuple(each for each in (mlp.inside, shared) if each is not None)

    def _part(
        self,
        node: Node,
        name: str,
        attribute: str,
        raw: Node,
        kind: str,
        at: Path,
        columns: tuple[int, int] | None,
        heads: tuple[int, int] | None,
        within: tuple[int, int] | None = None,
    ) -> None:
        event = self._probe.at(raw.path, kind)
        found = [path for path in (event.tensors if event is not None else ()) if kind == "output" or len(path) == 2]
        if kind == "output" and found == [()]:
            at = ()
        elif at not in found and found and kind == "input":
            at = found[0]
        tensor = event.tensors.get(at) if event is not None else None
        if tensor is None or tensor.dim() != 2:
            self._refuse(node, name, attribute, f"{raw.path}.{kind} is not rows of numbers; use it as it is")
            return
        layout = raw.layouts.of(kind, at)
        if isinstance(layout, Unknown):
            self._refuse(node, name, attribute, layout.why)
            return
        parts = list(heads) if heads is not None else [self._columns(raw, kind, columns)]
        parts[-1] = within[1] - within[0] if within is not None else parts[-1]
        node.views[attribute] = Part(
            f"{name}.{attribute}",
            node.path,
            raw,
            kind,
            f"[tokens, {', '.join(map(str, parts))}]",
            at=at,
            columns=columns,
            heads=heads,
            within=within,
        )

    @staticmethod
    def _columns(raw: Node, kind: str, columns: tuple[int, int] | None) -> int:
        if columns is not None:
            return columns[1] - columns[0]
        module: Any = raw.layer
        return int(module.output_size if kind == "output" else module.input_size)

    @staticmethod
    def _refuse(node: Node, name: str, attribute: str, why: str) -> None:
        node.views[attribute] = Unreachable(f"{name}.{attribute}", node.path, node, "output", "", why=why)

    def embed(self, first: str) -> Node:
        """Return the token embeddings as they enter the stream, with the architecture's own scale."""
        node = _node("embed", "Embedding")
        begins = self._finder.boundary(first, "input")
        stream = begins.value(self._probe)
        for path, raw in self._tree.nodes.items():
            made = self._probe.at(path, "output")
            if isinstance(raw.layer, ParallelLMHead) or not isinstance(raw.layer, VocabParallelEmbedding):
                continue
            rows = made.tensors.get(()) if made is not None else None
            if made is None or rows is None:
                continue
            factor = multiple(stream, rows) if stream is not None else None
            if factor is not None and stream is not None and not same(stream, rows):
                self._scaled_embeddings(node, begins, stream, made.index)
            else:
                shape = f"[tokens, {rows.shape[-1]}]"
                node.views["output"] = Part("embed.output", "embed", raw, "output", shape)
            return node
        self._refuse(node, "embed", "output", "no token embedding could be found")
        return node

    def _scaled_embeddings(
        self, node: Node, begins: Point, stream: torch.Tensor, since: int
    ) -> None:  # [tokens, hidden]
        """Add the embeddings that the stream begins from; read only if more is computed from them."""
        self._stream(node, "embed", "output", begins)
        first = self._probe.at(begins.path, "input")
        others = [
            event.path
            for event in self._probe.after(since, "input")
            if first is not None
            and event.index < first.index
            and not begins.path.startswith(f"{event.path}.")
            and any(same(tensor, stream) for tensor in event.tensors.values())
        ]
        found = node.views["output"]
        if others and isinstance(found, Stream):
            why = (
                f"{others[0]} is given the embeddings before the stream begins, so a change would not reach all that is "
                "computed from them; change blocks[0].resid_pre, which is the stream alone, or clone it to work on it"
            )
            node.views["output"] = Shared(
                found.name, node.path, found.node, found.kind, found.shape, at=found.at[0], why=why
            )

    def final_norm(self, last: str) -> Node:
        """Return the norm between the last layer and the unembedding."""
        node = _node("final_norm", "Norm")
        post = self._finder.boundary(last, "output")
        stream, ended = post.value(self._probe), self._probe.at(last, "output")
        for begun in self._probe.after(ended.index, "input") if ended is not None and stream is not None else ():
            rows = self._finder.used(last, begun)
            made = self._probe.at(begun.path, "output")
            if not 1 <= len(rows) <= 2 or made is None or stream is None or not same(sum(rows.values()), stream):
                continue
            results = [at for at, tensor in self._finder.used(last, made).items() if not same(tensor, stream)]
            if len(results) != 1:
                continue
            shape, raw = f"[tokens, {self._width}]", self._tree.nodes[begun.path]
            node.applies = raw
            node.views["input"] = Stream("final_norm.input", "final_norm", raw, "input", shape, at=tuple(rows))
            node.views["output"] = Part("final_norm.output", "final_norm", raw, "output", shape, at=results[0])
            return node
        for attribute in ("input", "output"):
            self._refuse(node, "final_norm", attribute, "no norm after the last layer could be found")
        return node

    def unembed(self) -> Node:
        """Return the unembedding, whose output is the logits from which the next token is chosen."""
        node = _node("unembed", "Unembedding")
        node.applies = logits = self._tree.pseudo[LOGITS]
        node.views["output"] = Part("unembed.output", "unembed", logits, "output", "[1, vocabulary]")
        return node
