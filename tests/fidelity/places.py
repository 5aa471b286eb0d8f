"""The locations that are measured: every canonical value, and every module of the engine's, with what each must be.

A module's value is compared with transformers' under the names of `tests.oracle`. What the oracle does not list follows from
what it does: an attention kernel is given the rotated queries and keys, a layer what the layer before it returned. A module
that the forward pass does not call, or calls several times in a step, must be refused. There is no fourth kind: a location
for which none of this holds stops the measurement.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from executor.model.remote_module import RemoteModule
from executor.model.tree import LOGITS, SAMPLES, ModuleTree
from executor.parallel.merge_tree import gather
from tests.engine.conftest import expression
from tests.oracle import Location, Oracle, Reference, locations

# What a layer begins with, in the architectures whose attention is given its output.
FIRST_NORMS = ("input_layernorm", "ln_1", "self_attn_layer_norm")
ACTIVATIONS = ("act_fn", "act", "activation_fn")
# Canonical values that are refused where the oracle has none.
_HEADS = "q k v gate norm_q norm_k norm_v rot_q rot_k pattern z"
MAY_BE_ABSENT = (*(f"attn.{name}" for name in _HEADS.split()), "resid_mid", "mlp.gate", "mlp.up", "mlp.act")
# Of a block that has one part alone.
SIDES = ("attn_in", "attn_out", "mlp_in", "mlp_out")
# The classes of modules that are given or return something which only the class tells.
KINDS = (Attention, MoERunner, RotaryEmbedding, VocabParallelEmbedding, nn.Embedding)


@dataclass(frozen=True)
class Truth:
    """What transformers computed for one prompt.

    Attributes:
        prompt: its ids.
        raw: the values by vLLM's names.
        canonical: the values by canonical names.
    """

    prompt: list[int]
    raw: Reference
    canonical: Reference

    @classmethod
    def of(cls, oracle: Oracle, prompt: list[int], steps: int, force: Sequence[int] | None = None) -> Truth:
        """Compute it, with the tokens that are forced, if any."""
        raw, canonical = (oracle.run(prompt, steps, force=force, canonical=one) for one in (False, True))
        return cls(prompt, raw, canonical)

    def ids(self, step: int) -> torch.Tensor:
        """The tokens that a step computes."""
        return torch.tensor(self.raw.tokens[step - 1 : step] if step else self.prompt)

    def positions(self, step: int) -> torch.Tensor:
        """The positions of the tokens that a step computes."""
        return torch.arange(len(self.prompt)) if step == 0 else torch.tensor([len(self.prompt) + step - 1])

    def flat(self, name: str, step: int) -> torch.Tensor:
        """A canonical value of heads, side by side as the engine has them."""
        value: torch.Tensor = self.canonical.value(name, step=step)
        return value.flatten(-2)


Expected = Callable[[Truth, int], Any]


@dataclass(frozen=True)
class Place:
    """A location.

    Attributes:
        row: of the table.
        source: what a block writes for it.
        order: when the model comes to it; what is refused is asked for first.
        truth: what it must be; None if it must be refused.
        module: the path of the module; "" of a canonical value.
    """

    row: str
    source: str
    order: int
    truth: Expected | None
    module: str = ""

    @property
    def path(self) -> str:
        """The oracle's name of a canonical value."""
        name = self.source.removeprefix("model.").replace("[", ".").replace("]", "")
        return LOGITS if name == "unembed.output" else name

    @property
    def canonical(self) -> bool:
        """Whether it is a canonical value, and no module's."""
        return not self.row.startswith("raw: ")

    def expected(self, truth: Truth, step: int) -> Any:
        """The value that it must be, if it is given."""
        assert self.truth is not None, f"{self.source} is given, and nothing says what it must be"
        return self.truth(truth, step)

    def generally(self, message: str) -> str:
        """Return a message about it without its layer or its module's path."""
        return (
            message.replace(self.module, "MODULE") if self.module else re.sub(r"\bblocks\[\d+\]", "blocks[i]", message)
        )


@dataclass(frozen=True)
class Modules:
    """The modules of a model, of all its pipeline stages.

    Attributes:
        tree: where they are, and in what order they run.
        kinds: which of `KINDS` each is, by path, as far as it is any.
        takes: how many arguments each of the layers takes, by path.
    """

    tree: ModuleTree
    kinds: dict[str, list[type]]
    takes: dict[str, int]

    @classmethod
    def of(cls, tree: ModuleTree) -> Modules:
        """Find out; called on every rank, because a stage has the modules of its own layers only."""
        mine = {path: [kind for kind in KINDS if isinstance(node.layer, kind)] for path, node in tree.nodes.items()}
        found: dict[str, list[type]] = {}
        for stage in gather(mine):
            found |= {path: kinds for path, kinds in stage.items() if kinds}
        takes: dict[str, int] = {}
        for stage in gather(_taken(tree)):
            takes |= stage
        return cls(tree, found, takes)

    def are(self, path: str, kind: type) -> bool:
        """Whether the module at a path is of a kind."""
        return kind in self.kinds.get(path, ())


