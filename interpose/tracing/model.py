"""A served model in the notebook: the root of its module tree, and where traces begin."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar

from interpose import capture
from interpose.contract.errors import InvalidArgument
from interpose.contract.explanation import Explanation
from interpose.contract.sampling import check_adapter, check_sampling
from interpose.modules.envoy import Envoy
from interpose.modules.serves import Verdict, verdict
from interpose.modules.tree import Node, tree_of
from interpose.program.libraries import Libraries
from interpose.program.options import TraceOptions
from interpose.results.job import Job
from interpose.results.session_names import SessionNames
from interpose.rpc.progress import Progress
from interpose.rpc.session import Session
from interpose.tracing.connection import Connection
from interpose.tracing.edit import EDIT, EditBlock, StandingEdit, check_name, check_names, clear, listed
from interpose.tracing.explain import EXPLAIN, ExplainedTracer, check_explained
from interpose.tracing.generation import Generation
from interpose.tracing.session_block import SessionBlock, entered
from interpose.tracing.tracer import Tracer
from interpose.v1.model_pb2 import ModelDescription
from interpose.v1.service_pb2 import Limits
from interpose.v1.trace_pb2 import Prompt
from interpose.wire.prompts import encode_prompt

T = TypeVar("T", bound=Tracer)
G = TypeVar("G", bound=Generation)

_TRACE = "write `with model.trace(…) as tracer:` and a block; without a block, model.generate(prompt, max_new_tokens=n) generates"
_GENERATE = "read its .text or .token_ids, or write `with model.generate(…) as tracer:` and a block"


class Model(Envoy):
    """A served model; made by `client.model`.

    The modules are attributes: `model.model.layers[2].mlp`. `print(model)` shows the tree.
    """

    __slots__ = ("_client", "_description")
    _client: Connection
    _description: ModelDescription

    def __init__(self, client: Connection, description: ModelDescription) -> None:
        tree = tree_of(description)
        super().__init__(tree, tree)
        object.__setattr__(self, "_client", client)
        object.__setattr__(self, "_description", description)

    def trace(
        self,
        prompt: Any = None,
        *,
        stream: bool = False,
        blocking: bool = True,
        fetch: bool | None = None,
        edits: Sequence[str] = (),
        lora: str | None = None,
        explain: bool = False,
        **sampling: Any,
    ) -> Tracer:
        """Run a block inside the model: `with model.trace("Hello", max_tokens=3) as tracer:`.

        Args:
            prompt: a str; token ids as a list or as a tensor of shape [tokens] or [1, tokens]; a tokenizer's output; or
                chat messages. Without a prompt, the block runs in the notebook and gives its prompts to `tracer.invoke`.
            stream: True: the block's end does not wait for the trace. `tracer.stream()` gives the outputs as they come.
            blocking: False: the block's end does not wait for the trace. The trace becomes the job `tracer.job`, and goes on
                without this client.
            fetch: False: saved tensors stay on the server, as `RemoteValue`s. By default the client fetches them at the end
                of the block, or, inside `with client.session()`, at the end of the session.
            edits: names of standing edits (`model.edit`). They run in this order, before the block.
            lora: name of a LoRA adapter for the requests of the trace; `model.adapters` lists the names.
            explain: True: the block does not run. `tracer.explanation` says in which tier each part of the block would run, and
                which line keeps the part from a better tier (`interpose.Explanation`).
            sampling: the engine's sampling parameters by their own names (max_tokens, temperature …).

        Raises:
            InvalidArgument: the prompt has another type, or the engine has no such sampling parameter.
        """
        if explain:
            check_explained(prompt, {"stream=True": stream, "blocking=False": not blocking, "edits": edits})
            explained = self._traced(ExplainedTracer, prompt, False, True, fetch, (), lora, sampling)
            return explained.watched(EXPLAIN)
        made = self._traced(Tracer, prompt, stream, blocking, fetch, edits, lora, sampling)
        return made.watched(_TRACE)

    def explain(self, block: Callable[..., object] | str, prompt: Any = (0,), **sampling: Any) -> Explanation:
        """Say in which tier each part of a block runs: `model.explain(steer)`.

        A part that could have a better tier comes with the line that keeps it from that tier, and with what to write instead.

        Nothing is generated, and the block does not run: its code is followed on shapes, up to each loop over steps. A block
        where it stands is explained by `with model.trace(prompt, explain=True) as tracer:` and `tracer.explanation`.

        Args:
            block: a function whose body is the block, `def steer(tracer):`, or the block's text. The parameter is the tracer. A
                text uses the names of the calling code, and `tracer` and `model`.
            prompt: as for `trace`. Only the number of its tokens matters.
            sampling: as for `trace`; it changes no tier. The block is followed for up to 16 steps.

        Returns:
            The parts of the block; it prints as a text, and shows as a table in a notebook.

        Raises:
            InvalidArgument: the block is neither a function nor a text, or holds what no block can hold.
            InterventionError, UnknownLocation: the block fails in a trace too.
        """
        made, captured, scope = self._explained(block, prompt, sampling, sys._getframe(1))
        made.run_block(captured, scope)
        return made.explanation

    def serves(self, location: str) -> Verdict:
        """Say whether the model gives a location: `if model.serves("blocks[3].attn.q"):`.

        Nothing runs, and nothing is sent: the server has described what it refuses. With several ranks, a value in the middle
        of a module is also compared over the ranks when a trace first reads it, and is refused then if they differ.

        Args:
            location: a canonical value, or a module's output, input, inputs or weight, as a block names it.

        Returns:
            An object that is true if the model serves the location. Otherwise `.reason` has the reason that a trace is given.

        Raises:
            InvalidArgument: the text is no location.
        """
        return verdict(self._tree, location)

    def _explained(
        self, block: object, prompt: Any, sampling: dict[str, Any], caller: FrameType
    ) -> tuple[ExplainedTracer, capture.Block, capture.Scope]:
        prompt = list(prompt) if isinstance(prompt, tuple) else prompt
        check_explained(prompt, {})
        made = self._traced(ExplainedTracer, prompt, False, True, None, (), None, sampling)
        return made, *made.given_block(block, caller, self)

    def generate(self, prompt: Any = None, *, max_new_tokens: int | None = None, **options: Any) -> Generation:
        """Generate text: `model.generate("Hello", max_new_tokens=3).text`.

        With a block (`with model.generate(…) as tracer:`) it does the same as `trace`. Without a block, the generation runs
        when the code first reads a field of the result. A call that is a statement of its own runs at once.

        Args:
            prompt: as for `trace`.
            max_new_tokens: the same as `max_tokens`.
            options: the options and sampling parameters of `trace`.
        """
        return self._generation(Generation, prompt, max_new_tokens, options).watched(_GENERATE)

    def _generation(self, kind: type[G], prompt: Any, max_new_tokens: int | None, options: dict[str, Any]) -> G:
        if max_new_tokens is not None:
            if "max_tokens" in options:
                raise InvalidArgument("max_new_tokens and max_tokens are the same; give one of them")
            options["max_tokens"] = max_new_tokens
        known: dict[str, Any] = {"stream": False, "blocking": True, "fetch": None, "edits": (), "lora": None}
        known = {name: options.pop(name, default) for name, default in known.items()}
        return self._traced(kind, prompt, sampling=options, **known)

    def _traced(
        self,
        kind: type[T],
        prompt: Any,
        stream: bool,
        blocking: bool,
        fetch: bool | None,
        edits: Sequence[str],
        lora: str | None,
        sampling: dict[str, Any],
    ) -> T:
        if prompt is None and "input_ids" in sampling:
            names = ("input_ids", "attention_mask", "token_type_ids")
            prompt = {name: sampling.pop(name) for name in names if name in sampling}
        encoded = None if prompt is None else self.encode_prompt(prompt)
        options = TraceOptions(stream, blocking, fetch, check_names(edits), self.check_lora(lora))
        return kind(self, encoded, self.check_sampling(sampling), options)

    def scan(self, prompt: Any, **sampling: Any) -> Tracer:
        """Run a block on shapes and dtypes alone: `with model.scan("Hello"):`.

        The engine generates nothing, and the tenant spends no tokens. The block sees every location with the shape and dtype
        that it has in a trace of the prompt. The tensors have no elements, so code that depends on elements is an error.
        Saved tensors come as torch tensors on the "meta" device. Where torch is not installed, they come as objects with
        `.shape`, `.dtype` and `.nbytes`. Saved shapes and numbers come unchanged.

        Args:
            prompt: as for `trace`. Only the number of its tokens matters.
            sampling: `max_tokens` is the number of steps, 1 by default. Other parameters change no shape.

        Raises:
            InvalidArgument: there is no prompt.
        """
        if prompt is None:
            raise InvalidArgument("model.scan(prompt) takes one prompt; its length decides the shapes")
        made = Tracer(self, self.encode_prompt(prompt), self.check_sampling(sampling), TraceOptions(scan=True))
        return made.watched("write `with model.scan(prompt):` and a block")

    def edit(self, name: str | None = None, **options: Any) -> EditBlock:
        """Leave a block on the server as a standing edit: `with model.edit("calm"):`.

        The block runs in the traces that name it: `model.trace(prompt, edits=["calm"])`. It belongs to the tenant, and saves
        nothing. As in a trace, the block sees each location once, in the first step. For every step, write
        `with model.edit("calm") as edit:` and `for step in edit.iter[:]:`. A new edit replaces an edit of the same name.

        Args:
            name: letters, digits, ".", "_" and "-".
            options: none; names of other tools are refused with what to write instead.

        Raises:
            InvalidArgument: the block saves a value, or reads a value that cannot be sent.
            QuotaExceeded: the tenant's edits have reached their limit of number or bytes.
        """
        return EditBlock(self, check_name(name, options)).watched(EDIT)

    def edits(self) -> list[StandingEdit]:
        """Return the tenant's standing edits of this model, oldest first.

        Each edit has a name and the method `clear()`.
        """
        return listed(self, StandingEdit)

    def clear_edits(self) -> int:
        """Drop all standing edits of the tenant for this model; return their number."""
        return clear(self, "")

    @property
    def name(self) -> str:
        """The name that the server gives the model."""
        return self._description.name

    @property
    def adapters(self) -> list[str]:
        """The LoRA adapters that a trace may name: `model.trace(prompt, lora="…")`."""
        return list(self._description.adapters)

    @property
    def max_model_len(self) -> int:
        """The most tokens that a prompt and its generated tokens have together."""
        return self._description.max_model_len

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration."""
        return json.loads(self._description.config_json or "{}")

    @property
    def generation_config(self) -> dict[str, Any]:
        """The model's generation configuration."""
        return json.loads(self._description.generation_config_json or "{}") or {}

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, fetched from the server once.

        It is an object of `transformers` or of `tokenizers`, depending on the installed package.
        """
        return self._client.tokenizer(self.name)

    @property
    def tree(self) -> Node:
        """The module tree as data."""
        return self._tree

    @property
    def limits(self) -> Limits:
        """The limits of the server."""
        return self._client.limits

    @property
    def libraries(self) -> Libraries:
        """What the server has of this Python's libraries."""
        return self._client.libraries

    @property
    def awaited(self) -> bool:
        """Whether the client is an `AsyncClient`."""
        return self._client.awaited

    @property
    def session(self) -> Session:
        """The session of the model's traces."""
        return self._client.current_session

    @property
    def session_block(self) -> SessionBlock | None:
        """The innermost running block `with client.session()`; None outside of such a block."""
        return entered(self._client)

    @property
    def session_names(self) -> SessionNames | None:
        """The names that the traces of `session_block` assigned; None outside of a session block."""
        block = self.session_block
        return None if block is None else block.names

    def job_handle(self, job: Job) -> Any:
        """Return the object that `tracer.job` gives for a job."""
        return job

    def tree_of(self, name: str) -> Node:
        """Return the module tree of another model of the same server."""
        return self._tree if name == self.name else self._client.tree_of(name)

    @property
    def progress(self) -> Progress:
        """The maker of the client's progress bars."""
        return self._client.progress

    def call(self, method: str, request: Any) -> Any:
        """Call a method of the server that has one reply."""
        return self._client.call(method, request)

    def encode_prompt(self, prompt: Any) -> Prompt:
        """Return a prompt as a message.

        Raises:
            InvalidArgument: the object is not a prompt.
        """
        description = self._description
        return encode_prompt(
            prompt,
            vocab_size=description.vocab_size,
            max_model_len=description.max_model_len,
            max_prompt_tokens=description.max_prompt_tokens,
        )

    def check_sampling(self, sampling: Mapping[str, object]) -> dict[str, object]:
        """Return the sampling parameters and a `lora`, checked against the engine.

        Raises:
            InvalidArgument: the engine has no such parameter, or no such adapter; the error suggests similar names.
        """
        given = dict(sampling)
        lora = {"lora": self.check_lora(given.pop("lora"))} if "lora" in given else {}
        return check_sampling(given, self._description.sampling_parameters) | lora

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), "adapters"])

    def check_lora(self, name: object) -> str:
        """Return the name of an adapter, "" for None.

        Raises:
            InvalidArgument: the engine has no such adapter; the error suggests similar names.
        """
        return check_adapter(name, self._description.adapters)
