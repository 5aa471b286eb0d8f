"""The values that a block has from before the loop, and that a plan reads.

These are tensors, names of modules, numbers, lists and functions.

Two requests whose environments have one fingerprint run one plan: the plan's constants are the tensors in the order in which
the walk meets them. Anything that could change itself, or give another value in another step, is refused.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from executor.core.text import clip
from executor.model.module_name import ModuleName
from executor.plan.containers import WrittenDict, WrittenList
from executor.plan.eligible import Region, Use, check, grown, uses
from executor.plan.library import is_function, why_not
from executor.plan.record import storage_of
from executor.plan.refuse import ALLOWED_BUILTINS, BUILTINS, Refused
from interpose.capture.rewrite import GUARD, SAVE

_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size)
_DEEPEST = 30
NOWHERE: frozenset[int] = frozenset()

# Returns the source text of a function's code, from its first line on, or None.
SourceOf = Callable[[CodeType], str | None]


@dataclass
class Environment:
    """The values that a region reads, as its plan takes them.

    Attributes:
        fingerprint: stands for everything but the elements of tensors.
        constants: the tensors, in the order of the walk, with the name under which each was met first.
        carried: the tensors that steps leave for the next step, by name.
        written: the lists and dicts that the region adds to, in the order of the walk.
    """

    fingerprint: str = ""
    constants: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    carried: dict[str, torch.Tensor] = field(default_factory=dict)
    written: list[Any] = field(default_factory=list)


def of_every_rank(device: torch.device) -> str:
    """Return a device's name; a rank's own device has the same name on every rank."""
    own = device.index is not None and torch.accelerator.is_available()
    return device.type if own and device.index == torch.accelerator.current_device_index() else str(device)


class Walk:
    """One walk over what a region reads.

    Args:
        region: the region.
        namespace: the block's names.
        source_of: gives the source of the user's functions.
        stand_in: returns what traced code has in the place of a tensor, by its number and name, or by the name it is carried
            under; the tensor itself where nothing is traced.
        here, note: as of `Written`.

    Attributes:
        environment: what was found.
        names: the region's names for the traced code.
        filenames: the files of the functions.
    """

    def __init__(
        self,
        region: Region,
        namespace: Mapping[str, Any],
        source_of: SourceOf,
        stand_in: Callable[[int | str, torch.Tensor], torch.Tensor] = lambda at, tensor: tensor,
        here: Callable[[], int] = lambda: 0,
        note: Callable[[int, Any, Any, int], None] = lambda index, key, value, line: None,
    ) -> None:
        self.environment = Environment()
        self.names: dict[str, Any] = {}
        self.filenames: set[str] = set()
        self._namespace = namespace
        self._bound = {*region.writes, region.target}
        self._source_of = source_of
        self._stand_in = stand_in
        self._here, self._note = here, note
        self._made: dict[int, tuple[Any, Any, int]] = {}  # by id: the value, what stands for it, its number
        self._storages: dict[int, int] = {}
        self._parts: list[object] = [region.digest]
        self._copies: list[tuple[Any, Any, int]] = []  # lists and dicts that nothing may change, with their copies
        self._functions: list[tuple[FunctionType, int]] = []
        self._builtins: Mapping[str, Any] = _builtins_of(namespace)
        self._take(region, namespace)

    def _take(self, region: Region, namespace: Mapping[str, Any]) -> None:
        for use in region.uses:
            self._check_use(use, namespace, set(region.writes))
        for name, line in sorted(region.reads.items()):
            if name in region.tracers:  # the syntax tree was searched for its uses
                self.names[name] = namespace.get(name)
                continue
            if name not in namespace:
                self._builtin(name, line)
                continue
            value = namespace[name]
            carried = name in region.writes
            self._parts.append((name, carried))
            if carried and isinstance(value, torch.Tensor):
                self.environment.carried[name] = value
                self._parts.append(self._form(value, line))
                self.names[name] = self._stand_in(name, value)
            else:
                self.names[name] = self._value(value, name, line, region.grown.get(name, NOWHERE), 0)
        for name in ("__name__", SAVE, GUARD):
            if name in namespace:
                self.names[name] = namespace[name]
        self.names["__builtins__"] = namespace.get("__builtins__", builtins)
        self.environment.fingerprint = hashlib.sha256(repr(self._parts).encode(errors="surrogatepass")).hexdigest()

    def _builtin(self, name: str, line: int) -> None:
        if name in BUILTINS:
            raise Refused(line, *BUILTINS[name])
        if name in (SAVE, GUARD):
            return
        if name not in self._builtins:
            raise Refused(line, f"the name {name} is not bound", "")
        value = self._builtins[name]
        plain = name in ALLOWED_BUILTINS and value is getattr(builtins, name, None)
        if not plain and not (isinstance(value, type) and issubclass(value, Exception)):
            raise Refused(line, f"{name}() is not among the functions that a plan can repeat", "")

    def _check_use(self, use: Use, namespace: Mapping[str, Any], own: set[str]) -> None:
        """Refuse a dotted name of a library that a plan cannot use."""
        name, *rest = use.names
        value = namespace.get(name)
        if name not in own and isinstance(value, ModuleType):
            why = why_not(value, tuple(rest))
            if why:
                raise Refused(use.line, why, "use torch's functions on tensors, or compute the value before the loop")

    def _value(self, value: Any, name: str, line: int, grows: frozenset[int], depth: int) -> Any:
        """Return what traced code has in the place of a value."""
        if depth > _DEEPEST:
            raise Refused(line, f"{name} is nested too deeply", "use a flat list")
        if isinstance(value, _PLAIN):
            if isinstance(value, torch.device):
                self._parts.append(("device", of_every_rank(value)))
            else:
                self._parts.append(repr(value) if not isinstance(value, float) else value.hex())
            return value
        if id(value) in self._made:
            _, made, number = self._made[id(value)]
            self._parts.append(("again", number))
            return made
        made = self._new(value, name, line, grows, depth)
        self._made[id(value)] = (value, made, len(self._made))
        return made

    def _new(self, value: Any, name: str, line: int, grows: frozenset[int], depth: int) -> Any:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self._parts.append(self._form(value, line))
            self.environment.constants.append((name, value))
            return self._stand_in(len(self.environment.constants) - 1, value)
        if isinstance(value, ModuleName):
            self._parts.append(("module", value.path))
            return value
        if kind in (list, dict):
            return self._container(value, name, line, grows, depth)
        if kind in (tuple, set, frozenset):
            if kind is not tuple and not all(isinstance(item, _PLAIN) for item in value):
                raise Refused(line, f"the set {name} has other items than numbers and text", "use a list")
            self._parts.append((kind.__name__, len(value)))
            items = value if kind is tuple else sorted(value, key=repr)
            return kind([self._value(item, f"{name}[{i}]", line, grows, depth + 1) for i, item in enumerate(items)])
        if isinstance(value, ModuleType):
            self._parts.append(("library", value.__name__))
            return value
        if is_function(value):
            self._parts.append(("function", getattr(value, "__module__", ""), getattr(value, "__name__", repr(value))))
            return value
        if isinstance(value, FunctionType):
            return self._function(value, name, line, depth)
        raise Refused(
            line,
            f"{name} is a {clip(kind.__name__)}, whose own Python may change from step to step",
            "read its tensors and numbers into variables before the loop",
        )

    def _form(self, tensor: torch.Tensor, line: int) -> tuple[object, ...]:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            raise Refused(
                line, f"a {type(tensor).__name__} that is not dense", "make it a plain tensor before the loop"
            )
        storage = self._storages.setdefault(storage_of(tensor), len(self._storages))
        strides = (tensor.storage_offset(), tensor.stride()) if tensor.numel() else ()
        return ("tensor", tuple(tensor.shape), str(tensor.dtype), of_every_rank(tensor.device), storage, strides)

    def _container(self, value: Any, name: str, line: int, grows: frozenset[int], depth: int) -> Any:
        kind = type(value)
        if 0 in grows:
            self.environment.written.append(value)
            self._parts.append(("grows", kind.__name__))
            stands = WrittenList if kind is list else WrittenDict
            return stands(len(self.environment.written) - 1, self._here, self._note)
        grows = frozenset(depth - 1 for depth in grows)
        self._parts.append((kind.__name__, len(value)))
        made: Any
        if kind is list:
            made = [self._value(item, f"{name}[{i}]", line, grows, depth + 1) for i, item in enumerate(value)]
        else:
            made = {
                self._key(key, line): self._value(item, f"{name}[{key!r}]", line, grows, depth + 1)
                for key, item in value.items()
            }
        self._copies.append((made, made.copy(), line))
        return made

    def _key(self, key: Any, line: int) -> Any:
        if not isinstance(key, str | int | float | bool | tuple | type(None)):
            raise Refused(line, f"a dict with a {type(key).__name__} as a key", "use numbers or text as keys")
        self._parts.append(repr(key))
        return key

    def _function(self, function: FunctionType, name: str, line: int, depth: int) -> FunctionType:
        """Return a function of the user's with stand-ins in its defaults, its closure and its names."""
        code = function.__code__
        source = self._source_of(code)
        if source is None or code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
            raise Refused(line, f"{name} is a function whose text a plan cannot read", "write its code into the block")
        self.filenames.add(code.co_filename)
        text = _text(source, code.co_firstlineno)
        if text is None:
            raise Refused(line, f"{name} is a function whose text a plan cannot read", "write it as a def")
        if text.refused is not None:
            raise text.refused.again()
        names = function.__globals__
        own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        here = text.uses
        for use in here:
            self._check_use(use, names, own)
        self._parts.append(("def", code.co_filename, code.co_firstlineno, source, function.__name__))
        grows = text.grown
        made_names: dict[str, Any] = {"__builtins__": names.get("__builtins__", builtins), "__name__": "__main__"}
        made = FunctionType(
            code, made_names, function.__name__, None, tuple(CellType() for _ in function.__closure__ or ())
        )
        self._made[id(function)] = (function, made, len(self._made))  # it may call itself
        for global_name in sorted({*_names_of(code)} - {SAVE, GUARD}):
            if names is self._namespace and global_name in self._bound:
                raise Refused(
                    line,
                    f"{name} reads {global_name}, which the loop assigns",
                    f"give it to the function: {name}({global_name})",
                )
            if global_name in names:
                found = names[global_name]
                made_names[global_name] = self._value(
                    found, global_name, line, grows.get(global_name, NOWHERE), depth + 1
                )
            elif global_name in {use.names[0] for use in here} - own:
                self._builtin(global_name, next(use.line for use in here if use.names[0] == global_name))
        for special in (SAVE, GUARD):
            if special in names:
                made_names[special] = names[special]
        for cell, old, free in zip(made.__closure__ or (), function.__closure__ or (), code.co_freevars, strict=True):
            try:
                cell.cell_contents = self._value(old.cell_contents, free, line, grows.get(free, NOWHERE), depth + 1)
            except ValueError:
                raise Refused(line, f"{name} uses {free}, which is not bound", "") from None
        self._parts.append("defaults")
        defaults = function.__defaults__
        made.__defaults__ = defaults and tuple(self._value(x, name, line, NOWHERE, depth + 1) for x in defaults)
        keywords = function.__kwdefaults__
        made.__kwdefaults__ = keywords and {k: self._value(x, k, line, NOWHERE, depth + 1) for k, x in keywords.items()}
        self._functions.append((made, line))
        return made

    def check_unchanged(self) -> None:
        """Refuse traced code that changed a list, a dict or a function from before the loop.

        Raises:
            Refused: with the line where the block first uses it.
        """
        for made, before, line in self._copies:
            same = len(made) == len(before) and (
                all(one is other for one, other in zip(made, before, strict=True))
                if isinstance(made, list)
                else all(key in made and made[key] is item for key, item in before.items())
            )
            if not same:
                raise Refused(
                    line, "a list or dict from before the loop is changed", "append to a list, or make a new one"
                )
        for function, line in self._functions:
            if vars(function):
                raise Refused(line, "an attribute of a function is changed", "use a variable")


