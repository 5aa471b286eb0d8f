"""Wire values for the modules, library functions, code and objects that a block uses.

A module of the model travels as a reference, a function of a library by its name. The user's functions and classes travel as
source, with the values that they read; so do those of a library that the server lacks. An object of such a class travels as its
class and attributes. Other objects are refused, with the code to write instead.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

from interpose import capture
from interpose.contract.limits import Sources
from interpose.modules.envoy import Envoy
from interpose.modules.tree import Node
from interpose.program.barrier import Barrier
from interpose.program.libraries import Libraries, absence, difference
from interpose.rpc.remote import RemoteValue
from interpose.v1 import value_pb2
from interpose.v1.service_pb2 import Limits, Package
from interpose.v1.value_pb2 import Attribute, Binding, Class, Function, Instance, Namespace, Value
from interpose.wire import instances, symbols
from interpose.wire import stdlib as calls
from interpose.wire.encoder import Encoder, WireError

_PLAIN = frozenset({bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, slice, range})
_BOUND = (MethodType, BuiltinMethodType, MethodWrapperType)


class Shipper:
    """Makes the wire values of a trace's functions, classes, objects and references.

    Args:
        tree: the served model's module tree.
        limits: the limits of the server.
        is_tracer: says whether an object is the trace's tracer.
        session_id: the session of the trace, for its remote values; None: remote values are refused.
        libraries: what the server has of the notebook's libraries.
        tries: whether nothing is sent, and it is only tried whether objects can travel as source.

    Attributes:
        encoder: encodes the parts of these values; it calls `special` first for every object.
        notes: what the user should know of the trace's libraries.
    """

    def __init__(
        self,
        tree: Node,
        limits: Limits,
        is_tracer: Callable[[object], bool],
        session_id: str | None = None,
        libraries: Libraries | None = None,
        tries: bool = False,
    ) -> None:
        self._libraries = libraries or Libraries()
        self._tries = tries
        self._tried: dict[int, tuple[bool, object]] = {}  # by id: whether an object can travel as source
        self.notes: dict[str, None] = {}
        self._session_id = session_id
        self._tree = tree
        self._limits = limits
        self._is_tracer = is_tracer
        self.encoder: Encoder
        self.pieces: list[capture.Piece] = []
        self.sources = Sources(limits)
        self._modules: dict[str, set[str]] = {}  # of each of the user's modules: the attributes that were sent

    def special(self, obj: Any) -> Value | None:
        """Return the wire value of a reference, code or an object; None for plain data."""
        if obj is None or type(obj) in _PLAIN:
            return None
        if isinstance(obj, Envoy):
            if obj._tree.model != self._tree.model:
                raise WireError(f"it is a module of another model ({obj._tree.model}); a trace runs on one", obj)
            return Value(module=obj.path)
        if isinstance(obj, RemoteValue):
            session_id = self._session_id
            if session_id is None:
                raise WireError(
                    "it is on the server for as long as its session, which an edit outlives; send what x.fetch() gives",
                    obj,
                )
            return self.encoder.refer(obj, lambda: obj.to_value(session_id))
        if isinstance(obj, capture.CapturedContext):
            if self._is_tracer(obj):
                return Value(tracer=True)
            raise WireError("the tracer of another trace: use this block's own, or read its values by name", obj)
        if isinstance(obj, Barrier):
            if self._is_tracer(obj.tracer):
                return Value(barrier=value_pb2.Barrier(number=obj.number, count=obj.count))
            raise WireError("a barrier of another trace: make one with this trace's tracer.barrier(n)", obj)
        if isinstance(obj, ModuleType):
            return self._module(obj)
        found = self._symbol(obj)
        if found is not None:
            return found
        if isinstance(obj, FunctionType):
            return self._function(obj)
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, _BOUND) and getattr(obj, "__self__", None) is not None:
            return self._method(obj)
        if isinstance(obj, enum.Enum):
            return Value(attribute=Attribute(object=self.encoder.encode(type(obj)), name=obj.name))
        return self._object(obj)

    def read(self, name: str, value: object, user: Iterable[ast.AST]) -> Value:
        """Return the wire value of a name that code reads.

        Of a user's own Python module, only the attributes that the code uses are sent.

        Args:
            name: the name.
            value: the value of the name.
            user: the syntax trees of the code.
        """
        if not isinstance(value, ModuleType):
            return self.encoder.encode(value)
        there = symbols.module_value(value, self._libraries.by_name) is not None
        if there and self._libraries.differs(value.__name__) is None:
            return self.encoder.encode(value)
        chains, other = capture.attributes_used(user, name)
        if there and other is not None:
            return self.encoder.encode(value)
        if other is not None:
            raise WireError(
                f"{absence(value)}, so only what is read of it by name travels, as {name}.f does; "
                f"line {getattr(other, 'lineno', 0)} uses the module itself",
                value,
            )
        return self._own_module(value, chains)

    def _own_module(self, module: ModuleType, chains: Iterable[tuple[str, ...]]) -> Value:
        """Return the wire value of a user's own Python module, with the attributes in `chains`."""
        value = self.encoder.refer(module, lambda: Value(namespace=Namespace(name=module.__name__)))
        sent = self._modules.setdefault(module.__name__, set())
        for chain in sorted(chains):
            name = chain[0]
            try:
                found = getattr(module, name)
            except AttributeError as error:
                raise WireError(str(error), module) from None
            own = isinstance(found, ModuleType) and (
                symbols.module_value(found, self._libraries.by_name) is None
                or (len(chain) > 1 and self._libraries.differs(found.__name__) is not None)
            )
            if own and len(chain) == 1:
                raise WireError(
                    f"{absence(found)}, so only what is read of it by name travels, as {module.__name__}.{name}.f does",
                    found,
                )
            if name not in sent or own:
                sent.add(name)
                inner = self._own_module(found, [chain[1:]]) if own else self._attribute_of(module, name, found)
                attributes = self.encoder.objects.values[value.ref].namespace.attributes
                if all(binding.name != name for binding in attributes):
                    attributes.append(Binding(name=name, value=inner))
        return value

    def _attribute_of(self, module: ModuleType, name: str, value: object) -> Value:
        try:
            return self.encoder.encode(value)
        except WireError as error:
            raise WireError(f"{module.__name__}.{name}{error.where}: {error}", error.subject) from None

    def _module(self, module: ModuleType) -> Value:
        value = symbols.module_value(module, self._libraries.by_name)
        if value is None:
            raise WireError(
                f"{absence(module)}, so the server cannot import it; use it by its name, "
                f"{module.__name__}.f(x), or import what you need: from {module.__name__} import …",
                module,
            )
        other = self._libraries.differs(module.__name__)
        if other is not None and not self._tries:
            self.notes.setdefault(difference(other, f"the code uses the module {module.__name__} itself"))
        return value

    def _symbol(self, obj: Any) -> Value | None:
        """Return the name of an object that the server has; None for what travels otherwise."""
        value = symbols.symbol_value(obj, self._libraries.by_name)
        other = self._libraries.differs(value.symbol.module) if value is not None else None
        return value if other is None or not self._goes_as_source(obj, other) else None

    def _goes_as_source(self, obj: Any, other: Package) -> bool:
        """Whether an object can travel as source, of whose library the server has another version.

        Args:
            other: the server's version.
        """
        if self._tries:
            return True
        known = self._tried.get(id(obj))
        if known is None:
            trial = Shipper(self._tree, self._limits, self._is_tracer, self._session_id, self._libraries, tries=True)
            trial.encoder = Encoder(inline_bytes=0, put_blob=lambda data: "", special=trial.special, gradients=True)
            try:
                trial.encoder.encode(obj)
            except WireError as error:
                known = (False, obj)
                self.notes.setdefault(difference(other, str(error)))
            else:
                known = (True, obj)
                self._tried |= {id(one): (True, one) for one in trial.encoder.entries().values()}
            self._tried[id(obj)] = known
        return known[0]

    def _function(self, function: FunctionType) -> Value:
        source = capture.function_source(function)
        if source is None:
            raise WireError(
                f"the function {function.__qualname__} has no source that can be sent; define it with def or lambda in a "
                "cell or a file, or inside the block",
                function,
            )
        self._check_size(source.source, f"the function {source.name}", source.body)
        if not symbols.is_installed(function.__module__ or "__main__"):
            refusal = self._libraries.refuse_imports(f"the function {source.name}", [source.body])
            if refusal is not None:
                raise WireError(refusal[0])

        what = f"the function {source.name}"
        self.pieces.append(capture.piece(what, source.filename, source.first_line, source.variables, source.stores))

        def build() -> Value:
            return Value(
                function=Function(
                    name=source.name,
                    source=source.source,
                    filename=source.filename,
                    first_line=source.first_line,
                    indent=source.indent,
                    reads=self._bindings(source.bindings, f"{source.name} uses", source.body),
                )
            )

        return self.encoder.refer(function, build)

    def _class(self, cls: type) -> Value | None:
        name = cls.__qualname__
        outer = _outer_class(cls)
        if outer is not None:
            return Value(attribute=Attribute(object=self.encoder.encode(outer), name=cls.__name__))
        source = capture.class_source(cls)
        if source is None and calls.parts_of(cls) is not None:
            return None
        if source is None:
            raise WireError(
                f"the class {name} has no source that can be sent; define it with a class statement in a cell or a file, or "
                "inside the block",
                cls,
            )
        for unbound, line in source.unbound.items():
            raise WireError(
                f"the class {name} ({source.filename}, line {line}) was made with {unbound!r}, a variable that is gone; "
                "define the class at the top level, or give it the value as a default of a method",
                cls,
            )
        self._check_size(source.source, f"the class {name}", source.node)
        self.pieces.append(
            capture.piece(f"the class {name}", source.filename, source.first_line, source.variables, source.stores)
        )

        def build() -> Value:
            return Value(
                class_source=Class(
                    name=source.name,
                    source=source.source,
                    filename=source.filename,
                    first_line=source.first_line,
                    indent=source.indent,
                    needs=self._bindings(source.needs, f"the class {name} uses", source.node),
                    reads=self._bindings(source.reads, f"the class {name} uses", source.node),
                    attributes=self._bindings(source.attributes, f"the class {name} has"),
                )
            )

        return self.encoder.refer(cls, build)

    def _method(self, method: Any) -> Value:
        owner, name = method.__self__, method.__name__
        if isinstance(owner, ModuleType):
            raise WireError(f"{name} of {owner.__name__} is compiled code, which cannot be sent", method)
        found = getattr(owner, name, None)
        same = getattr(found, "__self__", None) is owner and getattr(found, "__func__", None) is getattr(
            method, "__func__", None
        )
        if not same:
            raise WireError(
                f"the method {method.__qualname__} is not found on its object under its name; send the object and call the "
                "method in the block",
                method,
            )
        return Value(attribute=Attribute(object=self.encoder.encode(owner), name=name))

    def _object(self, obj: Any) -> Value | None:
        """Return an object as its class and attributes; None if the encoder knows the type."""
        cls = type(obj)
        refusal = _refusal(obj)
        if refusal is not None:
            if self._limits.pickled:
                return None
            raise WireError(refusal, obj)
        if not self._travels_by_parts(obj):
            return None
        try:
            contents = instances.contents_of(obj)
            attributes = instances.attributes_of(obj)
            instances.allocate(cls, contents)
        except instances.NotTaken as error:
            if self._limits.pickled:
                return None
            raise WireError(f"{error}; send what you need of it (numbers, tensors, dicts)", obj) from None

        def build() -> Value:
            instance = Instance(type=self.encoder.encode(cls))
            if contents is not None:
                instance.contents.CopyFrom(self.encoder.encode(contents))
            instance.attributes.extend(self._bindings(attributes, ""))
            return Value(instance=instance)

        return self.encoder.refer(obj, build)

    def _bindings(self, values: Mapping[str, object], user: str, body: ast.AST | None = None) -> list[Binding]:
        """Encode named values.

        Args:
            values: the values by name.
            user: the words before the name in an error: "f uses"; empty for an object's attributes.
            body: the code that reads the names.
        """
        bindings = []
        for name, value in values.items():
            try:
                found = self.encoder.encode(value) if body is None else self.read(name, value, [body])
                bindings.append(Binding(name=name, value=found))
            except WireError as error:
                if user:
                    raise WireError(f"{user} {_shown(name)}{error.where}: {error}", error.subject) from None
                error.where = f".{name}{error.where}"
                raise
        return bindings

    def _travels_by_parts(self, obj: object) -> bool:
        """Whether an object is sent as class and attributes, and not as plain data."""
        cls = type(obj)
        if calls.takes(cls) or instances.is_tensor_class(cls) or cls.__module__.startswith("interpose."):
            return False
        if not self._libraries.by_name(cls.__module__):
            return True
        base = instances.torch_module()
        if base is not None and issubclass(cls, base):
            return True
        # Of a library's class: only if the class defines no way of pickling but the attributes.
        found = symbols.symbol_value(cls, self._libraries.by_name)
        return found is not None and (
            instances.is_made_of_attributes(cls) or instances.has_its_attributes_as_state(obj)
        )

    def _check_size(self, source: str, what: str, node: ast.AST) -> None:
        refusal = self.sources.refusal(what, source, [node])
        if refusal:
            raise WireError(refusal)


def _outer_class(cls: type) -> type | None:
    """Return the class whose body defines a class, None if there is no such class."""
    outer, _, name = cls.__qualname__.rpartition(".")
    if not outer or outer.endswith("<locals>"):
        return None
    found: Any = symbols.find(cls.__module__, outer)
    return found if isinstance(found, type) and vars(found).get(name) is cls else None


def _shown(name: str) -> str:
    """Return the user's own name for a value that travels under a made name."""
    for kind, what in (("default", "the default value "), ("attribute", ""), ("base", "the base class ")):
        start = f"__interpose_{kind}_"
        if name.startswith(start):
            own = name.removeprefix(start).removesuffix("__")
            return f"{what}{int(own) + 1 if kind == 'base' else repr(own)}"
    return repr(name)


def _refusal(obj: object) -> str | None:
    """Return the reason why an object cannot be sent, and the code to write instead; else None."""
    if type(obj).__module__.startswith(("interpose.tracing.client", "interpose.rpc.session")):
        return "a connection stays in the notebook; use only the model and the tracer in a block"
    if hasattr(type(obj), "__next__"):  # of an object, a class may give any name
        return f"a {type(obj).__qualname__} is consumed as it is read; send a list of its items"
    return None
