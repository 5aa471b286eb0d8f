"""The edges of a running service: keys that come and go, who has them, and what is there without one."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import grpc
import psutil
import pytest

import interpose
from benchmarks.processes import title
from interpose.cli import main
from interpose.contract.errors import ServiceFailure
from interpose.v1 import service_pb2
from interpose.v1 import trace_pb2 as pb
from serve_app.key_hashes import new_key
from tests.e2e.conftest import GREEN, OPERATOR, TENANTS, write_tenants
from tests.e2e.service import RunningService, failure_of, wait_for
from tests.e2e.test_calls import trace

pytestmark = pytest.mark.timeout(300)

# Everything that the cluster's control service stores, searched for texts.
_STORED = """
import json, ray, sys
ray.init(address="auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
gcs = ray.get_runtime_context().worker.gcs_client
# The arguments of this command are stored, too: they come backwards.
texts, found, count = [text[::-1] for text in sys.argv[1:]], set(), 0
for namespace in (None, b"", b"fun", b"serve", b"job", b"cluster", b"named_actors"):
    for key in gcs.internal_kv_keys(b"", namespace):
        value, count = gcs.internal_kv_get(key, namespace) or b"", count + 1
        found.update(text for text in texts if text.encode() in value or text.encode() in key)
for job in gcs.get_all_job_info().values():
    found.update(text for text in texts if text in str(job))
print(json.dumps([sorted(found), count]))
"""


def metadata(key: str) -> tuple[tuple[str, str], ...]:
    return (("x-api-key", key),)


def refused(address: str, key: str) -> bool:
    try:
        interpose.connect(address, api_key=key, progress=False).close()
    except interpose.Unauthenticated:
        return True
    return False


@pytest.fixture
def file(second: RunningService) -> Iterator[Path]:
    """The running service's file of tenants, which is as before afterwards."""
    path = second.config.parent / "tenants.yaml"
    yield path
    write_tenants(path, green=[], operators=[])


def test_no_process_has_a_key(second: RunningService) -> None:
    keys = [*(tenant["api_key"] for tenant in TENANTS), GREEN, OPERATOR]
    for key in keys:
        assert not refused(second.address, key)
    hashes = [line for line in second.config.with_name("tenants.yaml").read_text().split() if line.startswith("$")]
    assert len(hashes) == 2
    searched = 0
    for process in [second.process, *second.processes()]:
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        searched += 1
        assert not [key for key in keys if key.encode() in environment + command], title(process)
    assert searched > 5
    # What the ingress was made with is stored: the hashes are there, and show where to look.
    found, count = json.loads(second.joined(_STORED, *(text[::-1] for text in (*keys, *hashes))).splitlines()[-1])
    assert count > 10 and found == sorted(hashes)


def test_keys_come_and_go_while_the_service_runs(
    second: RunningService, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phone = new_key("phone")
    assert refused(second.address, phone) and not refused(second.address, GREEN)
    write_tenants(file, green=[phone], operators=[])
    wait_for(lambda: not refused(second.address, phone), 30)
    # A stream that the key has begun ends when the key does; the tenant's other key finds the trace again.
    with interpose.connect(second.address, api_key=GREEN, progress=False) as green:
        errors: list[Exception] = []

        def run() -> None:
            with interpose.connect(second.address, api_key=phone, progress=False) as client:
                model = client.model()
                try:
                    with model.trace("one two three", max_tokens=200, ignore_eos=True) as tracer:
                        for _step in tracer.iter[:]:
                            import time

                            time.sleep(0.3)
                except interpose.InterposeError as error:
                    errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        wait_for(lambda: any(one.traces_running for one in green.status().tenants), 60)
        asking = ["--address", second.address, "--api-key"]
        assert main(["keys", "list", *asking, OPERATOR]) == 0
        listed = {line.split()[1]: line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]}
        assert listed["phone"] == listed["laptop"] == "green" and listed["admin"] == "operators"
        assert {"red", "blue"} <= set(listed.values())
        assert main(["keys", "list", *asking, GREEN]) == 0
        assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]} == {"green"}
        # Another tenant's key is an operator's business.
        red = str(TENANTS[0]["api_key"])
        assert main(["keys", "revoke", *asking, red, "--tenant", "green", "phone"]) == 1
        assert "only an operator" in capsys.readouterr().err
        assert main(["keys", "revoke", *asking, OPERATOR, "--tenant", "green", "nothing"]) == 1
        assert "has no key 'nothing'" in capsys.readouterr().err
        assert main(["keys", "revoke", *asking, OPERATOR, "--tenant", "green", "phone"]) == 0
        thread.join(30)
        assert [type(error) for error in errors] == [interpose.Unauthenticated], errors
        wait_for(lambda: refused(second.address, phone), 10)
        assert not refused(second.address, GREEN)
        # What the revoked key had running is the tenant's, and ends like the trace of a client that has gone.
        wait_for(lambda: not any(one.traces_running for one in green.status().tenants), 60)


def test_without_a_key_there_is_health_alone(second: RunningService) -> None:
    for method in (
        "/ray.serve.RayServeAPIService/ListApplications",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ):
        with pytest.raises(grpc.RpcError) as caught:
            second.channel.unary_unary(method)(b"", timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
    methods = service_pb2.DESCRIPTOR.services_by_name["Interpose"].methods_by_name
    for name in methods:
        with pytest.raises(grpc.RpcError) as caught:
            second.channel.unary_unary(f"/interpose.v1.Interpose/{name}")(b"", timeout=10)
        assert failure_of(caught.value).failure.code == pb.ERROR_CODE_UNAUTHENTICATED
    [proxy] = second.processes("ProxyActor")
    answers = {}
    for connection in psutil.Process(proxy.pid).net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            assert connection.laddr.ip.removeprefix("::ffff:") == "127.0.0.1"
            for path in ("/-/healthz", "/-/routes", "/"):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{connection.laddr.port}{path}", timeout=10) as got:
                        answers[path] = got.status
                except urllib.error.HTTPError as error:
                    answers[path] = error.code
                except (OSError, HTTPException):
                    pass  # a port that speaks no HTTP/1
    assert answers == {"/-/healthz": 200, "/-/routes": 404, "/": 404}


def test_a_refused_trace_leaves_no_session(second: RunningService) -> None:
    key = metadata(str(TENANTS[0]["api_key"]))

    def open_sessions() -> int:
        return int(second.stub.Status(service_pb2.StatusRequest(), metadata=key, timeout=20).sessions)

    before = open_sessions()
    for change in ("model", "id", "edits", "remote"):
        asked = trace()
        asked.model = "tiny"
        if change == "remote":
            asked.scope.values.add().remote.blob_id = "none"
        elif change == "edits":
            asked.edits.append("nothing")
        else:
            setattr(asked, change, "nothing like it!")
        with pytest.raises(ServiceFailure) as caught:
            second.submit(asked, metadata=key)
        fact = caught.value.failure
        assert fact.code in (pb.ERROR_CODE_INVALID_ARGUMENT, pb.ERROR_CODE_NOT_FOUND), (change, fact)
    wait_for(lambda: open_sessions() <= before, 10)
