"""A served model in the notebook: the root of its module tree, and where traces begin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from interpose.contract.errors import InvalidArgument
from interpose.contract.sampling import check_adapter, check_sampling
from interpose.modules.envoy import Envoy, Node, tree_of
from interpose.program.options import TraceOptions
from interpose.results.job import Job
from interpose.results.session_names import SessionNames
from interpose.rpc.progress import Progress
from interpose.rpc.session import Session
from interpose.tracing.connection import Connection
from interpose.tracing.edit import EDIT, EditBlock, StandingEdit, check_name, check_names, clear, listed
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

    Its modules are attributes (`model.model.layers[2].mlp`); printing it shows the tree.
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
        **sampling: Any,
    ) -> Tracer:
        """Run a block inside the model: `with model.trace("Hello", max_tokens=3) as tracer:`.

        Args:
            prompt: a str; token ids as a list or as a tensor of shape [tokens] or [1, tokens]; a tokenizer's output; or
                chat messages. Without one, the block runs in the notebook and gives its prompts to `tracer.invoke`.
            stream: True: the block's end does not wait for the trace; `tracer.stream()` gives its outputs as they come.
            blocking: False: the block's end does not wait; the trace is `tracer.job` then, and goes on without this client.
            fetch: False: saved tensors stay on the server, as `RemoteValue`s. By default they are fetched at the end of the
                block, and inside `with client.session()` at its end.
            edits: names of standing edits (`model.edit`) that run in it before the block, in this order.
            lora: name of the LoRA adapter that its requests run with, one of `model.adapters`.
            sampling: the engine's sampling parameters by their own names (max_tokens, temperature …).

        Raises:
            InvalidArgument: the prompt is none of these, or the engine has no such sampling parameter.
        """
        made = self._traced(Tracer, prompt, stream, blocking, fetch, edits, lora, sampling)
        return made.watched(_TRACE)

    def generate(self, prompt: Any = None, *, max_new_tokens: int | None = None, **options: Any) -> Generation:
        """Generate: `model.generate("Hello", max_new_tokens=3).text`; or, with a block, the same as `trace`.

        Without `with` it runs when something of its result is first asked for, or at once as a statement of its own.

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
        """Run a block on shapes and types alone: `with model.scan("Hello"):`. Nothing is generated and no tokens are spent.

        The block sees every location with the shape and type that it has in a trace of the prompt, and no elements: what
        depends on elements is an error. Saved tensors come as torch tensors on the "meta" device, or, where torch is not
        installed, as objects with `.shape`, `.dtype` and `.nbytes`; saved shapes and numbers come as they are.

        Args:
            prompt: as for `trace`; how many tokens it has is all that matters.
            sampling: `max_tokens` is the number of steps, 1 unless given; other parameters change no shape.

        Raises:
            InvalidArgument: there is no prompt.
        """
        if prompt is None:
            raise InvalidArgument("model.scan(prompt) takes one prompt; its length decides the shapes")
        made = Tracer(self, self.encode_prompt(prompt), self.check_sampling(sampling), TraceOptions(scan=True))
        return made.watched("write `with model.scan(prompt):` and a block")

    def edit(self, name: str) -> EditBlock:
        """Leave a block on the server: `with model.edit("calm"):`; it runs in requests with `edits=["calm"]`.

        The block is the tenant's own and saves nothing. It sees its location once, in the first step, as a trace's does; write
        `with model.edit("calm") as edit:` and `for step in edit.iter[:]:` for every step. An edit of the same name is replaced.

        Args:
            name: letters, digits, ".", "_" and "-".

        Raises:
            InvalidArgument: the block saves, or holds what cannot travel.
            QuotaExceeded: the tenant has as many edits, or bytes in them, as it may.
        """
        return EditBlock(self, check_name(name)).watched(EDIT)

    def edits(self) -> list[StandingEdit]:
        """Return the tenant's standing edits of this model, oldest first; each has a name and `clear()`."""
        return listed(self, StandingEdit)

    def clear_edits(self) -> int:
        """Drop all of the tenant's standing edits of this model; return how many there were."""
        return clear(self, "")

    @property
    def name(self) -> str:
        """The name it is served under."""
        return self._description.name

    @property
    def adapters(self) -> list[str]:
        """The LoRA adapters that a trace may name: `model.trace(prompt, lora="…")`."""
        return list(self._description.adapters)

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and what follows it may have together."""
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
        """The model's tokenizer, of `transformers` or `tokenizers`, whichever is installed; fetched once."""
        return self._client.tokenizer(self.name)

    @property
    def tree(self) -> Node:
        """The module tree as data."""
        return self._tree

    @property
    def limits(self) -> Limits:
        """What the server takes."""
        return self._client.limits

    @property
    def awaited(self) -> bool:
        """Whether its client is one for asyncio."""
        return self._client.awaited

    @property
    def session(self) -> Session:
        """The session that its traces run in."""
        return self._client.current_session

    @property
    def session_block(self) -> SessionBlock | None:
        """The `with client.session()` that it is used in, if any."""
        return entered(self._client)

    @property
    def session_names(self) -> SessionNames | None:
        """What the traces of that session left in the notebook; None outside of one."""
        block = self.session_block
        return None if block is None else block.names

    def job_handle(self, job: Job) -> Any:
        """Return a background job as `tracer.job` gives it."""
        return job

    def tree_of(self, name: str) -> Node:
        """Return the module tree of a model of the same server by its name."""
        return self._tree if name == self.name else self._client.tree_of(name)

    @property
    def progress(self) -> Progress:
        """Makes the client's progress bars."""
        return self._client.progress

    def call(self, method: str, request: Any) -> Any:
        """Call the server."""
        return self._client.call(method, request)

    def encode_prompt(self, prompt: Any) -> Prompt:
        """Return a prompt as it travels; InvalidArgument for what is none."""
        description = self._description
        return encode_prompt(
            prompt,
            vocab_size=description.vocab_size,
            max_model_len=description.max_model_len,
            max_prompt_tokens=description.max_prompt_tokens,
        )

    def check_sampling(self, sampling: Mapping[str, object]) -> dict[str, object]:
        """Return sampling parameters that the engine has, and a `lora`; InvalidArgument, with near misses, for another."""
        given = dict(sampling)
        lora = {"lora": self.check_lora(given.pop("lora"))} if "lora" in given else {}
        return check_sampling(given, self._description.sampling_parameters) | lora

    def check_lora(self, name: object) -> str:
        """Return the name of an adapter, "" for none; InvalidArgument, with near misses, for one that there is not."""
        return check_adapter(name, self._description.adapters)
