"""The served model's modules as blocks see them: paths, which of them can be asked, and in what order they run.

The order is recorded once, after the model has warmed up, from a dummy step on every rank. It tells three things apart
that would otherwise look alike: a location that has passed already (out of order), one that no forward reaches (a
container, or a module whose weights are used without calling it), and one that runs more than once in a step.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from executor.control import Refusal
from executor.shards import Layouts
from interpose.v1 import trace_pb2 as pb

LOGITS = "logits"
SAMPLES = "samples"
PSEUDO = (LOGITS, SAMPLES)
_AFTER_FORWARD = 1 << 30


@dataclass
class Node:
    """One module: its path, its torch module, and its children by name."""

    path: str
    module: torch.nn.Module | None
    layouts: Layouts
    children: dict[str, Node] = field(default_factory=dict)


class ModuleTree:
    """The modules of one worker's model.

    Args:
        model: the model this worker holds.
        tp_size: the tensor-parallel size.
    """

    def __init__(self, model: torch.nn.Module, tp_size: int) -> None:
        self.nodes: dict[str, Node] = {}
        self.paths: dict[torch.nn.Module, str] = {}
        for path, module in model.named_modules():
            node = Node(path, module, Layouts(path or "model", module, tp_size))
            self.nodes[path] = node
            self.paths[module] = path
            if path:
                parent, _, name = path.rpartition(".")
                self.nodes[parent].children[name] = node
        self.root = self.nodes[""]
        self.pseudo = {name: Node(name, None, Layouts(name, torch.nn.Identity(), 1)) for name in PSEUDO}
        self._order: dict[tuple[str, str], int] = {
            (LOGITS, "output"): _AFTER_FORWARD,
            (SAMPLES, "output"): _AFTER_FORWARD + 1,
        }
        self._repeated: set[str] = set()

    def record_order(self, run: Callable[[], object]) -> None:
        """Run a forward once and note the order in which modules begin and end."""
        events: list[tuple[str, str]] = []

        def note(kind: str) -> Callable[..., None]:
            def hook(module: torch.nn.Module, *_: object) -> None:
                path = self.paths.get(module)
                if path is not None:
                    events.append((path, kind))

            return hook

        before = torch.nn.modules.module.register_module_forward_pre_hook(note("input"))
        after = torch.nn.modules.module.register_module_forward_hook(note("output"))
        try:
            run()
        finally:
            before.remove()
            after.remove()
        for i, event in enumerate(events):
            if event in self._order:
                self._repeated.add(event[0])
            else:
                self._order[event] = i

    def execution_order(self) -> list[str]:
        """Module paths in the order the forward pass runs them."""
        begun = [(i, path) for (path, kind), i in self._order.items() if kind == "input"]
        return [path for _, path in sorted(begun)]

    def order_of(self, path: str, kind: str) -> int:
        """Return the place of a location in a step.

        Raises:
            Refusal: UNKNOWN_LOCATION for a location no forward reaches, or one that runs more than once in a step.
        """
        where = f"{path}.{kind}" if path else kind
        if path in self._repeated:
            raise self._refuse(
                f"{path} runs more than once in a step (several modules share it), so {where} is ambiguous; read the "
                "modules around it instead",
                where,
            )
        place = self._order.get((path, kind))
        if place is not None:
            return place
        node = self.nodes.get(path) or self.pseudo.get(path)
        if node is not None and node.module is None:
            raise self._refuse(f"{path} has an output only; read {path}.output", where)
        if path == "" or (node is not None and node.children and self._ran_below(path)):
            last = self._last_below(path)
            hint = f"; read {last}.output, the last module in it that does" if last else ""
            raise self._refuse(f"{path or 'the model'} is not called as a module of its own{hint}", where)
        raise self._refuse(
            f"{path} is never called in the forward pass: the engine uses its weights directly. For the unembedding read "
            "model.logits.output",
            where,
        )

    def _ran_below(self, path: str) -> bool:
        return any(p.startswith(path + ".") for p, _ in self._order)

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
        """The error for a child that does not exist, with its near misses."""
        names = list(node.children) + (list(PSEUDO) if node is self.root else [])
        if name.lstrip("-").isdigit() and node.children and all(child.isdigit() for child in node.children):
            message = f"{node.path}[{name}] does not exist: it has {len(node.children)} items"
            near: tuple[str, ...] = ()
        else:
            near = tuple(difflib.get_close_matches(name, names, n=3, cutoff=0.4))
            message = f"{node.path or 'the model'} has no module {name!r}" + (
                f"; did you mean {', '.join(near)}?" if near else ""
            )
        return Refusal(
            pb.ERROR_CODE_UNKNOWN_LOCATION,
            message,
            location=f"{node.path}.{name}" if node.path else name,
            suggestions=near,
        )
