"""The OpenAI-compatible endpoint: completions and chat over HTTP, on the same engines.

A request becomes a trace, whose prompt and sampling parameters vLLM's own classes make on the engine. So admission, quotas,
turns, audit and metrics are those of traces. A request that names edits or saves has a block; any other runs as a plain request.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from abc import abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from actors.failures import describe
from actors.protocol import Lease
from actors.telemetry import metrics
from actors.telemetry.spans import HEADER, parent_of
from executor.engine.openai_body import BodyRefused, parsed, sequences
from interpose.contract.errors import ServiceFailure, failure
from interpose.v1 import model_pb2, service_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.wire.events import apart, kind_of
from serve_app.ingress.calls import Caller
from serve_app.ingress.openai_errors import BODY_BYTES, BODY_KEY, answer_of, error_of
from serve_app.ingress.openai_leases import SharedLeases
from serve_app.ingress.openai_saves import Wanted, chunk_of, saved_json, with_saves
from serve_app.ingress.plain_calls import is_plain
from serve_app.ingress.requests import Submitted
from serve_app.models import ServedModel, ServedModels
from serve_app.settings import Settings, Tenant
from serve_app.tenants import admission
from serve_app.tenants.book import Keyring
from serve_app.tenants.keys import key_of, why_refused

PREFIX = "/v1"
COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
_DONE = b"data: [DONE]"
_EMBEDDINGS = (
    "embeddings are not served: read model.blocks[i].resid_post in a trace, or as interpose.save of a completion"
)
_MARKS = 16


@dataclass
class _Answer:
    """The answer to one request, while it comes.

    Attributes:
        events: the trace's events, in order.
        saves: what the request's block saved.
    """

    events: AsyncGenerator[Any, None]
    lease: Lease
    wanted: Wanted
    saves: pb.Saves | None = None


class OpenAICalls:
    """The endpoint's half of the ingress. Serve calls it with each HTTP request."""

    settings: Settings
    keys: Keyring
    telemetry: Any
    _models: ServedModels
    _sessions: Any
    _shared: SharedLeases | None = None

    async def __call__(self, request: Request) -> Response:
        """Answer one HTTP request."""
        tenant = ""
        try:
            known = self.keys.find(key := key_of(request.headers.items()))
            if known is None:
                raise ServiceFailure(failure(pb.ERROR_CODE_UNAUTHENTICATED, why_refused(key)))
            tenant = known.tenant.name
            label = known.key.label if known.key is not None else ""
            caller = Caller(label, parent_of(request.headers.get(HEADER, "")))
            return await self._answered(request, known.tenant, caller)
        except Exception as error:
            fact = describe(error)
            code = pb.ErrorCode.Name(fact.code).removeprefix("ERROR_CODE_")
            quota = fact.quota.name if fact.HasField("quota") else ""
            self.telemetry.counts.add(metrics.REFUSALS, tenant, "openai", code, quota)
            return answer_of(fact)

    async def _answered(self, request: Request, tenant: Tenant, caller: Caller) -> Response:
        method, path = request.method, request.url.path.rstrip("/")
        if method == "GET" and (path == f"{PREFIX}/models" or path.startswith(f"{PREFIX}/models/")):
            return await self._listed(path.removeprefix(f"{PREFIX}/models").lstrip("/"))
        if method == "POST" and path == f"{PREFIX}/embeddings":
            raise _refused(_EMBEDDINGS)
        if method != "POST" or path not in COMPLETIONS:
            served = ", ".join(f"POST {one}" for one in COMPLETIONS)
            message = f"{method} {path[:80]} is not served here: there are {served} and GET {PREFIX}/models"
            raise ServiceFailure(failure(pb.ERROR_CODE_NOT_FOUND, message))
        return await self._completed(path, request.scope[BODY_KEY], tenant, caller)

    async def _listed(self, name: str) -> Response:
        """Return the models, or one of them; an adapter is a model with the name MODEL:ADAPTER."""
        await self._look()
        cards = [
            {"id": one, "object": "model", "created": int(time.time()), "owned_by": "interpose"}
            for served in self._models.all
            for one in (
                served.settings.name,
                *(f"{served.settings.name}:{adapter}" for adapter in served.settings.lora_modules),
            )
        ]
        if not name:
            return JSONResponse({"object": "list", "data": cards})
        for card in cards:
            if card["id"] == name:
                return JSONResponse(card)
        admission.model_for(self.settings, name)
        raise ServiceFailure(failure(pb.ERROR_CODE_NOT_FOUND, f"there is no model {name[:80]!r}"))

    async def _completed(self, path: str, data: bytes, tenant: Tenant, caller: Caller) -> Response:
        if len(data) > BODY_BYTES:
            raise _refused(f"the body has more than {BODY_BYTES} bytes")
        try:
            body = parsed(data)
        except BodyRefused as error:
            raise _refused(str(error)) from None
        name = body.get("model")
        if not isinstance(name, str):
            raise _refused("model is the name of a served model")
        model, _, adapter = name.partition(":")
        served = await self._model(model)
        description = await self._description(served)
        if adapter and adapter not in served.settings.lora_modules:
            raise ServiceFailure(failure(pb.ERROR_CODE_NOT_FOUND, f"{model} has no adapter {adapter[:80]!r}"))
        admission.check_kind(served.settings, tenant)
        wanted = Wanted.of(body.get("interpose"))
        asked = pb.OpenAIRequest(
            path=path, body=data, traced=wanted.traced, model=adapter, tokens=_tokens(body, description)
        )
        trace = pb.Trace(id=uuid.uuid4().hex, model=model, edits=wanted.edits, openai=asked)
        trace.invokes.add(lora=adapter)
        if wanted.traced:
            trace.invokes[0].program.CopyFrom(wanted.program())
        message = service_pb2.UnparsedSubmit(trace=trace.SerializeToString(), bundles=True)
        submitted = Submitted(message, trace, tenant, served, {}, caller)
        events = self._forwarded(submitted, wanted)
        first = await anext(events)
        if not first.content_type.startswith("text/event-stream"):
            async with contextlib.aclosing(events):
                rest = [part.data async for part in events]
            return Response(b"".join([first.data, *rest]), first.status, media_type=first.content_type)
        return StreamingResponse(_written(first, events), first.status, media_type=first.content_type)

    async def _forwarded(self, submitted: Submitted, wanted: Wanted) -> AsyncGenerator[pb.Http, None]:
        """Run a request's trace; yield the parts of its answer, at least one.

        Raises:
            ServiceFailure: before the first part: the request cannot run, or it failed.
        """
        if self._shared is None:
            self._shared = SharedLeases(self._sessions)
        begun = False
        async with self._shared.lease(submitted.tenant) as lease:
            answer = _Answer(self._run(lease, submitted), lease, wanted)
            try:
                async with contextlib.aclosing(self._parts(answer)) as parts:
                    async for part in parts:
                        begun = True
                        yield part
            except Exception as error:
                fact = describe(error)
                if fact.code in (pb.ERROR_CODE_NOT_FOUND, pb.ERROR_CODE_UNAVAILABLE):
                    self._shared.forget(submitted.tenant, lease)  # its actor may have gone
                if not begun:
                    raise
                yield pb.Http(data=b"data: " + error_of(fact) + b"\n\n")
            finally:
                if not is_plain(submitted.trace, len(submitted.message.trace)):
                    # A client that has gone reads no more; of an answer that has been read, nothing need stay.
                    lease.actor.ask.remote(lease.session_id, "cancel", submitted.trace.id, True)

    async def _parts(self, answer: _Answer) -> AsyncGenerator[pb.Http, None]:
        """Yield the parts of the answer; saved values come at its end."""
        held: pb.Http | None = None
        async with contextlib.aclosing(answer.events) as events:
            async for bundle in events:
                written: pb.Http | None = None
                for data in apart(bundle.SerializeToString()):
                    kind = kind_of(data)
                    if kind == "failed":
                        if written is not None:
                            yield written
                        raise ServiceFailure(pb.Event.FromString(data).failed)
                    if kind == "saves":
                        answer.saves = pb.Event.FromString(data).saves
                    elif kind == "http":
                        part = pb.Event.FromString(data).http
                        if answer.wanted.saves and _is_last(part):
                            held = part  # until all saved values are here
                        elif written is None:
                            written = part
                        else:
                            written.data += part.data  # pieces that came together are sent together
                if written is not None:
                    yield written
        if held is not None:
            yield await self._with_saves(answer, held)

    async def _with_saves(self, answer: _Answer, part: pb.Http) -> pb.Http:
        async def fetch(blob_id: str) -> Any:
            [ref] = await self._sessions.ask(answer.lease, "blob_ref", blob_id)
            return await ref

        saves = await saved_json(answer.wanted, answer.saves or pb.Saves(), fetch)
        data = chunk_of(saves) + part.data if part.data.startswith(_DONE) else with_saves(part.data, saves)
        return pb.Http(status=part.status, content_type=part.content_type, data=data)

    # What the ingress has

    @abstractmethod
    def _run(self, lease: Lease, submitted: Submitted) -> AsyncGenerator[Any, None]:
        raise NotImplementedError

    @abstractmethod
    async def _look(self) -> None:
        raise NotImplementedError

    @abstractmethod
    async def _model(self, name: str) -> ServedModel:
        raise NotImplementedError

    @abstractmethod
    async def _description(self, served: ServedModel) -> model_pb2.ModelDescription:
        raise NotImplementedError


