"""A Hub id is looked up before anything starts: on the Hub, or in the local cache where the Hub cannot be asked."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from executor.cluster.checkpoint import check_model
from serve_app.settings import ModelSettings
from tests.unit.checkpoints import write_checkpoint
from tests.unit.executor.cluster.test_checkpoint import cut

FILES = ["config.json", "model.safetensors", "tokenizer.json"]
COMMIT = "0123456789012345678901234567890123456789"
# By its name: the HTTP status, the header of errors, and what there is.
MODELS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "lab/whole": (200, "", {"siblings": FILES}),
    "lab/bare": (200, "", {"siblings": ["README.md"]}),
    "lab/unweighted": (200, "", {"siblings": ["config.json", "tokenizer.json"]}),
    "lab/gated": (200, "", {"siblings": FILES, "gated": "manual"}),
    "lab/private": (401, "RepoNotFound", {}),
    "lab/busy": (503, "", {}),
    "lab/whole/revision/old": (404, "RevisionNotFound", {}),
}


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the Hub does."""

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].removeprefix("/api/models/")
        status, code, there = MODELS.get(name, (404, "RepoNotFound", {}))
        siblings = [{"rfilename": file} for file in there.get("siblings", ())]
        self._answer(status, code, json.dumps({"id": name, "gated": False, **there, "siblings": siblings}).encode())

    def do_HEAD(self) -> None:
        self._answer(403, "GatedRepo", b"")

    def _answer(self, status: int, code: str, body: bytes) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hub."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


def check(model: str, **engine: Any) -> None:
    """Check a model with these arguments of the engine."""
    check_model(ModelSettings(model=model, name="m", engine=engine))


def write_cached(name: str, revision: str = "main") -> Path:
    """Put a model into the local cache; returns its folder."""
    kept = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / revision).write_text(COMMIT)
    return write_checkpoint(kept / "snapshots" / COMMIT)


@pytest.mark.parametrize("model", ["lab/whole", "lab/busy"])
def test_what_may_be_there_passes(hub: None, model: str) -> None:
    check(model)


@pytest.mark.parametrize(
    ("model", "engine", "message"),
    [
        (
            "lab/nowhere",
            {},
            r"^there is no folder lab/nowhere, and 127.0.0.1:\d+ has no model lab/nowhere, or a private one",
        ),
        ("nowhere", {}, r"127.0.0.1:\d+ has no model nowhere"),
        ("lab/private", {}, "set HF_TOKEN to a token that may read it"),
        ("lab/gated", {}, "is gated: ask for access on its page, and set HF_TOKEN"),
        ("lab/whole", {"revision": "old"}, "has no revision 'old'"),
        ("lab/bare", {}, "lab/bare on the Hugging Face Hub is no model: it has no config.json"),
        ("lab/unweighted", {}, "lab/unweighted on the Hugging Face Hub has no weights"),
        ("lab/whole", {"tokenizer": "lab/nowhere"}, "has no model lab/nowhere"),
    ],
)
def test_what_cannot_be_served_is_refused(hub: None, model: str, engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(model, **engine)


def test_without_the_hub_the_cache_must_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConnectionError, match=r"^there is no folder lab/kept, and 127.0.0.1:9 cannot be reached .*; the local"
    ):
        check("lab/kept")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"HF_HUB_OFFLINE is set and the local cache \(.*\) has no model lab/kept"):
        check("lab/kept")
    kept = write_cached("lab/kept")
    check("lab/kept")
    with pytest.raises(ValueError, match="has no model lab/kept of revision old"):
        check("lab/kept", revision="old")
    cut(kept / "model.safetensors", 80)
    with pytest.raises(ValueError, match="is cut off"):
        check("lab/kept")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match="is cut off"):
        check("lab/kept")
