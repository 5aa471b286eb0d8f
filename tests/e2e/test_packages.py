"""Libraries of the notebook in blocks of a service, and large weights that travel once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import interpose
from interpose.v1 import service_pb2
from tests.e2e.service import RunningService
from tests.engine.shipping.library import installed

WEIGHTS = 4 << 20  # bytes


@pytest.fixture
def tiny_sae(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with installed(tmp_path, monkeypatch) as library:
        yield library


def test_the_packages_of_the_server(client: interpose.Client) -> None:
    found = {row["package"]: row for row in client.packages()}
    assert found["torch"]["version"] == torch.__version__
    assert found["numpy"]["version"] == np.__version__ and "numpy" in found["numpy"]["modules"]  # type: ignore[operator]
    assert "tiny-sae" not in found
    assert "what the server has in blocks (Python 3." in repr(client.packages()) and "torch" in repr(client.packages())


def test_an_autoencoder_of_a_library_that_the_server_lacks(model: interpose.Model, tiny_sae: ModuleType) -> None:
    with model.trace("one two three"):
        plain = model.model.layers[1].output[0].save()
    sae = tiny_sae.load(5, plain.shape[-1])
    with model.trace("one two three", max_tokens=3):
        features = sae.encode(model.model.layers[1].output[0]).save()
        model.model.layers[1].output[0][:] = sae(model.model.layers[1].output[0])
        changed = model.model.layers[1].output[0].save()
    assert torch.allclose(features, sae.encode(plain).detach(), atol=1e-5)
    assert torch.allclose(changed, sae(plain).detach(), atol=1e-5)


class Sent:
    """Counts the bytes of a client's uploads."""

    def __init__(self, client: interpose.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        begin = client._transport.begin

        def counted(method: str, request: Any, *more: Any) -> Any:
            if method == "Upload":
                self.bytes += len(request.data)
            return begin(method, request, *more)

        monkeypatch.setattr(client._transport, "begin", counted)


def test_weights_travel_once_for_all_sessions(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(WEIGHTS // 4, generator=torch.Generator().manual_seed(7))
    total = float(weights.double().sum())
    sent = []
    for _ in range(2):  # two clients, as two notebooks
        with interpose.connect(service.address, progress=False) as client:
            counted = Sent(client, monkeypatch)
            model = client.model("llama")
            for _ in range(2):
                with model.trace("one two three"):
                    found = float(weights.double().sum()).save()
                assert abs(found - total) < 1e-6 * abs(total) + 1e-6
                sent.append(counted.bytes)
    assert sent == [WEIGHTS, WEIGHTS, 0, 0]


def test_an_upload_of_another_session_is_there_at_once(service: RunningService, session: str) -> None:
    data = hashlib.sha256(b"weights").digest() * 1000
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"

    def ask(session_id: str, size: int, data: bytes = b"") -> int:
        request = service_pb2.UploadRequest(session_id=session_id, digest=digest, size=size, data=data)
        return service.stub.Upload(request, timeout=30).received

    assert ask(session, len(data)) == 0
    assert ask(session, len(data), data) == len(data)
    service.close_session(session)
    other = service.open_session()
    assert ask(other, len(data) + 1) == 0, "of another size there is none"
    service.close_session(other)
    third = service.open_session()
    assert ask(third, len(data)) == len(data)
    service.close_session(third)
