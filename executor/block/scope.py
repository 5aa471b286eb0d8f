"""One trace inside a worker: its captured values exist once here, whichever of its invokes comes first.

All invokes of a trace bind the same objects. Names saved in the outer block are shared: before a block runs it sees
their current values, and what it binds to them the others see, as if all blocks lay in one function. When the last
expected invoke has ended, the shared values and the captured containers that were changed are sent, and the scope goes.
"""

from __future__ import annotations

import builtins
import gc
import hashlib
import importlib
import re
import sys
import zlib
from collections.abc import Callable, Iterable, MutableMapping
from types import CodeType
from typing import Any

import numpy
import torch

from executor.block.barrier import Barrier
from executor.block.binding import Rebuilder, Watch, ordinary_tensors
from executor.block.budget import Budget
from executor.block.envoy import Envoy, Tracer
from executor.block.fiber import current
from executor.block.garbage import finalizes
from executor.block.rng import RandomState
from executor.block.watchdog import padded
from executor.core.errors import BudgetExceeded, Control
from executor.core.programs import Codes, Unit
from executor.model.tree import ModuleTree
from executor.saves.encoder import SaveRegistry
from executor.saves.reuse import Stayed
from interpose.capture import rewrite
from interpose.contract.saving import call_save
from interpose.v1 import trace_pb2 as pb
from interpose.v1 import value_pb2
from interpose.v1.value_pb2 import Blob, Class, Function, Instance, Namespace, RemoteTensor
from interpose.wire import arrays
from interpose.wire.decoder import Decode, Decoder, Resolver
from interpose.wire.encoder import WireError

# Modules of torch draw their parameters.
_USES_RANDOM = re.compile(
    r"rand|seed|dropout|multinomial|bernoulli|normal|uniform|exponential|shuffle|choice|sample|poisson|geometric|cauchy|gumbel"
    r"|rrelu|\bnn\.(?!functional)",
    re.IGNORECASE,
)


class Sources:
    """The user's source lines by file name and line number, and whether they draw random numbers, or run when objects go."""

    def __init__(self) -> None:
        self.lines: dict[str, dict[int, str]] = {}
        self.random = False
        self.final = False

    def add(self, source: str, filename: str, first_line: int) -> None:
        lines = self.lines.setdefault(filename, {})
        lines.update(enumerate(source.splitlines(), first_line))
        self.name(source)
        self.final = self.final or finalizes(source)

    def name(self, text: str) -> None:
        """Note what the user's code is, or what it names in a library."""
        self.random = self.random or _USES_RANDOM.search(text) is not None


def print_to_notebook(
    *values: Any, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool = False
) -> None:
    """What `print` is in a block: the text goes to the notebook while the trace runs."""
    if file is not None:
        print(*values, sep=sep, end=end, file=file, flush=flush)
    else:
        current().log((" " if sep is None else sep).join(map(str, values)) + ("\n" if end is None else end))


def save(value: Any) -> Any:
    """What `value.save()` is in a block."""
    return call_save(value, current().save)


def new_namespace() -> dict[str, Any]:
    """Return the names that every block and function of a trace finds."""
    names = dict(vars(builtins))
    names["print"] = print_to_notebook
    return {"__builtins__": names, "__name__": "__main__", rewrite.GUARD: guard, rewrite.SAVE: save}


def _wait(barrier: Barrier) -> None:
    """What `barrier()` is in a block."""
    current().await_barrier(barrier)


def guard() -> None:
    """Re-raise a control exception that a block's own handler has just caught."""
    error = sys.exc_info()[1]
    if isinstance(error, Control):
        raise error