def _taken(tree: ModuleTree) -> dict[str, int]:
    """Return how many arguments each item of a module list takes, of those that this stage has."""
    layers = {path: node.layer for path, node in tree.nodes.items() if _layer_of(tree, path) == path != ""}
    return {
        path: len(inspect.signature(layer.forward).parameters)
        for path, layer in layers.items()
        if layer is not None and not isinstance(layer, RemoteModule)
    }


def places_of(checkpoint: Path, tree: ModuleTree, modules: bool = True) -> list[Place]:
    """Return the locations of a model, in the order in which a block has to ask for them; called on every rank.

    Args:
        checkpoint: the model.
        tree: the engine's modules.
        modules: whether the modules are measured, beside the canonical values.
    """
    found = list(_canonical(checkpoint, tree))
    if modules:
        found += _raw(checkpoint, Modules.of(tree))
    return sorted(found, key=lambda place: place.order)


def _canonical(checkpoint: Path, tree: ModuleTree) -> Iterator[Place]:
    known = {at.path for at in locations(checkpoint, canonical=True)} - {LOGITS}
    names: dict[str, set[str]] = {}  # of each block
    for path in known:
        if path.startswith("blocks."):
            _, i, name = path.split(".", 2)
            names.setdefault(i, set()).add(name)
    somewhere = set().union(*names.values())
    absent = {f"blocks.0.{name}" for name in MAY_BE_ABSENT if name not in somewhere}
    lacking = {
        f"blocks.{i}.{name}": f" ({_without(name, here)})"
        for i, here in names.items()
        for name in (*MAY_BE_ABSENT, *SIDES)
        if name in somewhere and name not in here
    }
    for path in sorted({*known, *absent, *lacking}):
        above, _, name = path.rpartition(".")
        node = tree.find(above)
        assert node is not None
        view = node.views[name]
        truth = (lambda truth, step, path=path: truth.canonical.value(path, step=step)) if path in known else None
        order = _order(tree, view.node.path, view.kind)
        row = re.sub(r"blocks\.\d+", "blocks[i]", path)
        yield Place(f"{row}{lacking.get(path, '')}", expression(path), order, truth)
    yield Place("unembed.output", "model.unembed.output", _order(tree, LOGITS, "output"), _logits)


def _without(name: str, here: set[str]) -> str:
    """Return why a block has no value that others have, from the values that it has."""
    if "attn_in" not in here:
        return "an MLP alone"
    if name.startswith("attn"):
        return "no attention"
    return "a mixture" if "mlp.experts" in here else "no MLP"


def _logits(truth: Truth, step: int) -> torch.Tensor:
    return truth.raw.logits[step]


def _order(tree: ModuleTree, path: str, kind: str) -> int:
    return tree.order_of(path, kind) if tree.runs(path, kind) else -1


def _raw(checkpoint: Path, modules: Modules) -> Iterator[Place]:
    """Every module outside of the layers, those of the second layer, and of the first what is different there."""
    listed = {(at.path, at.kind): at for at in locations(checkpoint)}
    tree = modules.tree
    for path in tree.nodes:
        second = re.sub(r"\.0(?=\.|$)", ".1", path)
        if second != path and second in tree.nodes and not path.endswith(".0.input_layernorm"):
            continue
        for kind in ("input", "output"):
            yield from _module(modules, path, kind, listed.get((path, kind)))
    yield Place("raw: model.logits.output", "model.logits.output", _order(tree, LOGITS, "output"), _logits)
    yield Place("raw: model.samples.output", "model.samples.output", _order(tree, SAMPLES, "output"), _sampled)


def _sampled(truth: Truth, step: int) -> torch.Tensor:
    return torch.tensor([truth.raw.tokens[step : step + 1]])


def _module(modules: Modules, path: str, kind: str, listed: Location | None) -> Iterator[Place]:
    tree = modules.tree
    name = expression(path) if path else "model"
    row, order = f"raw: {name}.{kind}", _order(tree, path, kind)
    if not tree.runs(path, kind):
        yield Place(row, f"{name}.{kind}", order, None, path)
        return
    if listed is not None:
        yield Place(row, f"{name}.{kind}", order, lambda truth, step: truth.raw.value(path, kind, step), path)
        if kind == "output" or listed.sharding != "norm":  # a norm may be given what it adds to as well
            return
    expected = _given(modules, path) if kind == "input" else _returned(modules, path)
    if kind == "output":
        yield Place(row, f"{name}.output", order, expected, path)
    else:
        yield Place(f"{row}s", f"[*{name}.inputs[0], *{name}.inputs[1].values()]", order, expected, path)


