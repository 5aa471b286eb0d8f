"""Plain requests of OpenAI's clients when a part of the service dies: an error that says so, and nothing is left of them."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import openai
import psutil
import pytest

from benchmarks.processes import ENGINE, title
from interpose.v1 import service_pb2
from tests.e2e.service import RunningService, wait_for
from tests.e2e.tenancy.conftest import KEYS

BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": "one two three",
    "max_tokens": 500,
    "ignore_eos": True,
    "n": 16,  # so that it takes some seconds
}

HEADERS = {"authorization": f"Bearer {KEYS['boss']}"}


class Request(threading.Thread):
    """Sends a request that takes long; keeps how it ended.

    Attributes:
        status: of the answer; 0 if there is none.
        said: the answer, or why there is none.
    """

    def __init__(self, service: RunningService, stream: bool) -> None:
        super().__init__(daemon=True)
        self._url = f"{service.http}/completions"
        self._stream = stream
        self.begun = threading.Event()
        self.status, self.said = 0, ""
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST", self._url, json=BODY | {"stream": self._stream}, headers=HEADERS, timeout=120
            ) as answer:
                self.status = answer.status_code
                for piece in answer.iter_text():
                    self.said += piece
                    self.begun.set()
        except httpx.HTTPError as error:
            self.said += repr(error)


def quiet(service: RunningService) -> bool:
    status: service_pb2.StatusReply = service.status()
    nothing = not any(model.running or model.waiting for model in status.models)
    return nothing and not any(tenant.traces_running for tenant in status.tenants)


def running(service: RunningService, stream: bool) -> Request:
    """A request whose tokens are being generated."""
    wait_for(lambda: quiet(service), 20)
    request = Request(service, stream)
    wait_for(lambda: any(tenant.traces_running for tenant in service.status().tenants), 20)
    time.sleep(0.2)  # the engine has it
    if stream:
        assert request.begun.wait(20)
    return request


def check_again(service: RunningService) -> None:
    """The next request is answered, as soon as what died is there again."""
    deadline = time.monotonic() + 300
    with openai.OpenAI(base_url=service.http, api_key=KEYS["boss"], max_retries=0, timeout=60) as client:
        while True:
            try:
                answer = client.completions.create(model="tiny", prompt="one two three", max_tokens=4)
                assert answer.usage is not None and answer.usage.completion_tokens
                break
            except (openai.InternalServerError, openai.APIConnectionError):
                assert time.monotonic() < deadline
                time.sleep(0.5)
    wait_for(lambda: quiet(service), 20)


def cores(service: RunningService) -> list[psutil.Process]:
    replica = next(iter(service.processes("engine-tiny")))
    return [one for one in replica.children(recursive=True) if ENGINE in title(one)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stream", [False, True])
def test_a_session_actor_dies(service: RunningService, stream: bool) -> None:
    request = running(service, stream)
    for process in service.processes("ray::Session"):
        process.kill()
    request.join(30)
    assert not request.is_alive()
    assert request.status == (200 if stream else 503), request.said
    assert "try again" in request.said
    check_again(service)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("part", "stream"), [("core", False), ("core", True), ("replica", True)])
def test_an_engine_dies(service: RunningService, part: str, stream: bool) -> None:
    request = running(service, stream)
    killed = cores(service) if part == "core" else service.processes("engine-tiny")[:1]
    for process in killed:
        process.kill()
    request.join(60)
    assert not request.is_alive()
    assert request.status == (200 if stream else 503), request.said
    pieces = [piece.removeprefix("data: ") for piece in request.said.strip().split("\n\n")]
    errors = [one["error"] for piece in pieces if piece != "[DONE]" and "error" in (one := json.loads(piece))]
    assert len(errors) == 1, request.said[-1000:]
    if not (part == "core" and stream):  # vLLM's own class says so itself in a stream
        assert errors[0]["code"] == "unavailable"
    service.wait_until_running("tiny")
    check_again(service)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_goes(service: RunningService, stream: bool) -> None:
    wait_for(lambda: quiet(service), 20)
    with httpx.Client(timeout=2.0 if not stream else 30.0) as client:
        if stream:
            with client.stream(
                "POST", f"{service.http}/completions", json=BODY | {"stream": True}, headers=HEADERS
            ) as answer:
                next(answer.iter_text())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{service.http}/completions", json=BODY, headers=HEADERS, timeout=0.4)
    wait_for(lambda: quiet(service), 10)
    check_again(service)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stream", [False, True])
def test_an_ingress_dies(service: RunningService, stream: bool) -> None:
    """Its client's connection ends; the engine and the session notice by themselves."""
    request = running(service, stream)
    for process in service.processes("ServeReplica:interpose:ingress"):
        process.kill()
    request.join(30)
    assert not request.is_alive() and request.status in (0, 200, 500, 503) and "[DONE]" not in request.said
    check_again(service)