@dataclass(frozen=True)
class _Text:
    """What the text of a function says.

    Attributes:
        uses, grown: as of the functions of `executor.plan.eligible`.
        refused: why no plan can have it, None if it can.
    """

    uses: tuple[Use, ...]
    grown: dict[str, frozenset[int]]
    refused: Refused | None


@functools.lru_cache(512)
def _text(source: str, first_line: int) -> _Text | None:
    """Return what the text of a function says, None if it cannot be read.

    Its lines have the notebook's numbers.
    """
    body = _parsed(source, first_line)
    if body is None:
        return None
    refused = None
    try:
        check(body, function=True)
    except Refused as found:
        refused = found.again()
    return _Text(tuple(uses(body)), grown(body), refused)


def _parsed(source: str, first_line: int) -> list[ast.stmt] | None:
    """Return the body of a function, with the notebook's line numbers, or None."""
    try:
        tree = ast.parse(textwrap.dedent(source))
    except SyntaxError:
        tree = None
    if tree is None or not tree.body or not isinstance(tree.body[0], ast.FunctionDef):
        lambdas = [] if tree is None else [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        if len(lambdas) != 1:
            return None
        body: list[ast.stmt] = [ast.copy_location(ast.Expr(value=lambdas[0].body), lambdas[0].body)]
    else:
        body = tree.body[0].body
    for statement in body:
        ast.increment_lineno(statement, first_line - 1)
    return body


def _names_of(code: CodeType) -> set[str]:
    """Return the names outside of itself that code may use, with those of the functions in it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_of(constant)
    return names


def _builtins_of(namespace: Mapping[str, Any]) -> Mapping[str, Any]:
    found = namespace.get("__builtins__", builtins)
    return vars(found) if isinstance(found, ModuleType) else found
