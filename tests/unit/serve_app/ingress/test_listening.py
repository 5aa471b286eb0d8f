"""Serve's own gRPC server with the service's bounds and certificates, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import re
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray.serve._private import default_impl, grpc_util
from ray.serve.config import gRPCOptions

from interpose.rpc.channel import Transport
from serve_app import proxy
from serve_app.ingress import listening
from serve_app.ingress.callers import Callers
from serve_app.ingress.openai_errors import BODY_BYTES, BODY_KEY
from serve_app.service import _encrypted, free_port
from serve_app.settings import GrpcSettings, TlsSettings, settings_from
from serve_app.tenants.book import Keyring, book_of

ROOT = Path(__file__).parents[4]
HEALTHY = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING).SerializeToString()


def routed(service_method: str, streaming_type: Any) -> Callable[..., Any]:
    """Stands for Serve's way to a replica."""

    async def unary(request: Any, context: Any) -> bytes:
        return HEALTHY

    return unary


@contextlib.asynccontextmanager
async def serving(settings: GrpcSettings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """Serve's server as a proxy starts it, on a port."""
    monkeypatch.setattr(grpc_util, "gRPCGenericServer", grpc_util.gRPCGenericServer)
    monkeypatch.setattr(default_impl, "add_grpc_address", default_impl.add_grpc_address)
    callers = Callers(Keyring(book_of((), "")), settings)
    monkeypatch.setattr(proxy, "callers", lambda: callers)
    ports: list[int] = []
    listening.proxy_on(settings, ports.append)
    options = gRPCOptions(port=free_port(), grpc_servicer_functions=proxy.FUNCTIONS, enable_reflection=True)
    task, server = await grpc_util.start_grpc_server(routed, options, event_loop=asyncio.get_running_loop())
    assert ports == [options.port]
    yield options.port
    await server.stop(None)
    task.cancel()


def made(folder: Path, name: str, signer: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """Write a certificate for localhost and its key, signed by itself or by another one; return both."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    issuer, signing = (subject, key) if signer is None else (signer[0].subject, signer[1])
    certificate = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
        .sign(signing, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    (folder / f"{name}.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(pem))
    return certificate, key


async def healthy(channel: grpc.aio.Channel) -> bool:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def test_serves_own_pages_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        serving(GrpcSettings(), monkeypatch) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        assert await healthy(channel)
        await channel.unary_unary("/ray.serve.RayServeAPIService/Healthz")(b"", timeout=10)
        for method in ("/ray.serve.RayServeAPIService/ListApplications", "/interpose.v1.Interpose/Nothing"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(method)(b"", timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            await channel.stream_stream(reflection)(iter([b""]), timeout=10).read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_port_that_is_taken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError):
        async with serving(GrpcSettings(host="192.0.2.1"), monkeypatch):
            pass


async def test_tls_with_certificates_that_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, "first")
    made(tmp_path, "second")
    tls = TlsSettings(certificate=str(tmp_path / "now.pem"), key=str(tmp_path / "now.key"))

    def put(name: str, time: int) -> None:
        for suffix in ("pem", "key"):
            (tmp_path / f"now.{suffix}").write_bytes((tmp_path / f"{name}.{suffix}").read_bytes())
            os.utime(tmp_path / f"now.{suffix}", (time, time))

    async def presented(port: int) -> str:
        return await asyncio.to_thread(ssl.get_server_certificate, ("localhost", port))

    put("first", 1)
    async with serving(GrpcSettings(tls=tls), monkeypatch) as port:
        credentials = grpc.ssl_channel_credentials((tmp_path / "first.pem").read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
            assert await healthy(channel)
            assert await asyncio.to_thread(_encrypted, f"grpcs://localhost:{port}")
            (tmp_path / "now.pem").unlink()
            assert await presented(port) == (tmp_path / "first.pem").read_text(), "the old ones stay"
            put("second", 2)
            assert await presented(port) == (tmp_path / "second.pem").read_text()
            assert await healthy(channel), "connections that there are go on"
        async with grpc.aio.insecure_channel(f"localhost:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await healthy(channel)
    assert not await asyncio.to_thread(_encrypted, f"grpcs://localhost:{port}")


async def test_clients_with_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = made(tmp_path, "authority")
    made(tmp_path, "server", authority)
    made(tmp_path, "client", authority)
    made(tmp_path, "stranger")
    files = {name: str(tmp_path / name) for name in ("authority.pem", "server.pem", "server.key")}
    tls = TlsSettings(certificate=files["server.pem"], key=files["server.key"], client_ca=files["authority.pem"])

    def asked(port: int, name: str) -> grpc.StatusCode | None:
        pair = (tmp_path / f"{name}.pem", tmp_path / f"{name}.key") if name else None
        transport = Transport(f"grpcs://localhost:{port}", "", 10, ca=files["authority.pem"], certificate=pair)
        try:
            health_pb2_grpc.HealthStub(transport._channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.RpcError as error:
            return error.code()  # type: ignore[attr-defined, no-any-return]
        finally:
            transport.close()
        return None

    async with serving(GrpcSettings(tls=tls), monkeypatch) as port:
        assert await asyncio.to_thread(asked, port, "client") is None
        for name in ("stranger", ""):
            assert await asyncio.to_thread(asked, port, name) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("head", ["head", "head-gpu"])
async def test_compose_with_tls(head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings that docker-compose.tls.yml gives a head, and its check of health."""
    made(tmp_path, "tls", made(tmp_path, "authority"))
    (tmp_path / "tls.pem").rename(tmp_path / "tls.crt")
    service = yaml.safe_load((ROOT / "docker-compose.tls.yml").read_text())["services"][head]
    [volume] = service["volumes"]
    target = volume.removesuffix(":ro").rpartition(":")[2]
    given = {name: value.replace(target, str(tmp_path)) for name, value in service["environment"].items()}
    given["TLS_NAME"] = re.sub(r"\$\{TLS_NAME:-(.*)\}", r"\1", given["TLS_NAME"])
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = settings_from({"model": "x"})
    assert settings.grpc.tls is not None
    *_, program = service["healthcheck"]["test"]

    async def checked(port: int) -> int:
        command = [sys.executable, "-c", program.replace("127.0.0.1:9000", f"127.0.0.1:{port}")]
        return (await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False)).returncode

    async with serving(settings.grpc, monkeypatch) as port:
        assert await checked(port) == 0
        monkeypatch.setenv("TLS_NAME", "another")
        assert await checked(port) == 1
    async with serving(GrpcSettings(), monkeypatch) as port:
        monkeypatch.setenv("TLS_NAME", "localhost")
        assert await checked(port) == 1, "the port is not encrypted"


@pytest.mark.parametrize("missing", ["certificate", "key", "client_ca"])
def test_certificates_that_are_not_there(tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, "server")
    files = {"certificate": "server.pem", "key": "server.key", "client_ca": "server.pem", missing: "nowhere"}
    tls = TlsSettings(**{name: str(tmp_path / file) for name, file in files.items()})
    with pytest.raises(ValueError, match="nowhere cannot be read"):
        listening.Certificates(tls)


def test_the_proxys_settings_come_from_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app.environment import proxy_environment
    from serve_app.settings import settings_from

    tls = {"certificate": "/c.pem", "key": "/c.key"}
    given = {"port": 9001, "host": "::1", "idle_seconds": 3.5, "connections_per_peer": 0, "tls": tls}
    settings = settings_from({"model": "x", "grpc": given})
    for name in [name for name in os.environ if name.startswith("INTERPOSE_")]:
        monkeypatch.delenv(name)
    for name, value in proxy_environment(settings).items():
        monkeypatch.setenv(name, value)
    assert proxy.grpc_settings() == settings.grpc


async def test_the_http_port_says_that_it_lives_and_nothing_else() -> None:
    async def serve(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "answered"})

    app = proxy.HttpGate(serve)
    answers: dict[str, list[Any]] = {}
    for path in ("/-/healthz", "/-/routes", "/", "/docs", "/v1/models"):
        sent: list[Any] = []

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message.get("status", message["type"]))

        await app({"type": "http", "path": path}, lambda: None, send)  # type: ignore[arg-type]
        answers[path] = sent
    refused = [404, "http.response.body"]
    closed = dict.fromkeys(("/-/routes", "/", "/docs", "/v1/models"), refused)
    assert answers == {"/-/healthz": ["answered"], **closed}


