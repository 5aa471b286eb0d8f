"""Explanations: a block is sent, and the server says in which tiers its parts would run."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import NoReturn

from interpose import capture
from interpose.capture.given import GivenScope, block_of_function, block_of_text
from interpose.contract.errors import EngineError, InvalidArgument
from interpose.contract.explanation import Explanation
from interpose.program.builder import TraceBuilder
from interpose.program.check import refused
from interpose.results.delivery import Delivery
from interpose.tracing.tracer import Tracer
from interpose.v1.trace_pb2 import Trace

EXPLAIN = "write `with model.trace(prompt, explain=True) as tracer:` and a block, then tracer.explanation"


class ExplainedTracer(Tracer):
    """A trace whose block is explained: `model.trace(prompt, explain=True)`.

    The block does not run.
    """

    @property
    def explanation(self) -> Explanation:
        """The tiers of the block's parts, after the block.

        Raises:
            InvalidArgument: the block has not been sent.
            EngineError: the server does not explain blocks.
        """
        outcome = self._finished()
        if outcome.explanation is None:
            raise EngineError("the server gave no explanation; it is older than this client")
        return outcome.explanation

    def given_block(self, block: object, caller: types.FrameType, model: object) -> tuple[capture.Block, GivenScope]:
        """Return a function's body or a text as a block, and its names.

        Args:
            block: the function, or the text.
            caller: the frame whose names a text uses.
            model: what a parameter `model` is.

        Raises:
            InvalidArgument: it is neither, or holds what a block cannot hold.
        """
        try:
            if isinstance(block, str):
                names = {**caller.f_globals, **caller.f_locals}
                given = {"tracer": self, "model": names.get("model", model)}
                return block_of_text(block), GivenScope(caller, names | given, caller.f_globals)
            if isinstance(block, types.FunctionType):
                made, closure = block_of_function(block)
                parameters = self._parameters(block, model)
                return made, GivenScope(caller, closure | parameters, block.__globals__)
        except capture.CaptureError as error:
            raise refused(error) from None
        self._refuse(block)

    def _parameters(self, block: types.FunctionType, model: object) -> dict[str, object]:
        found: dict[str, object] = {}
        signature = inspect.signature(block, follow_wrapped=False)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL or parameter.kind is parameter.VAR_KEYWORD:
                self._refuse(block)
            if name == "model":
                found[name] = model
            elif name == "tracer" or len(signature.parameters) == 1:
                found[name] = self
            else:
                self._refuse(block)
        return found

    def _refuse(self, block: object) -> NoReturn:
        what = f"a {type(block).__name__}" if not isinstance(block, types.FunctionType) else "other parameters"
        raise InvalidArgument(
            f"model.explain(block) takes a function `def block(tracer):` whose body is the block, or the block's text, not {what}"
            "; for a block in its place write `with model.trace(prompt, explain=True) as tracer:`"
        )

    def _built(self, builder: TraceBuilder, block: capture.Block, scope: capture.Scope) -> tuple[Trace, Delivery]:
        trace, delivery = super()._built(builder, block, scope)
        trace.scan = trace.explain = True
        return trace, delivery


def check_explained(prompt: object, options: Mapping[str, object]) -> None:
    """Refuse options of a trace that an explanation cannot have.

    Raises:
        InvalidArgument: there is no prompt, or an option makes a trace of another kind.
    """
    if prompt is None:
        raise InvalidArgument("explain=True takes one prompt; explain the blocks of several prompts one by one")
    for name, value in options.items():
        if value:
            raise InvalidArgument(f"explain=True and {name} exclude each other: the block does not run")