def _given(modules: Modules, path: str) -> Expected:
    """What a module is given, all of it, where that is more than one tensor that the oracle lists."""
    tree, are = modules.tree, modules.are
    parent, _, name = path.rpartition(".")
    layer = _layer_of(tree, path)
    if path == "" or _holds_layers(tree, path):
        return lambda truth, step: [truth.ids(step), truth.positions(step), None, None]
    if are(path, VocabParallelEmbedding):
        return lambda truth, step: [truth.ids(step)]
    if are(path, nn.Embedding):
        return lambda truth, step: [truth.positions(step)]
    if path == layer:
        return _layer_given(modules, path)
    if are(path, Attention):
        heads = f"blocks.{_index(layer)}.attn"
        return lambda truth, step: [truth.flat(f"{heads}.{one}", step) for one in ("rot_q", "rot_k", "v")]
    if any(are(child.path, Attention) for child in tree.nodes[path].children.values()):
        return _attention_given(modules, layer)
    if are(path, RotaryEmbedding):
        return lambda truth, step: [
            truth.positions(step),
            *(_unrotated(truth, parent, _index(layer), one, step) for one in "qk"),
        ]
    if are(path, MoERunner):
        return lambda truth, step: _experts_given(tree, parent, truth, step)
    if name in ACTIVATIONS:
        return lambda truth, step: [_before_activation(truth, parent, _index(layer), step)]
    return lambda truth, step: _norm_given(truth, path, step)


def _unrotated(truth: Truth, attention: str, layer: int, one: str, step: int) -> torch.Tensor:
    """Queries or keys before they are rotated: as the norm of them gave them where there is one, else as projected."""
    norm = f"{attention}.{one}_norm"
    if (norm, "output", step) not in truth.raw.values:
        return truth.flat(f"blocks.{layer}.attn.{one}", step)
    value: torch.Tensor = truth.raw.value(norm, step=step)
    return value.flatten(-2) if value.dim() > 2 else value


def _before_activation(truth: Truth, mlp: str, layer: int, step: int) -> torch.Tensor:
    merged = f"{mlp}.gate_up_proj"
    if (merged, "output", step) in truth.raw.values:
        return truth.raw.value(merged, step=step)[0]
    return truth.canonical.value(f"blocks.{layer}.mlp.up", step=step)


def _layer_given(modules: Modules, path: str) -> Expected:
    """Positions first, where vLLM passes them; the stream as one tensor or as the pair that the layer before returned, as far as
    the layer takes it."""
    before = f"{path.rpartition('.')[0]}.{_index(path) - 1}"

    def given(truth: Truth, step: int) -> list[Any]:
        stream = truth.raw.value(before, step=step)
        given = [*_positions(modules, truth, step), *(stream if isinstance(stream, tuple) else [stream])]
        return given[: modules.takes[path]]

    return given


def _attention_given(modules: Modules, layer: str) -> Expected:
    [norm] = [name for name in FIRST_NORMS if name in modules.tree.nodes[layer].children]

    def given(truth: Truth, step: int) -> list[Any]:
        normalised = truth.raw.value(f"{layer}.{norm}", step=step)
        if isinstance(normalised, tuple):
            normalised = normalised[0]
        return [*_positions(modules, truth, step), normalised]

    return given


def _positions(modules: Modules, truth: Truth, step: int) -> list[torch.Tensor]:
    """Layers that rotate are given the positions; those of the others were embedded."""
    learned = any(modules.are(path, nn.Embedding) for path in modules.kinds)
    return [] if learned else [truth.positions(step)]


def _experts_given(tree: ModuleTree, block: str, truth: Truth, step: int) -> list[Any]:
    """Rows, and the router's logits; rows again where the experts call their router themselves."""
    rows = truth.raw.value(block, "input", step)
    inside = tree.order_of(f"{block}.gate", "input") > tree.order_of(f"{block}.experts", "input")
    return [rows, rows if inside else truth.raw.value(f"{block}.gate", step=step)[0]]


def _norm_given(truth: Truth, path: str, step: int) -> list[Any]:
    """What is added and what it is added to, of a norm that returns their sum too; the one argument of another."""
    added, made = truth.raw.value(path, "input", step), truth.raw.value(path, "output", step)
    return [added, made[1] - added] if isinstance(made, tuple) else [added]


def _returned(modules: Modules, path: str) -> Expected:
    """What a module returns, where the oracle has it under another name."""
    tree = modules.tree
    parent, _, name = path.rpartition(".")
    if path == "" or _holds_layers(tree, path):
        return lambda truth, step: truth.canonical.value("final_norm.output", step=step)
    layer = _layer_of(tree, path)
    if modules.are(path, RotaryEmbedding):
        heads = f"blocks.{_index(layer)}.attn"
        return lambda truth, step: tuple(truth.flat(f"{heads}.{one}", step) for one in ("rot_q", "rot_k"))
    if modules.are(path, MoERunner):
        return lambda truth, step: truth.raw.value(parent, step=step)
    if name in ACTIVATIONS:
        return lambda truth, step: truth.canonical.value(f"blocks.{_index(layer)}.mlp.act", step=step)
    raise AssertionError(f"nothing says what {path}.output must be")


def _holds_layers(tree: ModuleTree, path: str) -> bool:
    return any(isinstance(child.module, nn.ModuleList) for child in tree.nodes[path].children.values())


def _layer_of(tree: ModuleTree, path: str) -> str:
    """Return the path of the decoder layer that a module is in, "" if it is in none."""
    while path and not isinstance(tree.nodes[path.rpartition(".")[0]].layer, nn.ModuleList):
        path = path.rpartition(".")[0]
    return path


def _index(layer: str) -> int:
    return int(layer.rpartition(".")[2])
