"""The interface through which the decoder asks a receiver to rebuild its own objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, Protocol

from interpose.v1 import value_pb2
from interpose.v1.value_pb2 import Value
from interpose.wire.encoder import WireError


class Resolver:
    """Rebuilds what only the receiver knows; this one refuses everything."""

    def module(self, path: str) -> object:
        """Return the module of the served model at `path` ("" is the model)."""
        raise WireError("modules of the served model are not taken here")

    def tracer(self) -> object:
        """Return the trace's tracer."""
        raise WireError("a tracer is not taken here")

    def barrier(self, barrier: value_pb2.Barrier) -> object:
        """Return where invokes of the trace wait for each other."""
        raise WireError("barriers are not taken here")

    def function(self, function: value_pb2.Function, decode: Decode) -> object:
        """Return the function.

        `decode(value)` gives one value, and `decode.into(namespace, bindings)` binds the function's names.

        `into` also serves functions that reach each other: a name whose function is still being rebuilt is bound in
        the namespace as soon as that is done. `announce(object)` says that it is there, before all of it is.
        """
        raise WireError("functions are not taken here")

    def class_source(self, source: value_pb2.Class, decode: Decode) -> type:
        """Return the class that a source makes.

        The class is announced with `decode.announce` before values that lead back to it are decoded.
        """
        raise WireError("classes are not taken here")

    def instance(self, instance: value_pb2.Instance, decode: Decode) -> object:
        """Return an object of a class.

        The object is announced with `decode.announce` before its attributes are decoded, which may lead back to it.
        """
        raise WireError("objects of classes are not taken here")

    def attribute(self, obj: object, name: str) -> object:
        """Return an attribute of another value."""
        raise WireError("methods are not taken here")

    def namespace(self, namespace: value_pb2.Namespace, decode: Decode) -> object:
        """Return a module with the given attributes; `decode.announce` it before them."""
        raise WireError("modules of the sender's own are not taken here")

    def run_own(self, do: Callable[[], Any]) -> None:
        """Run code whose duration the sender decides.

        Such code hashes an object of a class that came with the message, or calls a function.
        """
        do()

    def captured(self, index: int) -> object:
        """Return the receiver's own object at `index` of the table that it once sent."""
        raise WireError("references to captured objects are not taken here")

    def symbol(self, module: str, name: str) -> object:
        """Return an attribute of an importable Python module by its qualified name."""
        raise WireError("names of Python modules are not taken here")

    def python_module(self, name: str) -> object:
        """Return an importable Python module."""
        raise WireError("Python modules are not taken here")

    def pickled(self, data: bytes) -> object:
        """Return a pickled object."""
        raise WireError("pickled objects are not taken here")

    def remote(self, tensor: value_pb2.RemoteTensor) -> Any:
        """Return a tensor that an earlier trace saved."""
        raise WireError("tensors of earlier traces are not taken here")

    def uploaded(self, tensor: value_pb2.Tensor, make: Callable[[], Any]) -> Any:  # [...], the shape of the message
        """Return a torch tensor whose bytes are in a blob.

        Args:
            tensor: the message.
            make: fetches the bytes, and makes the tensor where it is `placed`.
        """
        return make()

    def placed(self, tensor: Any) -> Any:
        """Return a torch tensor [...] on the device on which the receiver computes.

        That is the CPU, where the tensor was made, unless a resolver says otherwise.
        """
        return tensor


class Decode(Protocol):
    """What a resolver uses to decode the values inside a function, class or object."""

    def __call__(self, value: Value) -> Any: ...

    def into(self, namespace: MutableMapping[str, Any], bindings: Iterable[value_pb2.Binding]) -> None: ...

    def announce(self, obj: Any) -> None: ...
