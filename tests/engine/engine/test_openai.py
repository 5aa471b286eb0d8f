"""The OpenAI-compatible endpoint over a real engine: answers equal transformers and the traces of the same prompts."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engine.conftest import Bench, expression
from tests.engine.engine.travel import Way
from tests.engine.harness import Block

PROMPT = [5, 9, 2, 7]


@pytest.fixture
def way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    made = Way(bench.engine, monkeypatch)
    yield made
    made.close()


def post(way: Way, path: str = "/v1/completions", **body: Any) -> tuple[int, dict[str, str], bytes]:
    """Send a request to the endpoint."""
    body = {"model": "m", "temperature": 0, "max_tokens": 4, **body}
    return asyncio.run(way.http("POST", path, json.dumps(body).encode()))


def answer(way: Way, **body: Any) -> dict[str, Any]:
    """Return the answer to a request that succeeds."""
    status, _, data = post(way, **body)
    assert status == 200, data
    found: dict[str, Any] = json.loads(data)
    return found


def test_completion(way: Way, bench: Bench) -> None:
    found = answer(way, prompt=PROMPT)
    assert found["choices"][0]["text"] == bench.engine.plain(PROMPT).text
    assert found["usage"]["completion_tokens"] == 4


def test_chat(way: Way) -> None:
    status, _, data = post(way, "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
    assert status == 200, data
    assert json.loads(data)["choices"][0]["message"]["role"] == "assistant"


def test_stream(way: Way, bench: Bench) -> None:
    status, headers, data = post(way, prompt=PROMPT, stream=True)
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text == bench.engine.plain(PROMPT).text


def array(saved: dict[str, Any]) -> np.ndarray:
    """Return a saved value of an answer."""
    return np.frombuffer(base64.b64decode(saved["data"]), saved["dtype"]).reshape(saved["shape"])


def test_saves_of_the_prompt_are_those_of_a_trace(way: Way, bench: Bench) -> None:
    whole = {"location": "blocks[1].attn.pattern", "rows": "all"}
    mlp = f"{expression(f'{bench.block(1)}.mlp').removeprefix('model.')}.output"
    wanted = [whole, "blocks[1].resid_mid", mlp]
    saves = answer(way, prompt=PROMPT, interpose={"save": wanted})["interpose"]["saves"]
    source = f"""
pattern = model.blocks[1].attn.pattern.save()
mid = model.blocks[1].resid_mid[-1:].save()
mlp = model.{mlp}[-1:].save()
"""
    [ran] = bench.engine.run(Block(PROMPT, source))
    for location, name in (
        ("blocks[1].attn.pattern", "pattern"),
        ("blocks[1].resid_mid", "mid"),
        (mlp, "mlp"),
    ):
        [one] = saves[location]
        np.testing.assert_array_equal(array(one), ran.saved[name].numpy())


def test_saves_of_all_steps_beside_one_of_the_prompt(way: Way) -> None:
    wanted: list[Any] = [
        "blocks[0].resid_post",
        {"location": "blocks[1].attn.z", "steps": "all", "rows": "all"},
        "blocks[1].resid_post",
    ]
    saves = answer(way, prompt=PROMPT, interpose={"save": wanted})["interpose"]["saves"]
    assert [one["shape"][0] for one in saves["blocks[1].attn.z"]] == [len(PROMPT), 1, 1, 1]
    assert [len(saves[f"blocks[{layer}].resid_post"]) for layer in (0, 1)] == [1, 1]


def test_saves_of_a_stream_come_before_its_end(way: Way) -> None:
    whole = answer(way, prompt=PROMPT, interpose={"save": ["blocks[0].resid_post"]})
    _, _, data = post(way, prompt=PROMPT, stream=True, interpose={"save": ["blocks[0].resid_post"]})
    *_, saved, last = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    assert last == "[DONE]"
    assert json.loads(saved)["choices"] == []
    assert json.loads(saved)["interpose"] == whole["interpose"]


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "no such block": ({"interpose": {"save": ["blocks[99].resid_post"]}}, 400, "blocks[99] does not exist"),
    "code as a location": ({"interpose": {"save": ["__import__('os')"]}}, 400, "a location is a name"),
    "not a list": ({"interpose": {"save": "blocks[0]"}}, 400, "list of up to"),
    "another field": ({"interpose": {"code": "x"}}, 400, "interpose is"),
    "two sequences": ({"n": 2, "temperature": 1, "interpose": {"save": ["blocks[0].resid_post"]}}, 400, "one sequence"),
    "the engine's own": ({"vllm_xargs": {"interpose": "x"}}, 400, "vllm_xargs"),
    "an id": ({"request_id": "x"}, 400, "request_id"),
    "too many tokens": ({"max_tokens": 10**12}, 400, "max_tokens"),
    "too many sequences": ({"n": 1000}, 400, "1000 sequences"),
    "a wrong type": ({"temperature": "warm"}, 400, "temperature"),
    "no prompt": ({"prompt": []}, 400, "prompt"),
    "another model": ({"model": "nobody"}, 404, "there is no model"),
    "no adapter": ({"model": "m:red"}, 404, "no adapter"),
    "no model": ({"model": 3}, 400, "model is the name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(way: Way, case: str) -> None:
    body, expected, message = REFUSED[case]
    status, _, data = post(way, **{"prompt": PROMPT, **body})
    error = json.loads(data)["error"]
    assert status == expected, data
    assert message in error["message"]
    assert {"message", "type", "param", "code"} <= error.keys()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b'{"model": "m", "prompt": ' + b"[" * 80 + b"]" * 80 + b"}", "nested"),
        (b'{"prompt": "' + b"x" * (9 << 20) + b'"}', "bytes"),
    ],
)
def test_bodies_that_are_refused(way: Way, body: bytes, message: str) -> None:
    status, _, data = asyncio.run(way.http("POST", "/v1/completions", body))
    assert status == 400
    assert message in json.loads(data)["error"]["message"]


def test_other_paths(way: Way) -> None:
    for method, path, expected in (
        ("POST", "/v1/embeddings", 400),
        ("POST", "/v1/responses", 404),
        ("GET", "/v1/completions", 404),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/models/m", 200),
    ):
        status, _, data = asyncio.run(way.http(method, path))
        assert status == expected, (path, data)
    _, _, data = asyncio.run(way.http("GET", "/v1/models"))
    assert [one["id"] for one in json.loads(data)["data"]] == ["m"]


def test_images_are_refused(way: Way) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/secret"}}
    status, _, data = post(way, "/v1/chat/completions", messages=[{"role": "user", "content": [part]}])
    assert status == 400
    assert "text only" in json.loads(data)["error"]["message"]


def test_several_prompts(way: Way, bench: Bench) -> None:
    prompts = [PROMPT, [3, 3, 8]]
    found = answer(way, prompt=prompts)
    assert [one["text"] for one in found["choices"]] == [bench.engine.plain(prompt).text for prompt in prompts]
    assert found["usage"]["prompt_tokens"] == 7
