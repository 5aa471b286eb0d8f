"""Connecting: addresses, the handshake, credentials, and what a server's refusals become."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import textwrap

import grpc
import pytest

import interpose
from interpose.contract import errors
from interpose.contract.errors import CLASS_OF, STATUS_NAMES, ConnectionLost, ServiceFailure, failure, from_failure
from interpose.contract.version import PROTOCOL, VERSION
from interpose.rpc.channel import parse_address
from interpose.v1 import service_pb2, trace_pb2


def test_importing_interpose_pulls_in_nothing_heavy():
    code = (
        "import sys, interpose; light = 'grpc' not in sys.modules; interpose.connect; interpose.Model;"
        "print(light, sorted({'torch', 'ray', 'vllm', 'transformers', 'tqdm', 'cloudpickle'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True []"


def test_the_help_of_the_package_names_what_there_is():
    text = interpose.__doc__
    named = set(re.findall(r"interpose\.(\w+)", text))
    assert (
        {"connect", "Model", "Tracer", "Client", "InterposeError", "connect_async"} <= named <= set(interpose.__all__)
    )
    for name in interpose.__all__:
        assert getattr(interpose, name), name
        assert name == "__version__" or (getattr(interpose, name).__doc__ or "").strip(), name
    compile(textwrap.dedent(text[text.index("    client =") : text.index("The body")]), "help", "exec")


@pytest.mark.parametrize(
    "address, expected",
    [
        ("localhost:9000", ("localhost:9000", False)),
        ("localhost", ("localhost:9000", False)),
        ("grpc://10.0.0.1:1/", ("10.0.0.1:1", False)),
        ("grpcs://example.org", ("example.org:443", True)),
        ("[::1]:9000", ("[::1]:9000", False)),
    ],
)
def test_addresses(address, expected):
    assert parse_address(address) == expected


@pytest.mark.parametrize("address", ["http://localhost", "local host", "a:b", "", "grpc://a/b", "grpc://"])
def test_no_addresses(address, monkeypatch):
    monkeypatch.delenv("INTERPOSE_ADDRESS", raising=False)
    with pytest.raises(interpose.InvalidArgument):
        interpose.connect(address)


def test_environment_and_key(service, monkeypatch):
    monkeypatch.setenv("INTERPOSE_ADDRESS", f"grpc://{service.address}")
    monkeypatch.setenv("INTERPOSE_API_KEY", "secret")
    with interpose.connect() as client:
        assert service.metadata["authorization"] == "Bearer secret"
        assert client.models == ("tiny-llama",) and "tiny-llama" in repr(client)
    with interpose.connect(api_key="other"):
        assert service.metadata["authorization"] == "Bearer other"


def test_no_server():
    with pytest.raises(interpose.Unavailable, match="interpose serve") as caught:
        interpose.connect("127.0.0.1:9")
    assert caught.value.status is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "oldest, newest, message",
    [
        (PROTOCOL + 1, PROTOCOL + 1, rf"upgrade this client .interpose {re.escape(VERSION)}"),
        (0, PROTOCOL - 1, "upgrade the server"),
    ],
)
def test_versions(service, oldest, newest, message):
    service.hello.oldest_protocol, service.hello.protocol = oldest, newest
    with pytest.raises(interpose.VersionMismatch, match=message):
        interpose.connect(service.address)


def test_a_newer_server_that_still_speaks_this_protocol(service):
    service.hello.protocol = PROTOCOL + 5
    interpose.connect(service.address).close()


def test_a_proxy_whose_application_is_not_deployed_yet(service):
    """Serve's proxy answers so while a service starts; it is worth another try, unlike what the service itself lacks."""
    service.refusals["Hello"] = [grpc.RpcError(grpc.StatusCode.NOT_FOUND, "Application metadata not set.")]
    with pytest.raises(interpose.Unavailable, match="no service runs there"):
        interpose.connect(service.address)
    interpose.connect(service.address).close()


def test_models(service, client):
    with pytest.raises(interpose.NotFound, match="tiny-llama") as caught:
        client.model("gpt")
    assert isinstance(caught.value, interpose.InvalidArgument)
    assert client.model("tiny-llama").name == "tiny-llama"
    assert client.model() == client.model() or client.model().path == ""
    service.hello.models.append("second")
    with interpose.connect(service.address) as both, pytest.raises(interpose.InvalidArgument, match="second"):
        both.model()


