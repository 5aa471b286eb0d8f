"""Answers requests of the OpenAI-compatible endpoint, by vLLM's own serving classes.

The classes render the prompt, make the sampling parameters, parse tool calls and reasoning, and write the answer. They call an
`_EngineClient` in the place of the engine. There a request gets its tenant's cache salt, and a traced request its block.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

import pydantic
from starlette.datastructures import State
from vllm import SamplingParams
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve import create_error_response
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from executor.engine.failures import TraceFailed
from executor.engine.openai_body import BodyRefused, checked_body
from executor.model.lora import Adapters
from interpose.v1 import trace_pb2 as pb

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_REQUESTS: dict[str, type[Any]] = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest}
_JSON, _EVENTS = "application/json", "text/event-stream"


class Generate(Protocol):
    """Runs one request of an answer on the engine, and yields vLLM's outputs."""

    def __call__(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]: ...


_GENERATE: ContextVar[Generate] = ContextVar("generate")


class _EngineClient:
    """vLLM's engine as the serving classes see it; each answer has a way of its own to generate.

    Args:
        llm: vLLM's AsyncLLM.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncGenerator[Any, None]:
        """Run a request in the way of the answer that asks."""
        return _GENERATE.get()(prompt, sampling_params, request_id, **options)


class OpenAIServing:
    """The serving classes of one engine. Make it with `start`.

    Args:
        state: what vLLM's API server holds.
        name: the model's name.
        most: prompts and sequences of one request, at most.
    """

    def __init__(self, state: State, name: str, most: int) -> None:
        self._state = state
        self._name = name
        self._most = most

    @classmethod
    async def start(
        cls, llm: Any, name: str, options: Mapping[str, Any], adapters: Adapters, most: int
    ) -> OpenAIServing:
        """Return the serving classes of an engine.

        Args:
            llm: vLLM's AsyncLLM.
            name: the model's name.
            options: arguments of vLLM's API server by name, e.g. `tool_call_parser`.
            adapters: the model's LoRA adapters.
            most: prompts and sequences of one request, at most.

        Raises:
            ValueError: vLLM does not take the options.
        """
        state = State()
        args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
        args.model, args.served_model_name = llm.vllm_config.model_config.model, [name]
        parser = {**options}.pop("reasoning_parser", "")
        for option, value in options.items():
            setattr(args, option, value)
        args.structured_outputs_config.reasoning_parser = parser
        client = _EngineClient(llm)
        await init_app_state(client, state, args, ("generate",))
        known = state.openai_serving_models.lora_requests
        known.update({request.lora_name: request for request in adapters.requests})
        return cls(state, name, most)

    async def answer(self, asked: pb.OpenAIRequest, generate: Generate) -> AsyncIterator[pb.Http]:
        """Answer a request.

        Args:
            asked: path and body, as the client sent them.
            generate: runs a request on the engine.

        Yields:
            The parts of the HTTP answer. A refused request is answered, too.

        Raises:
            TraceFailed: the request's block failed before the first part.
            EngineDeadError, EngineGenerateError: the engine has ended.
        """
        _GENERATE.set(generate)
        try:
            body = checked_body(asked.body, self._most) | {"model": asked.model or self._name}
            request = _REQUESTS[asked.path].model_validate(body)
        except (BodyRefused, pydantic.ValidationError) as error:
            yield _error(create_error_response(_said(error)))
            return
        try:
            result = await self._created(asked.path, request)
        except (TraceFailed, EngineDeadError, EngineGenerateError):
            raise
        except Exception as error:  # vLLM's handlers of errors turn these into answers, too
            result = create_error_response(error)
        if isinstance(result, ErrorResponse):
            yield _error(result)
        elif isinstance(result, pydantic.BaseModel):
            yield pb.Http(status=200, content_type=_JSON, data=result.model_dump_json().encode())
        else:
            async with contextlib.aclosing(result) as pieces:
                status = 200
                async for piece in pieces:
                    yield pb.Http(status=status, content_type=_EVENTS if status else "", data=piece.encode())
                    status = 0

    async def _created(self, path: str, request: Any) -> Any:
        if path == CHAT:
            return await self._state.openai_serving_chat.create_chat_completion(request)
        return await self._state.openai_serving_completion.create_completion(request)


def _error(response: ErrorResponse) -> pb.Http:
    return pb.Http(status=response.error.code, content_type=_JSON, data=response.model_dump_json().encode())


def _said(error: Exception) -> str:
    if not isinstance(error, pydantic.ValidationError):
        return str(error)
    said = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}".lstrip(": ") for one in error.errors()[:5]]
    return "; ".join(said)
