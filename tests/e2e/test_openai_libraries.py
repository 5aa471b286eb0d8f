"""Requests that LangChain's and Inspect's OpenAI providers send, as they were recorded, against the endpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.service import RunningService

REQUESTS = [json.loads(line) for line in Path(__file__).with_name("openai_requests.jsonl").read_text().splitlines()]
SERVED = [one for one in REQUESTS if one["path"] != "/responses" and "tools" not in one["body"]]


def named(one: dict[str, Any]) -> str:
    body = one["body"]
    marks = [mark for mark in ("stream", "logprobs", "response_format", "n", "tools") if body.get(mark)]
    return f"{one['library'].split()[0]} {one['path']} {' '.join(marks)}".strip()


def test_both_libraries_are_among_them() -> None:
    assert {one["library"].split()[0] for one in SERVED} == {"langchain-openai", "inspect-ai"}
    assert any(one["body"].get("stream") for one in SERVED) and any(one["body"].get("logprobs") for one in SERVED)


@pytest.mark.parametrize("one", SERVED, ids=named)
def test_a_request_is_answered(service: RunningService, one: dict[str, Any]) -> None:
    body = one["body"]
    answer = httpx.post(f"{service.http}{one['path']}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        *events, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert last == "[DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        texts = [choice["delta"].get("content") if "delta" in choice else choice["text"] for choice in choices]
        assert "".join(text or "" for text in texts)
        return
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    found = answer.json()
    assert len(found["choices"]) == prompts * (body.get("n") or 1)
    assert found["usage"]["completion_tokens"] <= 6 * len(found["choices"])
    for choice in found["choices"]:
        assert choice["finish_reason"] in ("length", "stop")
        assert (choice["text"] if "text" in choice else choice["message"]["content"]) is not None
        if body.get("logprobs"):
            first = choice["logprobs"]["content"][0]
            assert len(first["top_logprobs"]) == body["top_logprobs"] and first["logprob"] <= 0


def test_the_interface_that_is_not_served_is_refused_by_name(service: RunningService) -> None:
    """Inspect's provider `openai` asks for it unless `responses_api=False`; its provider `openai-api` does not."""
    [one] = [one for one in REQUESTS if one["path"] == "/responses"]
    answer = httpx.post(f"{service.http}{one['path']}", json=one["body"], timeout=60)
    assert answer.status_code == 404 and "POST /v1/responses is not served here" in answer.json()["error"]["message"]
