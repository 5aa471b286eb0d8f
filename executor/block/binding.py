"""Makes a trace's functions, classes and objects in a worker, within its blocks' bounds.

A class statement runs the user's code: decorators, metaclasses, `__init_subclass__`. It runs where the trace is bound,
outside of any block, so time, memory, torch's modes and the random generators are watched and put back here as around a
block's turn, and what it raises becomes a failure with the user's own lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from executor.block.budget import Budget, unbroken
from executor.block.process_state import OwnState, complaint
from executor.block.rng import RandomState
from executor.block.traceback import describe
from executor.core.errors import Refusal
from executor.core.programs import Codes, Unit
from interpose.capture import remake
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Class, Function, Instance, Namespace
from interpose.wire import instances
from interpose.wire.encoder import WireError
from interpose.wire.instances import NotTaken
from interpose.wire.resolver import Decode


class BindingFailed(Refusal):
    """The user's own code failed while a trace was bound.

    Attributes:
        failure: how, with the user's lines.
    """

    def __init__(self, failure: pb.Failure) -> None:
        super().__init__(failure.code, failure.message)
        self.failure = failure


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make tensors as a block makes them.

    They are not inference tensors, unlike those of the engine's step, and have no gradients.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


class Watch:
    """Runs the user's code outside of blocks.

    Args:
        budget: the worker's bounds; all of a trace's code that runs here has one step's time together.
        sources: the user's lines by file name.
        random_state: gives the trace's random generators, None while its code uses none.
        blame: the id of the client's trace, as the budget takes it.
    """

    def __init__(
        self,
        budget: Budget,
        sources: dict[str, dict[int, str]],
        random_state: Callable[[], RandomState | None],
        blame: bytes,
    ) -> None:
        self._budget = budget
        self._blame = blame
        self._sources = sources
        self._random_state = random_state
        self._used = 0.0

    @unbroken
    def run(self, do: Callable[[], object]) -> None:
        """Call `do`.

        Raises:
            BindingFailed: it raised, took too much, or left a mode or a signal changed.
            WireError, NotTaken: it found that something cannot be made.
        """
        random = self._random_state()
        running = True
        failure: BaseException | None = None
        own = OwnState()
        own.enter()
        self._budget.begin_step()
        if random is not None:
            random.enter()
        self._budget.arm(lambda: running, self._used, self._blame)
        try:
            try:
                with ordinary_tensors():
                    do()
            finally:
                running = False
        except (WireError, NotTaken):
            raise
        except BaseException as error:
            failure = error
        finally:
            self._used += self._budget.disarm()
            if random is not None:
                random.leave()
            left = own.leave(ended=True)
        if failure is None and self._budget.struck:  # the code caught what was to end it
            failure = self._budget.exceeded()
        if failure is None and left:
            failure = Refusal(pb.ERROR_CODE_INTERVENTION, complaint(left))
        if failure is not None:
            raise BindingFailed(describe(failure, self._sources, "", -1))


class Rebuilder:
    """Makes the functions, classes and objects of one trace.

    Args:
        new_namespace: makes the dict that the names of one function or class live in.
        note: is told each text: source, file name, first line.
        watch: runs what the user wrote.
        codes: what the texts compile to.
    """

    def __init__(
        self,
        new_namespace: Callable[[], dict[str, Any]],
        note: Callable[[str, str, int], None],
        watch: Watch,
        codes: Codes,
    ) -> None:
        self._new_namespace = new_namespace
        self._note = note
        self._watch = watch
        self._codes = codes

    def function(self, function: Function, decode: Decode) -> object:
        """Return a function; it is announced before what it reads is decoded."""
        self._note(function.source, function.filename, function.first_line)
        namespace = self._new_namespace()
        # A default is read while the function is made, everything else while it runs.
        defaults = [binding for binding in function.reads if remake.is_default(binding.name)]
        decode.into(namespace, defaults)
        exec(self._codes.of(Unit.of_function(function)), namespace)
        made = namespace[function.name]
        decode.announce(made)
        decode.into(namespace, [binding for binding in function.reads if not remake.is_default(binding.name)])
        return made

    def class_source(self, source: Class, decode: Decode) -> type:
        """Return a class; it is announced before what its methods read is decoded."""
        self._note(source.source, source.filename, source.first_line)
        namespace = self._new_namespace()
        decode.into(namespace, source.needs)
        code = self._codes.of(Unit.of_class(source))
        self._watch.run(lambda: exec(code, namespace))
        made = namespace[source.name]
        if not isinstance(made, type):
            raise WireError(f"the decorators of the class {source.name} make something else of it")
        decode.announce(made)
        decode.into(namespace, source.reads)
        attributes = {binding.name: decode(binding.value) for binding in source.attributes}
        if attributes:
            self._watch.run(lambda: [type.__setattr__(made, name, value) for name, value in attributes.items()])
        return made

    def instance(self, instance: Instance, decode: Decode) -> object:
        """Return an object; it is announced before its attributes are decoded."""
        cls = decode(instance.type)
        has_contents = instance.HasField("contents")
        immutable = has_contents and instances.is_made_with_contents(cls)
        contents = decode(instance.contents) if immutable else None
        try:
            made = instances.allocate(cls, contents)
            decode.announce(made)
            contents = decode(instance.contents) if has_contents and not immutable else contents
            attributes = {binding.name: decode(binding.value) for binding in instance.attributes}
            # A class of the user's may have code that runs when attributes are set.
            self._watch.run(lambda: instances.restore(made, contents, attributes))
        except NotTaken as error:
            raise WireError(str(error)) from None
        return made

    def attribute(self, obj: object, name: str) -> object:
        """Return an attribute: a bound method, an enumeration's member, a class in a class."""
        found: list[object] = []
        self._watch.run(lambda: found.append(getattr(obj, name)))
        return found[0]

    def namespace(self, namespace: Namespace, decode: Decode) -> ModuleType:
        """Return a module that has the given attributes and nothing else."""
        made = ModuleType(namespace.name)
        decode.announce(made)
        decode.into(vars(made), namespace.attributes)
        return made