@pytest.mark.parametrize(
    ("key", "path", "size", "expected"),
    [
        ("the red key", "/v1/completions", 10, 200),
        ("the red key", "/v1/completions", BODY_BYTES + 1, 400),
        ("the red key", "/other", 10, 404),
        ("another key", "/v1/completions", 10, 401),
        ("", "/v1/completions", 10, 401),
    ],
)
@pytest.mark.parametrize("says", [True, False], ids=["says its size", "says no size"])
async def test_a_body_is_received_from_known_callers_and_within_bounds(
    key: str, path: str, size: int, expected: int, says: bool
) -> None:
    tenants = settings_from({"model": "x", "tenants": [{"name": "red", "api_key": "the red key"}]}).tenants
    callers = Callers(Keyring(book_of(tenants, "")), GrpcSettings())
    received: list[int] = []

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        received.append(len(scope[BODY_KEY]))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    pieces = [b"x" * min(1 << 20, size - at) for at in range(0, size, 1 << 20)]

    async def receive() -> Any:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    headers += [(b"content-length", str(size).encode())] if says else []
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "client": ("127.0.0.1", 5)}
    await proxy.HttpGate(serve, lambda: callers)(scope, receive, send)
    assert sent[0]["status"] == expected
    assert received == ([size] if expected == 200 else [])


async def test_a_client_that_goes_before_its_body_is_there_reaches_no_ingress() -> None:
    tenants = settings_from({"model": "x"}).tenants
    callers = Callers(Keyring(book_of(tenants, "")), GrpcSettings())
    pieces = [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}]

    async def nothing(*args: Any) -> None:
        raise AssertionError("nothing is called")

    async def receive() -> Any:
        return pieces.pop(0)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "client": ("127.0.0.1", 5)}
    await proxy.HttpGate(nothing, lambda: callers)(scope, receive, nothing)
    assert not pieces
