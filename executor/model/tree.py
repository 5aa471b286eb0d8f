"""The served model's modules as blocks see them: paths, locations and execution order.

The order is recorded once, after the model has warmed up, from a dummy step on every rank. The order tells three kinds of
locations apart: a location that has already passed (out of order), a location that no forward reaches (a container, or a module
whose weights are used without a call), and a location that runs more than once in a step.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.model_executor.layers.linear import QKVParallelLinear

from executor.core.errors import Refusal
from executor.model.layouts import Layouts
from executor.model.lora import layer_of, modules_of
from executor.model.node import Node
from executor.model.remote_module import names_of
from interpose.contract.idioms import OF_MODELS
from interpose.contract.names import written
from interpose.v1 import trace_pb2 as pb

LOGITS = "logits"
SAMPLES = "samples"
PSEUDO = (LOGITS, SAMPLES)
_AFTER_FORWARD = 1 << 30
_ORDER = ("_batched", "_order", "_repeated", "_callers", "_stages", "_stage")
_TRANSFORMERS_BACKEND = "vllm.model_executor.models.transformers."


class ModuleTree:
    """The modules of one worker's model.

    Args:
        model: the model this worker holds.
        tp_size: the tensor-parallel size.

    Attributes:
        device: where the model computes.
        axes: whether the model has several positions for each token, [axes, rows], as for pictures.
    """

    def __init__(self, model: torch.nn.Module, tp_size: int) -> None:
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.axes = False
        self.nodes: dict[str, Node] = {}
        self.paths: dict[torch.nn.Module, str] = {}
        # Modules of transformers itself work on [1, tokens, …]: what looks like rows there is none, but in a step of one row.
        self._batched = any(base.__module__.startswith(_TRANSFORMERS_BACKEND) for base in type(model).__mro__)
        for path, module in modules_of(model):
            node = Node(path, module, Layouts(path or "model", layer_of(module), tp_size))
            self.nodes[path] = node
            self.paths[module] = path
        self._link()
        for node in self.nodes.values():
            modules = [child.layer for child in node.children.values()]
            projection = next((module for module in modules if isinstance(module, QKVParallelLinear)), None)
            for child in node.children.values():
                child.layouts.projection = projection
        self.root = self.nodes[""]
        self.pseudo = {name: Node(name, None, Layouts(name, torch.nn.Identity(), 1)) for name in PSEUDO}
        self.pseudo[LOGITS].adapted = any(isinstance(module, LogitsProcessorWithLoRA) for module in self.paths)
        self._order: dict[tuple[str, str], int] = {
            (LOGITS, "output"): _AFTER_FORWARD,
            (SAMPLES, "output"): _AFTER_FORWARD + 1,
        }
        self._repeated: set[str] = set()
        self._callers: dict[str, set[str]] = {}
        self._stages: dict[tuple[str, str], int] = {}  # where several stages share the model
        self._stage = 0

    def _link(self) -> None:
        """Give every node its children."""
        for node in self.nodes.values():
            node.children.clear()
        for path, node in self.nodes.items():
            if path:
                parent, _, name = path.rpartition(".")
                self.nodes[parent].children[name] = node

    def record_order(self, run: Callable[[], object]) -> list[tuple[str, str]]:
        """Run a forward once; record and return the order in which modules begin and end."""
        events: list[tuple[str, str]] = []
        running: list[str] = []

        def note(kind: str) -> Callable[..., None]:
            def hook(module: torch.nn.Module, *_: object) -> None:
                path = self.paths.get(module)
                if path is None:
                    return
                events.append((path, kind))
                if kind == "input":
                    self._callers.setdefault(path, set()).update(running)
                    running.append(path)
                else:
                    running.pop()

            return hook

        before = torch.nn.modules.module.register_module_forward_pre_hook(note("input"))
        after = torch.nn.modules.module.register_module_forward_hook(note("output"))
        try:
            run()
        finally:
            before.remove()
            after.remove()
        self._note_order(events)
        return events

    def around(self, path: str) -> set[str]:
        """Return the modules that may be running when a module is called.

        They are the modules that contain it and the modules that call it. The two differ: the experts of a mixture call the
        router and the shared experts, which are parts of the layer's MLP.
        """
        around = self._callers.get(path, set()).copy()
        while path:
            path = path.rpartition(".")[0]
            around.add(path)
        return around

    def _note_order(self, events: Iterable[tuple[str, str]]) -> None:
        for i, event in enumerate(events):
            if event in self._order:
                self._repeated.add(event[0])
            else:
                self._order[event] = 4 * i  # leaves places before each for locations that are no module's own

    def join(self, nodes: dict[str, Node], events: Sequence[Sequence[tuple[str, str]]], stage: int) -> None:
        """Become the tree of a model that several pipeline stages share.

        A module with parts on several stages, as the model itself, is given its input on the first and has its output on the
        last of them. Any other that several stages run counts as one that runs several times.

        Args:
            nodes: the nodes of all stages, in the order of the model.
            events: what each stage recorded of the order of its modules.
            stage: this one.
        """
        self.nodes, self._stage = nodes, stage
        self._link()
        for number, recorded in enumerate(events):
            for path, kind in recorded:
                if kind == "output" or (path, kind) not in self._stages:
                    self._stages[path, kind] = number
        ran = [(number, event) for number, recorded in enumerate(events) for event in recorded]
        self._order = {(path, "output"): self._order[path, "output"] for path in PSEUDO}
        self._repeated = {
            path
            for number, (path, _) in ran
            if self._stages[path, "input"] != number and not self._ran_below(path, (event for _, event in ran))
        }
        self._note_order(event for number, event in ran if self._stages[event] == number)
        self._stages[LOGITS, "output"] = self._stages[SAMPLES, "output"] = len(events) - 1

    def order_facts(self) -> dict[str, Any]:
        """Return all that the tree knows of the order of its locations, as data."""
        return {name: getattr(self, name) for name in _ORDER}

    def take_order(self, facts: dict[str, Any]) -> None:
        """Know of the order what `order_facts` of another tree of the same model gave."""
        for name in _ORDER:
            setattr(self, name, facts[name])

    def here(self, path: str, kind: str) -> bool:
        """Return whether this stage has a location."""
        return self._stages.get((path, kind), self._stage) == self._stage

    def stage_of(self, node: Node) -> int:
        """Return the stage that runs a module.

        For a module that no stage runs, it is the first stage that could.
        """
        if node.path in PSEUDO:
            return self._stages[node.path, "output"]
        found = self._stages.get((node.path, "output"))
        return node.stage if found is None else found

    def find(self, path: str) -> Node | None:
        """Return the node at a path: a module, a pseudo location, or a canonical node."""
        found = self.nodes.get(path) or self.pseudo.get(path)
        if found is None:
            head, *rest = path.split(".")
            found = self.pseudo.get(head)
            for name in rest:
                found = found.children.get(name) if found is not None else None
        return found

    def place_before(self, path: str, kind: str, *new: str) -> None:
        """Give a module up to three further kinds of location, just before an existing kind.

        Args:
            path: the module.
            kind: the existing kind.
            new: the further kinds, in their order.
        """
        for before, one in enumerate(reversed(new), 1):
            self._order[(path, one)] = self._order[(path, kind)] - before
            if (path, kind) in self._stages:
                self._stages[(path, one)] = self._stages[(path, kind)]

    def runs(self, path: str, kind: str = "output") -> bool:
        """Return whether a forward reaches a location exactly once, with rows as values."""
        return (path, kind) in self._order and path not in self._repeated and not self._in_batch(path)

    def _in_batch(self, path: str) -> bool:
        """Return whether a module's values have one batch dimension for all requests."""
        return self._batched and path != "" and path not in self.pseudo

    def execution_order(self) -> list[str]:
        """The paths of the modules in the order in which the forward pass runs them."""
        begun = [(i, path) for (path, kind), i in self._order.items() if kind == "input"]
        return [path for _, path in sorted(begun)]

    def order_of(self, path: str, kind: str) -> int:
        """Return the place of a location in a step.

        Raises:
            Refusal: UNKNOWN_LOCATION for a location no forward reaches, one that runs more than once in a step, or one whose
                values are not rows.
        """
        where = f"{path}.{kind}" if path else kind
        if self._in_batch(path):
            raise self._refuse(
                f"vLLM runs this model through its Transformers backend, whose modules do not hold requests as rows, so {where} "
                "cannot be given; read model.output, what the unembedding is given, or model.logits.output",
                where,
            )
        if path in self._repeated:
            raise self._refuse(
                f"{path} runs more than once in a step (several modules share it), so {where} is ambiguous; read the "
                "modules around it instead",
                where,
            )
        position = self._order.get((path, kind))
        if position is not None:
            return position
        node = self.nodes.get(path) or self.pseudo.get(path)
        if node is not None and node.module is None:
            raise self._refuse(f"{path} has an output only; read {path}.output", where)
        if path == "" or (node is not None and node.children and self._ran_below(path, self._order)):
            last = self._last_below(path)
            hint = f"; read {last}.output, the last module in it that does" if last else ""
            raise self._refuse(f"{path or 'the model'} is not called as a module of its own{hint}", where)
        raise self._refuse(
            f"{path} is never called in the forward pass: the engine uses its weights directly. For the unembedding read "
            "model.logits.output",
            where,
        )

    @staticmethod
    def _ran_below(path: str, events: Iterable[tuple[str, str]]) -> bool:
        return any(p != path and (not path or p.startswith(path + ".")) for p, _ in events)

    def _last_below(self, path: str) -> str:
        prefix = path + "." if path else ""
        ended = [
            (i, p)
            for (p, kind), i in self._order.items()
            if kind == "output" and p.startswith(prefix) and p not in PSEUDO
        ]
        return max(ended)[1] if ended else ""

    @staticmethod
    def _refuse(message: str, where: str) -> Refusal:
        return Refusal(pb.ERROR_CODE_UNKNOWN_LOCATION, message, location=where)

    def unknown(self, node: Node, name: str) -> Refusal:
        """Return the error for a child that does not exist, with similar names."""
        names = [*node.children, *node.views, *(self.pseudo if node is self.root else ())]
        names += names_of(node.layer) if node.layer is not None else []
        location = f"{node.path}.{name}" if node.path else name
        if name in OF_MODELS and not node.title:
            message = f"{written(node.path)} has no {name!r}: {OF_MODELS[name]}"
            return Refusal(pb.ERROR_CODE_UNKNOWN_LOCATION, message, location=location)
        if name.lstrip("-").isdigit() and node.children and all(child.isdigit() for child in node.children):
            message = f"{node.path}[{name}] does not exist: it has {len(node.children)} items"
            near: tuple[str, ...] = ()
        else:
            near = tuple(difflib.get_close_matches(name, names, n=3, cutoff=0.4))
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            if node.title and not near:
                hint = f"; it has {', '.join(names)}"
            message = f"{node.path or 'the model'} has no {'value' if node.title else 'module'} {name!r}{hint}"
        return Refusal(
            pb.ERROR_CODE_UNKNOWN_LOCATION,
            message,
            location=location,
            suggestions=near,
        )
