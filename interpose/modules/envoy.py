"""The served model's module tree in the notebook: nodes with data, and envoys with names.

An envoy is the name of a module and holds no values. An envoy that a block uses travels as its path, and the worker replaces
it by an envoy with values. For an unknown name, the error suggests similar names.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, overload

from interpose.contract.display import code, escaped, folded
from interpose.contract.errors import InvalidArgument, UnknownLocation, did_you_mean
from interpose.contract.idioms import OF_MODELS
from interpose.contract.names import Name, not_a_value, not_assigned, of_tensors, written
from interpose.v1 import model_pb2, value_pb2

MODULE_WORDS = ("output", "input", "inputs", "next", "skip", "path", "save")
CANONICAL_WORDS = ("next", "path", "save")
MODEL_WORDS = (
    "trace",
    "generate",
    "tokenizer",
    "config",
    "generation_config",
    "max_model_len",
    "edit",
    "edits",
    "clear_edits",
    "scan",
    "explain",
    "name",
)
PSEUDO = ("logits", "samples")
_CUTOFF = 0.5


@dataclass(eq=False)
class Node:
    """One module: its path ("" is the model), its printed form, and its children by name.

    Size: data: each field is a field of the model's description.
    """

    path: str
    class_name: str
    detail: str = ""
    parameters: tuple[str, ...] = ()  # e.g. "weight: float32[96, 64]"
    children: dict[str, Node] = field(default_factory=dict)
    pseudo: dict[str, Node] = field(default_factory=dict)  # locations of the model that are not modules
    not_applied: str = ""  # the reason why a block cannot apply the module; "": a block can
    model: str = ""  # of the root: the model's identity, equal for all its descriptions
    canonical: bool = False  # a node of canonical values, with the same names for every architecture
    values: dict[str, str] = field(default_factory=dict)  # of a canonical node: the shapes of its values
    refused: dict[str, str] = field(default_factory=dict)  # of a canonical node: why it lacks a value

    @property
    def words(self) -> tuple[str, ...]:
        """Names of the envoy that are not modules."""
        if self.canonical:
            return (*CANONICAL_WORDS, *self.values)
        return MODULE_WORDS if self.path else MODULE_WORDS + MODEL_WORDS

    @property
    def usable(self) -> list[str]:
        """Names of the envoy that are not modules, without names that are errors for this module."""
        refused = {"save"}
        if self.class_name == "ModuleList":
            refused |= {"output", "input", "inputs", "next", "skip"}  # a list is never called
        if self.path in PSEUDO:
            refused |= {"input", "inputs", "skip"}
        return [name for name in self.words if name not in refused]

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the module's parameters and buffers."""
        return tuple(parameter.partition(":")[0] for parameter in self.parameters)

    @property
    def shown(self) -> str:
        """The path in an error message."""
        return self.path or "the model"

    def child(self, key: str | int) -> Node:
        """Return a child by name, or by number as in a list.

        Raises:
            UnknownLocation: there is no such child; the error suggests similar names.
        """
        if isinstance(key, int):
            return self._item(key)
        if key in self.refused:
            location = f"{self.path}.{key}"
            raise UnknownLocation(f"{location} cannot be given: {self.refused[key]}", location=location)
        found = self.children.get(key) or self.pseudo.get(key)
        if found is None:
            raise self._unknown(key)
        return found

    @property
    def items(self) -> list[Node]:
        """The numbered children, in order."""
        return [child for name, child in self.children.items() if name.isdecimal()]

    def misused(self, used: str, then: str = "") -> str:
        """Return the message for a name that is used as a value.

        The arguments are as for `interpose.contract.names.not_a_value`.
        """
        return not_a_value(self.path, used, tuple(self.values), bool(self.items), then)

    def _item(self, index: int) -> Node:
        items = self.items
        if not items:
            raise UnknownLocation(self.misused("indexed", f"[{index}]"), location=self.path)
        # Numbers are names, and may have gaps. A description has the layers of all pipeline stages.
        found = self.children.get(str(index)) if index >= 0 else (items[index] if -index <= len(items) else None)
        if found is None:
            last = items[-1].path.rpartition(".")[2]
            raise UnknownLocation(
                f"{self.path}[{index}] does not exist: {self.path} has {len(items)} modules, 0 to {last}",
                location=f"{self.path}[{index}]",
                suggestions=[f"{self.path}[{last}]"],
            )
        return found

    def _unknown(self, name: str) -> UnknownLocation:
        location = f"{self.path}.{name}" if self.path else name
        if name in OF_MODELS and not self.canonical:
            return UnknownLocation(f"{written(self.path)} has no {name!r}: {OF_MODELS[name]}", location=location)
        if self.path and of_tensors(name):
            return UnknownLocation(self.misused(f"asked for {name!r}", f".{name}"), location=location)
        known = [*self.children, *self.pseudo, *self.weights, *self.words]
        near = difflib.get_close_matches(name, known, n=3, cutoff=_CUTOFF)
        deeper = [node.path for node in self.walk() if node is not self and node.path.rpartition(".")[2] == name]
        deeper += [f"{node.path}.{name}" for node in self.walk() if name in node.values]
        suggestions = [*near, *deeper[: 3 - len(near)]]
        has = ", ".join([*self.values, *_ranges(list(self.children))]) or "no modules of its own"
        message = f"{self.shown} ({self.class_name}) has no {'value' if self.canonical else 'module'} {name!r}; "
        message += did_you_mean(suggestions) if suggestions else f"it has {has}"
        return UnknownLocation(message, location=location, suggestions=suggestions)

    def walk(self) -> Iterator[Node]:
        """Iterate over this module and all modules below it, parents first."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def to_html(self, opened: bool = True) -> str:
        """Return the tree as entries that fold; equal numbered children share an entry.

        Args:
            opened: whether the entry of this module shows its children at first.
        """
        return self._html("", opened)

    def _html(self, name: str, opened: bool) -> str:
        head = ", ".join(part for part in (self.detail, *self.parameters) if part)
        title = f"{escaped(name)}{code(self.class_name)} {escaped(head)}"
        rows = [f"<div>({escaped(name)}): {code(shape)}</div>" for name, shape in self.values.items()]
        rows += [f"<div>({escaped(name)}): not in this model</div>" for name in self.refused]
        children = [*self.children.items(), *self.pseudo.items()]
        lines = {name: child.lines() for name, child in children}
        nodes = dict(children)
        for shown, count, _ in _merged(list(lines.items())):
            child = nodes[shown.partition("-")[0] if count > 1 else shown]
            rows.append(child._html(f"({shown}): {f'{count} × ' if count > 1 else ''}", False))
        return folded(title, "".join(rows), opened=opened) if rows else f"<div>{title}</div>"

    def lines(self) -> list[str]:
        """Return the tree in the form of torch; equal numbered children share an entry."""
        head = ", ".join(part for part in (self.detail, *self.parameters) if part)
        entries = [(name, [shape]) for name, shape in self.values.items()]
        entries += [(name, ["not in this model"]) for name in self.refused]
        for name, child in [*self.children.items(), *self.pseudo.items()]:
            entries.append((name, child.lines()))
        if not entries:
            return [f"{self.class_name}({head})"]
        lines = [f"{self.class_name}({head}" if head else f"{self.class_name}("]
        for name, count, body in _merged(entries):
            lines.append(f"  ({name}): {f'{count} x ' if count > 1 else ''}{body[0]}")
            lines += [f"  {line}" for line in body[1:]]
        return [*lines, ")"]


def _merged(entries: list[tuple[str, list[str]]]) -> Iterator[tuple[str, int, list[str]]]:
    start = 0
    for stop in range(1, len(entries) + 1):
        name, body = entries[start]
        if stop < len(entries) and name.isdecimal() and entries[stop][0].isdecimal() and entries[stop][1] == body:
            continue
        last = entries[stop - 1][0]
        yield (name if stop - start == 1 else f"{name}-{last}"), stop - start, body
        start = stop


def _ranges(names: list[str]) -> list[str]:
    """Return the names, with the numbers replaced by one range."""
    numbers = [name for name in names if name.isdecimal()]
    others = [name for name in names if not name.isdecimal()]
    return others + ([f"[{numbers[0]}] to [{numbers[-1]}]"] if len(numbers) > 1 else numbers)


def tree_of(description: model_pb2.ModelDescription) -> Node:
    """Return the model's node, built from the server's description."""
    root = Node("", description.class_name or "Model", model=f"{description.name} {description.digest}")
    nodes = {"": root}
    for module in description.modules:
        parameters = tuple(_parameter(parameter) for parameter in module.parameters)
        if not module.path:
            root.class_name, root.detail, root.parameters = module.class_name, module.detail, parameters
            root.not_applied = module.not_applied
            continue
        parent, _, name = module.path.rpartition(".")
        node = Node(module.path, module.class_name, module.detail, parameters, not_applied=module.not_applied)
        nodes[module.path] = node
        nodes.get(parent, root).children[name] = node
    root.pseudo = {name: Node(name, "Location") for name in PSEUDO if name not in root.children}
    _add_canonical(root, description.canonical)
    return root


def _add_canonical(root: Node, described: Iterable[model_pb2.CanonicalNode]) -> None:
    nodes: dict[str, Node] = {}
    for one in described:
        node = nodes[one.path] = Node(one.path, one.title, canonical=True, not_applied=one.not_applied)
        for value in one.values:
            (node.refused if value.refusal else node.values)[value.name] = value.refusal or value.shape
        parent, _, name = one.path.rpartition(".")
        if parent in nodes:
            nodes[parent].children[name] = node
        elif name not in root.children:
            root.pseudo[name] = node


def _parameter(parameter: model_pb2.Parameter) -> str:
    dtype = value_pb2.DType.Name(parameter.dtype).removeprefix("DTYPE_").lower()
    return f"{parameter.name}: {dtype}{list(parameter.shape)}"


class Envoy(Name):
    """The name of a module of the served model; its values exist only inside a block.

    Raises:
        UnknownLocation: the module has no child of that name or number. The error is an AttributeError too.
        InvalidArgument: code outside a block asked for a value.
    """

    __slots__ = ("_node", "_tree")
    _node: Node
    _tree: Node
    if TYPE_CHECKING:  # values, which code in a block computes with; every other name is an envoy's
        resid_pre: Any
        resid_mid: Any
        resid_post: Any
        q: Any
        k: Any
        v: Any
        rot_q: Any
        rot_k: Any
        pattern: Any
        z: Any
        gate: Any
        up: Any
        act: Any
        router_logits: Any
        experts: Any
        expert_weights: Any
        weight: Any
        bias: Any

    def __init__(self, node: Node, tree: Node) -> None:
        object.__setattr__(self, "_node", node)
        object.__setattr__(self, "_tree", tree)

    @property
    def path(self) -> str:
        """The module's path, e.g. "model.layers.2.mlp"; "" for the model itself."""
        return self._node.path

    @property
    def output(self) -> Any:
        """The module's output; inside a block only."""
        raise self._outside("output")

    @property
    def input(self) -> Any:
        """The module's first positional argument; inside a block only."""
        raise self._outside("input")

    @property
    def inputs(self) -> Any:
        """The module's arguments as `(args, kwargs)`; inside a block only."""
        raise self._outside("inputs")

    def next(self) -> Any:
        """The module in the next generation step; inside a block only."""
        raise self._outside("next()")

    def skip(self, value: Any) -> Any:
        """Skip the module for this request, with `value` as its output; inside a block only.

        `value` has the form of the module's output. The block goes on at the module's output. A skipped module with attention
        stores no keys and values for the step, so the block must skip it in every later step too.
        """
        raise self._outside("skip(value)")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the module to values: `model.lm_head(model.model.norm(h))`; inside a block only.

        Arguments and result have their full shapes with any tensor-parallel size, and any number of rows. The result has the
        form of the module's `.output`. `model.logits(h)` is the unembedding with the model's own scale and soft cap.
        """
        raise self._outside("(…)", dot="")

    def _outside(self, what: str, dot: str = ".") -> InvalidArgument:
        spelled = f"{self.path or 'model'}{dot}{what}"
        return InvalidArgument(
            f"{spelled} exists only while the model runs: use it inside `with model.trace(prompt):`, and keep what you want "
            "after the block with .save()",
            location=self.path,
        )

    def __getattr__(self, name: str) -> Envoy:
        if name.startswith("_"):  # notebooks, copy and pickle look up such names
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in self._node.values or name in self._node.weights:
            raise self._outside(name)
        return Envoy(self._node.child(name), self._tree)

    def __setattr__(self, name: str, value: Any) -> None:
        found = self._node.children.get(name) or self._node.pseudo.get(name)
        if found is not None:
            raise InvalidArgument(
                f"{not_assigned(found.path)}, inside `with model.trace(prompt):`", location=found.path
            )
        raise self._outside(f"{name} = …")

    def _misused(self, used: str, then: str = "") -> NoReturn:
        message = f"{self._node.misused(used, then)}, inside `with model.trace(prompt):`"
        raise InvalidArgument(message, location=self.path)

    @overload
    def __getitem__(self, key: int) -> Envoy: ...
    @overload
    def __getitem__(self, key: slice) -> list[Envoy]: ...
    def __getitem__(self, key: int | slice) -> Envoy | list[Envoy]:
        if not self._node.items and not isinstance(key, int):
            self._misused("indexed", "[…]")
        if isinstance(key, slice):
            return [Envoy(node, self._tree) for node in self._node.items[key]]
        if not hasattr(key, "__index__"):
            raise InvalidArgument(f"{self._node.shown}[{key!r}]: modules are numbered; write a number or a slice")
        return Envoy(self._node.child(key.__index__()), self._tree)

    def __len__(self) -> int:
        if not self._node.items:
            self._misused("measured by len()")
        return len(self._node.items)

    def __iter__(self) -> Iterator[Envoy]:
        if not self._node.items:
            self._misused("gone through")
        return (Envoy(node, self._tree) for node in self._node.items)

    def _same(self, other: object) -> bool:
        return isinstance(other, Envoy) and other._node is self._node

    def __hash__(self) -> int:
        return hash(self._node)

    def __copy__(self) -> Envoy:
        return self

    def __deepcopy__(self, memo: object) -> Envoy:
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a module of a served model belongs to its connection and cannot be pickled; get it from client.model()"
        )

    def __dir__(self) -> list[str]:
        names = [name for name in (*self._node.children, *self._node.pseudo) if name.isidentifier()]
        return sorted({*names, *self._node.usable, *self._node.weights, *_of_objects()})

    def _ipython_key_completions_(self) -> list[int]:
        return [int(node.path.rpartition(".")[2]) for node in self._node.items]

    def _repr_html_(self) -> str:
        return self._node.to_html()

    def __repr__(self) -> str:
        return "\n".join(self._node.lines())


def _of_objects() -> list[str]:
    return [name for name in dir(Envoy) if name.startswith("__") and name.endswith("__")]
