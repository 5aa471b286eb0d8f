"""Makes objects of the worker for the names in a trace's messages.

These are modules, the tracer, barriers, functions and names of libraries.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from executor.block.barrier import Barrier
from executor.block.binding import Rebuilder, Watch
from executor.block.envoy import Envoy, Tracer
from executor.block.namespace import wait
from executor.block.uploads import Uploads
from executor.model.tree import ModuleTree
from executor.saves.reuse import EarlierTensors
from interpose.v1 import value_pb2
from interpose.v1.value_pb2 import Class, Function, Instance, Namespace, RemoteTensor
from interpose.wire.encoder import WireError
from interpose.wire.resolver import Decode, Resolver


class TraceResolver(Resolver):
    """Gives the decoder of one trace its objects.

    Args:
        tree: the model's modules.
        rebuild: makes functions, classes and objects.
        watch: runs what the user wrote.
        earlier: the tensors of earlier traces that the trace uses.
        barriers: the trace's barriers, by number.
        named: is told each name of a library.
        uploads: the trace's large values.
    """

    def __init__(
        self,
        tree: ModuleTree,
        rebuild: Rebuilder,
        watch: Watch,
        earlier: EarlierTensors,
        barriers: dict[int, Barrier],
        named: Callable[[str], None],
        uploads: Uploads,
    ) -> None:
        self._uploads = uploads
        self._barriers = barriers
        self._named = named
        self._tree = tree
        self._rebuild = rebuild
        self._watch = watch
        self._earlier = earlier

    def module(self, path: str) -> object:
        node = self._tree.find(path)
        if node is None:
            raise WireError(f"the served model has no module {path!r}")
        return Envoy(self._tree, node, given=True)

    def tracer(self) -> object:
        return Tracer()

    def barrier(self, barrier: value_pb2.Barrier) -> object:
        made = self._barriers.setdefault(barrier.number, Barrier(barrier.number, barrier.count, wait))
        if made.count != barrier.count or not barrier.count:
            raise WireError(f"barrier {barrier.number} waits for {barrier.count} invokes")
        return made

    def function(self, function: Function, decode: Decode) -> object:
        return self._rebuild.function(function, decode)

    def class_source(self, source: Class, decode: Decode) -> type:
        return self._rebuild.class_source(source, decode)

    def instance(self, instance: Instance, decode: Decode) -> object:
        return self._rebuild.instance(instance, decode)

    def attribute(self, obj: object, name: str) -> object:
        return self._rebuild.attribute(obj, name)

    def namespace(self, namespace: Namespace, decode: Decode) -> object:
        return self._rebuild.namespace(namespace, decode)

    def run_own(self, do: Callable[[], Any]) -> None:
        self._watch.run(do)

    def symbol(self, module: str, name: str) -> object:
        self._named(f"{module}.{name}")
        value: Any = self.python_module(module)
        for part in name.split("."):
            try:
                value = getattr(value, part)
            except AttributeError:
                raise WireError(f"the server's {module} has no {name}") from None
            except Exception as error:  # of a module that imports its parts when they are asked for
                raise WireError(f"the server's {module} cannot give {name}: {error}") from None
        return value

    def python_module(self, name: str) -> object:
        self._named(name)
        try:
            return importlib.import_module(name)
        except (Exception, SystemExit) as error:  # whatever the module's own code raises; some are programs
            reason = str(error) or type(error).__name__
            raise WireError(f"the server cannot import {name}: {reason}") from None

    def remote(self, tensor: RemoteTensor) -> Any:
        return self._earlier.tensor(tensor, self.placed)

    def uploaded(self, tensor: value_pb2.Tensor, make: Callable[[], Any]) -> Any:  # [...], the shape of the message
        return self._uploads.tensor(tensor, make)

    def placed(self, tensor: Any) -> Any:
        return tensor.to(self._tree.device)
