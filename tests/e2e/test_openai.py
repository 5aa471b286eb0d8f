"""The OpenAI-compatible endpoint of a service, with the `openai` client: answers, edits, saves, keys, many at a time."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest

import interpose
from tests.e2e.service import RunningService, wait_for

PROMPTS = ["The Eiffel Tower is in", "Once upon a time", "Seven plus one", "A list of"]
TOKENS = 6


@pytest.fixture(scope="module")
def endpoint(service: RunningService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.http, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def expected(service: RunningService) -> dict[str, str]:
    """What a plain trace generates of each prompt."""
    found = {}
    with interpose.connect(service.address, progress=False) as client:
        model = client.model("llama")
        for prompt in PROMPTS:
            with model.trace(prompt, max_tokens=TOKENS, temperature=0.0) as tracer:
                result = tracer.result.save()
            found[prompt] = result.text
    return found


def complete(endpoint: openai.OpenAI, prompt: str, **options: Any) -> Any:
    return endpoint.completions.create(model="llama", prompt=prompt, max_tokens=TOKENS, temperature=0.0, **options)


def test_models(endpoint: openai.OpenAI) -> None:
    assert "llama" in [model.id for model in endpoint.models.list()]
    assert endpoint.models.retrieve("llama").id == "llama"
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        endpoint.models.retrieve("lama")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_completion_is_what_a_trace_generates(endpoint: openai.OpenAI, expected: dict[str, str], prompt: str) -> None:
    answer = complete(endpoint, prompt, logprobs=2)
    assert answer.choices[0].text == expected[prompt]
    assert answer.usage.completion_tokens == TOKENS
    assert len(answer.choices[0].logprobs.tokens) == TOKENS
    streamed = complete(endpoint, prompt, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(streamed)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected[prompt]
    assert last.usage.completion_tokens == TOKENS


def test_chat(endpoint: openai.OpenAI, model: interpose.Model) -> None:
    messages = [{"role": "user", "content": "Where is the Eiffel Tower?"}]
    with model.trace(messages, max_tokens=TOKENS, temperature=0.0) as tracer:
        result = tracer.result.save()
    asked: dict[str, Any] = {
        "model": "llama",
        "messages": messages,
        "max_completion_tokens": TOKENS,
        "temperature": 0.0,
    }
    answer = endpoint.chat.completions.create(**asked)
    assert answer.choices[0].message.content == result.text
    deltas = [chunk.choices[0].delta.content or "" for chunk in endpoint.chat.completions.create(**asked, stream=True)]
    assert "".join(deltas) == result.text


def test_a_standing_edit_and_saves(endpoint: openai.OpenAI, model: interpose.Model) -> None:
    with model.edit("louder"):
        model.blocks[0].resid_post[:] *= 3.0
    try:
        with model.trace(PROMPTS[0], max_tokens=TOKENS, temperature=0.0, edits=["louder"]) as tracer:
            stream = model.blocks[1].resid_post[-1:].save()
            result = tracer.result.save()
        asked = {"interpose": {"edits": ["louder"], "save": ["blocks[1].resid_post"]}}
        answer = complete(endpoint, PROMPTS[0], extra_body=asked)
        assert answer.choices[0].text == result.text
        [saved] = answer.interpose["saves"]["blocks[1].resid_post"]
        value = np.frombuffer(base64.b64decode(saved["data"]), saved["dtype"]).reshape(saved["shape"])
        np.testing.assert_array_equal(value, stream.numpy())
        *_, last = list(complete(endpoint, PROMPTS[0], stream=True, extra_body=asked))
        assert last.interpose["saves"] == answer.interpose["saves"]
    finally:
        model.clear_edits()
    with pytest.raises(openai.NotFoundError, match="louder"):
        complete(endpoint, PROMPTS[0], extra_body={"interpose": {"edits": ["louder"]}})


def test_a_hundred_requests_beside_twenty_traces(
    endpoint: openai.OpenAI, expected: dict[str, str], client: interpose.Client
) -> None:
    model = client.model("llama")
    with model.trace(PROMPTS[1], max_tokens=TOKENS, temperature=0.0):
        alone = model.blocks[1].resid_post.save()

    def request(number: int) -> None:
        prompt = PROMPTS[number % len(PROMPTS)]
        if number % 3 == 0:
            text = "".join(chunk.choices[0].text for chunk in complete(endpoint, prompt, stream=True))
        elif number % 3 == 1:
            text = complete(endpoint, prompt).choices[0].text
        else:
            answer = complete(endpoint, prompt, extra_body={"interpose": {"save": ["blocks[0].attn.z"]}})
            assert answer.interpose["saves"]["blocks[0].attn.z"][0]["shape"][0] == 1
            text = answer.choices[0].text
        assert text == expected[prompt]

    def trace(number: int) -> None:
        with model.trace(PROMPTS[1], max_tokens=TOKENS, temperature=0.0):
            stream = model.blocks[1].resid_post.save()
            model.blocks[1].resid_post[:] = 0
        np.testing.assert_allclose(stream.numpy(), alone.numpy(), atol=1e-4, rtol=0)

    with ThreadPoolExecutor(24) as pool:
        running = [pool.submit(request, number) for number in range(100)]
        running += [pool.submit(trace, number) for number in range(20)]
        for one in running:
            one.result()


def test_what_is_not_served(endpoint: openai.OpenAI, service: RunningService) -> None:
    with pytest.raises(openai.BadRequestError, match="embeddings are not served"):
        endpoint.embeddings.create(model="llama", input="x")
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        endpoint.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError, match="vllm_xargs"):
        complete(endpoint, "x", extra_body={"vllm_xargs": {"interpose": "x"}})
    root = service.http.removesuffix("/v1")
    assert httpx.get(f"{root}/metrics").status_code == 404
    assert httpx.get(f"{root}/-/routes").status_code == 404
    assert httpx.get(f"{root}/-/healthz").status_code == 200
    long = b'{"model": "llama", "prompt": "' + b"x" * (9 << 20) + b'"}'
    assert httpx.post(f"{root}/v1/completions", content=long).status_code == 400


def test_a_client_that_goes_ends_its_request(service: RunningService) -> None:
    host, port = service.http.removeprefix("http://").removesuffix("/v1").split(":")
    body = json.dumps({"model": "llama", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        assert b"200" in connection.recv(64)
    wait_for(lambda: not any(model.running for model in service.status().models), 20)
