"""The module tree of a served model as data: nodes, built from the server's description."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from interpose.contract import hook_names
from interpose.contract.display import code, escaped, folded
from interpose.contract.errors import UnknownLocation, did_you_mean
from interpose.contract.idioms import OF_MODELS
from interpose.contract.names import not_a_value, of_tensors, written
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
    "serves",
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
    refused: dict[str, str] = field(default_factory=dict)  # why it lacks a value, by the value's name

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

    @property
    def lacking(self) -> dict[str, str]:
        """The canonical values that it lacks, with the reasons."""
        return self.refused if self.canonical else {}

    def child(self, key: str | int) -> Node:
        """Return a child by name, or by number as in a list.

        Raises:
            UnknownLocation: there is no such child; the error suggests similar names.
        """
        if isinstance(key, int):
            return self._item(key)
        if self.canonical and key in self.refused:
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
        if name.startswith("hook_"):
            instead = hook_names.written(name)
            hint = (
                f"the value is {instead}" if instead else hook_names.reason(name) or "print(model.blocks) shows values"
            )
            return UnknownLocation(f"{written(self.path)} has no {name!r}: {hint}", location=location)
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
        rows += [f"<div>({escaped(name)}): {escaped(_refused(why))}</div>" for name, why in self.lacking.items()]
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
        entries += [(name, [_refused(why)]) for name, why in self.lacking.items()]
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
            root.not_applied, root.refused = module.not_applied, _raw_refusals(module)
            continue
        parent, _, name = module.path.rpartition(".")
        node = Node(module.path, module.class_name, module.detail, parameters, not_applied=module.not_applied)
        node.refused = _raw_refusals(module)
        nodes[module.path] = node
        nodes.get(parent, root).children[name] = node
    root.pseudo = {name: Node(name, "Location") for name in PSEUDO if name not in root.children}
    _add_canonical(root, description.canonical)
    return root


def _raw_refusals(module: model_pb2.Module) -> dict[str, str]:
    """Return why values of a module cannot be given, by the value's name."""
    whys = {"output": module.output_refused, "input": module.input_refused, "inputs": module.input_refused}
    return {name: why for name, why in whys.items() if why}


def _refused(why: str) -> str:
    return f"refused: {why}"


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