async def _written(first: pb.Http, events: AsyncGenerator[pb.Http, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(events):
        yield first.data
        async for part in events:
            yield part.data


def _is_last(part: pb.Http) -> bool:
    """Whether saved values go before or into this part of an answer."""
    if part.status == 200 and part.content_type == "application/json":
        return True
    return part.data.startswith(_DONE)


def _tokens(body: dict[str, Any], description: model_pb2.ModelDescription) -> int:
    """Return the most tokens that a request may need: of its prompts, and generated."""
    longest = description.max_model_len or 1
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    generated = limit if type(limit) is int and limit >= 0 else longest
    prompt, messages = body.get("prompt"), body.get("messages")
    if isinstance(messages, list):
        prompts = [sum(len(str(message).encode()) + _MARKS for message in messages)]
    elif isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompts = [
            len(one.encode()) if isinstance(one, str) else len(one) if isinstance(one, list) else 0 for one in prompt
        ]
    else:
        prompts = [len(prompt.encode()) if isinstance(prompt, str) else len(prompt) if isinstance(prompt, list) else 0]
    each = max(1, sequences(body) // len(prompts))
    return sum(min(size + _MARKS, longest) + each * min(generated, longest) for size in prompts)


def _refused(message: str) -> ServiceFailure:
    return ServiceFailure(failure(pb.ERROR_CODE_INVALID_ARGUMENT, message))