class _TraceResolver(Resolver):
    """Rebuilds a trace's modules, tracer, functions and library names inside a worker."""

    def __init__(
        self,
        tree: ModuleTree,
        rebuild: Rebuilder,
        watch: Watch,
        stayed: Stayed,
        barriers: dict[int, Barrier],
        named: Callable[[str], None],
    ) -> None:
        self._barriers = barriers
        self._named = named
        self._tree = tree
        self._rebuild = rebuild
        self._watch = watch
        self._stayed = stayed

    def module(self, path: str) -> object:
        node = self._tree.find(path)
        if node is None:
            raise WireError(f"the served model has no module {path!r}")
        return Envoy(self._tree, node, given=True)

    def tracer(self) -> object:
        return Tracer()

    def barrier(self, barrier: value_pb2.Barrier) -> object:
        made = self._barriers.setdefault(barrier.number, Barrier(barrier.number, barrier.count, _wait))
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
        return self._stayed.tensor(tensor, self.placed)

    def placed(self, tensor: Any) -> Any:
        return tensor.to(self._tree.device)


class TraceScope:
    """The values of one trace, once per worker.

    Args:
        trace: the trace; its scope and shared names are decoded here, its invokes are not looked at.
        expected: how many invokes it has.
        session: the session actor's name, "" for none.
        tree: the model's modules.
        get_blob: returns the bytes of an uploaded value.
        budget: bounds what the user's classes do while they are made.
        codes: what the trace's texts compile to.
        arrival: how many traces came to this worker before; blocks of earlier traces are served first.
        blame: the id of the client's trace if that is another, as the budget takes it.

    Attributes:
        blame: the id of the client's trace.
        stayed: the tensors of earlier traces that it uses.
    """

    def __init__(
        self,
        trace: pb.Trace,
        expected: int,
        session: str,
        tree: ModuleTree,
        get_blob: Callable[[Blob], Any],
        budget: Budget,
        codes: Codes,
        arrival: int = 0,
        blame: bytes = b"",
    ) -> None:
        self.arrival = arrival
        self._codes = codes
        self.id = trace.id
        self.expected = expected
        self.remote = trace.remote
        self.stacks = trace.stacks
        self.session = session
        self.registry = SaveRegistry()
        self.saved_bytes = 0
        self.recorded_bytes = 0  # in the caches of its blocks
        self.sources = Sources()
        self.streamed: set[int] = (
            set()
        )  # captured containers, by index, whose changes the increments of an invoke carry
        self._exports: dict[int, dict[str, Any]] = {}
        self._random: RandomState | None = None
        self.blame = blame or padded(trace.id)
        self._budget = budget
        self._spaces: list[
            MutableMapping[str, Any]
        ] = []  # the names of functions and classes, and of blocks that define some
        watch = Watch(budget, self.sources.lines, self.random_state, self.blame)
        rebuild = Rebuilder(self._new_space, self.sources.add, watch, codes)
        self.barriers: dict[int, Barrier] = {}
        self.stayed = Stayed(get_blob)
        resolver = _TraceResolver(tree, rebuild, watch, self.stayed, self.barriers, self.sources.name)
        self._decoder = Decoder(trace.scope, get_blob=get_blob, resolver=resolver)
        self._exchanges = list(trace.exchanged)
        self._exchanged: dict[str, Any] = {}
        self._of_session = {variable.entry for variable in trace.variables}
        self._kept: set[str] = set()  # shared names of what the session keeps
        self._sums: dict[str, int] = {}  # of the shared tensors as they came
        self.shared: dict[str, Any] = {}
        with ordinary_tensors():
            for binding in trace.shared:
                value = self._decoder.decode(binding.value)
                self.shared[binding.name] = value
                self.registry.mark(value, value)
                if binding.value.WhichOneof("kind") == "ref" and binding.value.ref in self._of_session:
                    self._kept.add(binding.name)
                if isinstance(value, torch.Tensor | numpy.ndarray):
                    self._sums[binding.name] = _checksum(value)
        self._shared_at_start = dict(self.shared)

    def program(self, program: pb.Program, after: Iterable[int]) -> tuple[CodeType, dict[str, Any]]:
        """Load an invoke's block and bind the names it reads.

        Args:
            program: the block.
            after: the ended invokes whose names it reads.

        Raises:
            Refusal: code of the user's failed while it was bound.
            WireError: this server's Python cannot compile the source, or a value is malformed or cannot be rebuilt here.
        """
        self.sources.add(program.source, program.filename, program.first_line)
        code = self._codes.of(Unit.of_block(program))
        namespace = new_namespace()
        with ordinary_tensors():
            self._decoder.into(namespace, [binding for binding in program.reads if binding.name not in self.shared])
        for writer in sorted(after):
            namespace.update(self._exports.get(writer, {}))
        return code, namespace

    @property
    def final(self) -> bool:
        """Whether the trace's code says that some of it runs when objects go."""
        return self.sources.final

    def _new_space(self) -> dict[str, Any]:
        made = new_namespace()
        self._spaces.append(made)
        return made

    def random_state(self) -> RandomState | None:
        """Return the trace's random generators, or None if none of its code can use any."""
        if self._random is None and self.sources.random:
            self._random = RandomState(int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:6], "little"))
        return self._random

    def share_into(self, names: MutableMapping[str, Any], gang: bool) -> None:
        """Give a block the shared names' current values.

        Args:
            gang: whether the block is one of a gang, whose blocks exchange further names.
        """
        names.update(self.shared)
        if gang:
            names.update(self._exchanged)

    def share_from(self, names: MutableMapping[str, Any], gang: bool) -> None:
        """Take over what a block bound to the shared names."""
        for name in self.shared:
            if name in names:
                self.shared[name] = names[name]
        if gang:
            self._exchanged.update({name: names[name] for name in self._exchanges if name in names})

    def export(self, invoke: int, names: MutableMapping[str, Any], writes: Iterable[str]) -> None:
        """Keep what an ended block bound, for invokes that read it."""
        self._exports[invoke] = {name: names[name] for name in writes if name in names}

    def leave(self, names: MutableMapping[str, Any], lends: bool) -> None:
        """An invoke's block has ended: drop what its names are bound to; called within the block's budget.

        Args:
            lends: whether other invokes may call functions of the block's, so that their names stay to the trace's end.
        """
        if lends and self.expected > 1:
            self._spaces.append(names)
        else:
            names.clear()
        if self.final and self.expected == 1:
            gc.collect()

    def let_go(self) -> BudgetExceeded | None:
        """The trace has ended: drop every object of its blocks within their budget; return what ended it if that took longer."""
        try:
            self._budget.run(self._drop, 0.0, self.blame)
        except BudgetExceeded as error:
            return error
        return None

    def _drop(self) -> None:
        self.registry.clear()
        names: list[MutableMapping[str, Any]] = [
            self.shared,
            self._shared_at_start,
            self._exchanged,
            *self._exports.values(),
        ]
        for one in (*names, *self._spaces):
            one.clear()
        self._decoder.forget()
        self._spaces.clear()
        if self.final:
            gc.collect()

    def captured(self) -> dict[int, int]:
        """Return the indices in the trace's scope of its captured lists, dicts and sets, by their id.

        None of a trace that shares what its session keeps: its copy is replaced when the whole trace has ended well.
        """
        if self._of_session:
            return {}
        made = self._decoder.made().items()
        return {id(value): index for index, value in made if isinstance(value, list | dict | set)}

    def changed(self) -> tuple[dict[str, Any], dict[int, Any]]:
        """Return what the whole trace gives back.

        Returns:
            The shared names that are bound to another object than at the start, or to a tensor that was changed in place, or
            to what the session keeps; and, by index in the trace's scope, the captured lists, dicts and sets that are saved
            or hold saved values and have not been streamed.
        """
        names = {name: value for name, value in self.shared.items() if name in self._kept or self._is_new(name)}
        containers = {}
        for index, value in self._decoder.made().items():
            if index in self.streamed:
                continue
            if isinstance(value, list | dict | set) and self.registry.reaches(value):
                containers[index] = value
        return names, containers

    def _is_new(self, name: str) -> bool:
        value = self.shared[name]
        return value is not self._shared_at_start[name] or (name in self._sums and self._sums[name] != _checksum(value))


def _checksum(value: Any) -> int:
    data = arrays.tensor_bytes(value) if isinstance(value, torch.Tensor) else arrays.ndarray_bytes(value)
    return zlib.crc32(data)
