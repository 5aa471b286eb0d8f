"""`grpcs://` is an encrypted connection to a server whose certificate is known, and to no other."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from interpose.v1 import service_pb2_grpc
from tests.unit.interpose.conftest import Service

# grpc reads the certificates that it trusts once in a process.
CLIENT = "import sys, interpose; print(interpose.connect(sys.argv[1], api_key='secret', timeout=10).models)"


def certificate() -> tuple[bytes, bytes]:
    """Return the key of a new certificate for localhost, signed by itself, and the certificate; PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return private, made.public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[tuple[Service, int, Path]]:
    """The scripted service behind TLS, its port, and the file with its certificate."""
    key, chain = certificate()
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(chain)
    server = grpc.server(ThreadPoolExecutor(4))
    service = Service()
    service_pb2_grpc.add_InterposeServicer_to_server(service, server)
    port = server.add_secure_port("localhost:0", grpc.ssl_server_credentials([(key, chain)]))
    server.start()
    yield service, port, trusted
    server.stop(None).wait()


def connect(address: str, trusted: Path | None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **({"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(trusted)} if trusted else {})}
    command = [sys.executable, "-c", CLIENT, address]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)


def test_a_server_whose_certificate_is_trusted(encrypted: tuple[Service, int, Path]) -> None:
    service, port, trusted = encrypted
    done = connect(f"grpcs://localhost:{port}", trusted)
    assert done.stdout == "('tiny-llama',)\n", done.stderr
    assert service.metadata["authorization"] == "Bearer secret"


@pytest.mark.parametrize(("scheme", "trusts"), [("grpcs", False), ("grpc", True)])
def test_no_other_connection(encrypted: tuple[Service, int, Path], scheme: str, trusts: bool) -> None:
    service, port, trusted = encrypted
    done = connect(f"{scheme}://localhost:{port}", trusted if trusts else None)
    assert done.returncode == 1 and "is `interpose serve` running there?" in done.stderr
    assert not service.metadata, "no key has been told"