def test_status_and_close(service, client):
    assert client.status().server_version == "9.9"
    with client.model().trace("x"):
        pass
    assert len(service.sessions) == 1
    client.close()
    client.close()
    assert not service.sessions
    with pytest.raises(interpose.Unavailable, match="closed"):
        client.status()


@pytest.mark.parametrize("code", [code for code in trace_pb2.ErrorCode.values() if code])
def test_every_failure_has_its_class_and_status(service, code):
    fact = failure(code, "why", location="a.b", suggestions=["a.c"], retry_after=2.0, trace_id="t")
    service.refusals["Hello"] = [ServiceFailure(fact)]
    with pytest.raises(CLASS_OF[code], match=r"why; did you mean a\.c\?") as caught:
        interpose.connect(service.address)
    error = caught.value
    assert (
        error.status is grpc.StatusCode[STATUS_NAMES[code]]
        and error.suggestions == ("a.c",)
        and error.location == "a.b"
    )
    assert (error.retry_after, error.trace_id, error.invoke) == (2.0, "t", -1)


@pytest.mark.parametrize(
    "status, kind",
    [
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.QuotaExceeded),
        (grpc.StatusCode.UNIMPLEMENTED, errors.VersionMismatch),
        (grpc.StatusCode.UNKNOWN, errors.EngineError),
    ],
)
def test_statuses_without_a_failure(service, status, kind):
    service.refusals["Hello"] = [grpc.RpcError(status, "details " * 1000)]
    with pytest.raises(kind) as caught:
        interpose.connect(service.address)
    assert caught.value.status is status and len(str(caught.value)) < 1000


def test_an_ingress_that_died_can_be_tried_again(service):
    service.refusals["Hello"] = [grpc.RpcError(grpc.StatusCode.INTERNAL, "The actor died unexpectedly")]
    with pytest.raises(errors.ConnectionLost, match="has gone away: The actor died") as caught:
        interpose.connect(service.address)
    assert isinstance(caught.value, interpose.Unavailable) and caught.value.status is grpc.StatusCode.UNAVAILABLE


def test_a_server_that_does_not_answer(service):
    import threading

    held = threading.Event()
    service._begin = lambda method, context: held.wait(5)
    with pytest.raises(interpose.DeadlineExceeded):
        interpose.connect(service.address, timeout=0.2)
    held.set()


def test_a_server_of_something_else():
    server = grpc.server(__import__("concurrent.futures").futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with pytest.raises(interpose.VersionMismatch, match="does not offer"):
        interpose.connect(f"127.0.0.1:{port}")
    server.stop(None).wait()


def test_errors_travel_between_processes():
    frame = trace_pb2.Frame(filename="nb.py", line=3, text="x = 1/0")
    error = from_failure(failure(trace_pb2.ERROR_CODE_INTERVENTION, "ValueError: boom", frames=[frame], invoke=2))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and type(again) is type(error) and again.invoke == 2
    inside = pickle.loads(pickle.dumps(ServiceFailure(failure(1, "x"))))
    assert inside.failure.message == "x"


def test_unknown_location_is_an_attribute_error(model):
    assert not hasattr(model, "nothing")
    assert isinstance(errors.UnknownLocation("x"), AttributeError)


def test_tokenizer(service, model, client, monkeypatch):
    import tokenizers
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    made = tokenizers.Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.pre_tokenizer = Whitespace()
    text = made.to_str().encode()
    half = len(text) // 2
    service.tokenizer = [
        service_pb2.TokenizerChunk(name="tokenizer.json", size=len(text), data=part)
        for part in (text[:half], text[half:])
    ]
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert model.tokenizer.encode("b a").ids == [1, 0]
    assert model.tokenizer is client.tokenizer("tiny-llama")


@pytest.mark.parametrize("name", ["../x", "a/b", "", "..", "a\\b"])
def test_tokenizer_files_stay_in_their_folder(service, model, name):
    service.tokenizer = [service_pb2.TokenizerChunk(name=name, size=1, data=b"x")]
    with pytest.raises(interpose.EngineError, match="file name"):
        _ = model.tokenizer


@pytest.mark.parametrize("kind", [interpose.Unavailable, interpose.QuotaExceeded, ConnectionLost])
def test_what_may_go_well_later_says_when(kind):
    assert kind("why").retry_after > 0 and kind("why", retry_after=7.0).retry_after == 7.0
    assert failure(kind.code, "why").retry_after > 0
    assert interpose.InvalidArgument("why").retry_after == 0
    assert from_failure(trace_pb2.Failure(code=kind.code, message="from an older server")).retry_after > 0
