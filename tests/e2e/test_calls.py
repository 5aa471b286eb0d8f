"""The service as any gRPC client sees it: what it answers to messages that no client of ours sends."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import uuid

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from interpose.contract.errors import ServiceFailure
from interpose.contract.version import PROTOCOL
from interpose.v1 import service_pb2, value_pb2
from interpose.v1 import trace_pb2 as pb
from serve_app.ingress.health import MAX_WATCHERS
from tests.e2e.service import RunningService, failure_of, wait_for

SAVE = "hidden = model.model.layers[0].output[0].save()\n"


def trace(source: str = SAVE, writes: tuple[str, ...] = ("hidden",), **sampling: int) -> pb.Trace:
    """A trace of one invoke on the llama."""
    program = pb.Program(source=source, filename="cell", first_line=1, writes=writes)
    program.reads.add(name="model", value=value_pb2.Value(module=""))
    program.reads.add(name="tracer", value=value_pb2.Value(tracer=True))
    invoke = pb.Invoke(prompt=pb.Prompt(text="one two three"), program=program)
    for name, value in sampling.items():
        invoke.sampling.add(name=name, value=value_pb2.Value(integer=value))
    return pb.Trace(id=uuid.uuid4().hex, model="llama", invokes=[invoke])


def kinds(events: list[pb.Event]) -> list[str]:
    """The kinds of events."""
    return [event.WhichOneof("kind") for event in events]


def test_a_trace_is_accepted_and_done(service: RunningService, session: str) -> None:
    events = service.submit(trace(max_tokens=2), session)
    assert kinds(events)[0] == "accepted"
    assert kinds(events)[-1] == "done"
    assert events[0].accepted.session_id == session
    usage = events[-1].done.usage
    assert usage.generated_tokens == 2
    assert usage.prompt_tokens > 0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\xff\xff", "not a valid"),
        (b"\x1a\x05abc", "not a valid"),
        (b"x" * (33 << 20), "the limit is"),
    ],
)
@pytest.mark.parametrize("method", ["Submit", "Fetch"])
def test_malformed_messages(service: RunningService, data: bytes, words: str, method: str) -> None:
    call = service.channel.unary_stream(f"/interpose.v1.Interpose/{method}")
    with pytest.raises(grpc.RpcError) as caught:
        list(call(data, timeout=30))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    failure = failure_of(caught.value).failure
    assert failure.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert words in failure.message
    assert "Traceback" not in str(caught.value)


def test_malformed_unary_messages(service: RunningService) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        service.channel.unary_unary("/interpose.v1.Interpose/Upload")(b"\xff", timeout=30)
    assert "not a valid" in failure_of(caught.value).failure.message


def test_a_long_name_in_any_script_is_answered_with_a_status(service: RunningService) -> None:
    """What a failure says travels in the call's metadata, which takes so many bytes only."""
    with pytest.raises(grpc.RpcError) as caught:
        service.stub.DescribeModel(service_pb2.DescribeModelRequest(model="\U0001d49c" * 100_000), timeout=30)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert "there is no model" in failure_of(caught.value).failure.message


def test_another_protocol(service: RunningService, session: str) -> None:
    request = service_pb2.SubmitRequest(protocol=PROTOCOL + 7, session_id=session, trace=trace())
    with pytest.raises(grpc.RpcError) as caught:
        list(service.stub.Submit(request, timeout=30))
    failure = failure_of(caught.value).failure
    assert failure.code == pb.ERROR_CODE_VERSION
    assert "upgrade interpose on the server" in failure.message


@pytest.mark.parametrize("session_id", ["", "nonsense", "0" * 32])
def test_a_session_that_is_not_there(service: RunningService, session_id: str) -> None:
    with pytest.raises(ServiceFailure) as caught:
        service.fetch(session_id, "x")
    assert caught.value.failure.code == pb.ERROR_CODE_NOT_FOUND


def test_a_closed_session_is_gone(service: RunningService) -> None:
    session = service.open_session()
    service.submit(trace(), session)
    service.close_session(session)
    service.close_session(session)
    with pytest.raises(ServiceFailure) as caught:
        service.submit(trace(), session)
    assert caught.value.failure.code == pb.ERROR_CODE_NOT_FOUND


def test_a_trace_runs_once_however_often_it_is_submitted(service: RunningService, session: str) -> None:
    once = trace("import random\nnumber = random.random()\nprint(number)\nnumber.save()\n", ("number",))
    first, second = service.submit(once, session), service.submit(once, session)
    assert "log" in kinds(first)
    assert first == second
    once.invokes[0].program.source = SAVE
    with pytest.raises(ServiceFailure, match="used before"):
        service.submit(once, session)


def test_an_upload_survives_repetition_and_disorder(service: RunningService, session: str) -> None:
    data = bytes(range(256)) * 1000
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"

    def send(offset: int, length: int) -> int:
        request = service_pb2.UploadRequest(session_id=session, digest=digest, size=len(data), offset=offset)
        request.data = data[offset : offset + length]
        return service.stub.Upload(request, timeout=30).received

    assert send(200_000, 56_000) == 56_000
    assert send(200_000, 56_000) == 56_000
    assert send(0, 0) == 56_000
    assert send(0, 200_000) == len(data)
    assert send(5, 5) == len(data)


def test_an_upload_with_other_bytes_is_refused(service: RunningService, session: str) -> None:
    request = service_pb2.UploadRequest(session_id=session, digest="sha256:" + "0" * 64, size=3, data=b"abc")
    with pytest.raises(grpc.RpcError) as caught:
        service.stub.Upload(request, timeout=30)
    assert "digest" in failure_of(caught.value).failure.message


def test_windows_of_a_value(service: RunningService, session: str) -> None:
    source = "hidden = model.model.layers[0].output[0].new_ones(3_000_000).cumsum(0).save()\n"
    events = service.submit(trace(source), session)
    [saves] = [event.saves for event in events if event.WhichOneof("kind") == "saves"]
    blob = next(value.tensor.blob for value in saves.objects.values if value.tensor.blob.id)
    whole = service.fetch(session, blob.id)
    assert len(whole) == blob.size == 12_000_000
    assert service.fetch(session, blob.id, offset=5_000_000, length=2_000_000) == whole[5_000_000:7_000_000]
    assert service.fetch(session, blob.id, offset=blob.size) == b""
    with pytest.raises(ServiceFailure, match="of a value that has"):
        service.fetch(session, blob.id, offset=blob.size, length=1)
    other = service.open_session()
    with pytest.raises(ServiceFailure):
        service.fetch(other, blob.id)
    service.close_session(other)


def test_cancel(service: RunningService, session: str) -> None:
    # Slow steps: by itself it would end long after it must be gone.
    slow = "import time\nfor step in tracer.iter[:]:\n    time.sleep(0.2)\n"
    endless = trace(slow, (), max_tokens=400, ignore_eos=1)
    endless.invokes[0].sampling[1].value.boolean = True
    request = service_pb2.SubmitRequest(protocol=PROTOCOL, session_id=session, trace=endless)
    events = service.stub.Submit(request, timeout=60)
    while next(events).WhichOneof("kind") != "output":
        pass
    cancel = service_pb2.CancelRequest(session_id=session, trace_id=endless.id)
    assert service.stub.Cancel(cancel, timeout=30).found
    with pytest.raises(grpc.RpcError) as caught:
        list(events)
    assert caught.value.code() == grpc.StatusCode.CANCELLED
    assert not service.stub.Cancel(cancel, timeout=30).found
    wait_for(lambda: not any(model.running for model in service.status().models), 10)


def test_opening_a_session_starts_no_process(service: RunningService) -> None:
    """Session actors hold many sessions each; how long it takes to open one is measured in benchmarks/."""
    wait_for(lambda: service.status().warm_sessions >= 2, 30)
    before = {process.pid for process in service.processes("ray::Session")}
    opened = [service.open_session() for _ in range(20)]
    after = {process.pid for process in service.processes("ray::Session")}
    for session in opened:
        service.close_session(session)
    assert after == before


def test_a_submit_that_is_refused_leaves_no_session(service: RunningService) -> None:
    """Without a session of its own a trace gets one, which goes with the trace if that does not run."""
    before = service.status().sessions
    for _ in range(3):
        refused = trace()
        refused.edits.append("nothing-of-that-name")
        with pytest.raises(ServiceFailure, match="nothing-of-that-name"):
            service.submit(refused)
    assert service.status().sessions == before
    [accepted, *_] = service.submit(trace())
    assert service.status().sessions == before + 1
    service.close_session(accepted.accepted.session_id)


def test_health(service: RunningService) -> None:
    health = health_pb2_grpc.HealthStub(service.channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=20).status == serving
    assert health.Check(health_pb2.HealthCheckRequest(service="interpose.v1.Interpose"), timeout=20).status == serving
    unknown = health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=20)
    assert unknown.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    assert health.List(health_pb2.HealthListRequest(), timeout=20).statuses["interpose.v1.Interpose"].status == serving
    for data in (b"\xff", b"x" * 5000):
        with pytest.raises(grpc.RpcError) as caught:
            service.channel.unary_unary("/grpc.health.v1.Health/Check")(data, timeout=20)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "Traceback" not in str(caught.value)


def test_so_many_may_watch_the_health(service: RunningService) -> None:
    """It needs no key, and each takes one of the calls that the ingress has room for."""
    health = health_pb2_grpc.HealthStub(service.channel)
    watches = [health.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(MAX_WATCHERS)]
    assert {next(watch).status for watch in watches} == {health_pb2.HealthCheckResponse.SERVING}
    with pytest.raises(grpc.RpcError) as caught:
        list(health.Watch(health_pb2.HealthCheckRequest(), timeout=60))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    for watch in watches:
        watch.cancel()

    def watched_again() -> bool:
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
        status = next(watch).status
        watch.cancel()
        return bool(status == health_pb2.HealthCheckResponse.SERVING)

    wait_for(watched_again, 30)


def test_only_this_machine_can_connect(service: RunningService) -> None:
    ours = {process.pid: process.name() for process in [service.process, *service.processes()]}
    listening = subprocess.run(["ss", "-ltnp"], capture_output=True, text=True, check=True).stdout
    found = {}
    for line in listening.splitlines():
        for pid in {int(pid) for pid in re.findall(r"pid=(\d+)", line)} & ours.keys():
            found[line.split()[3]] = ours[pid]
    assert service.address in {address.replace("[::ffff:127.0.0.1]", "127.0.0.1") for address in found}
    open_to_others = {address: name for address, name in found.items() if "127.0.0.1" not in address}
    assert not open_to_others


def test_the_command_says_what_it_does_while_it_starts(service: RunningService) -> None:
    stages = [line.split(" s  ", 1)[1] for line in service.output.splitlines() if re.match(r" *\d+ s  ", line)]
    assert stages[0] == "starting Ray" and "almost ready" in stages and "opening the port" in stages
    for model in ("llama", "gpt2"):
        assert any(f"{model}: starting workers and loading the model" in stage for stage in stages), stages


def test_each_worker_says_how_far_it_is_and_when_it_was_up(service: RunningService) -> None:
    told = re.findall(r"worker (\d+): (importing vLLM|loading the model|[^,:]*loaded after (\d+) s)", service.output)
    whole = re.search(r"^interpose: serving .* \((\d+) s\)$", service.output, re.MULTILINE)
    assert whole is not None
    for rank in ("0", "1"):
        assert any(worker == rank and not took for worker, _, took in told), told
        seconds = [int(took) for worker, _, took in told if worker == rank and took]
        assert seconds and min(seconds) > 0 and max(seconds) <= int(whole[1]), told
    assert "worker 0: importing vLLM, worker 1: importing vLLM" in service.output, (
        "one after the other takes twice as long"
    )


def test_an_engine_that_compiles_says_so(service: RunningService) -> None:
    told = [line for line in service.output.splitlines() if "compiling the model" in line]
    assert any(re.search(r"llama: [^,]*\(worker 0: compiling the model", line) for line in told), service.output
    if not torch.cuda.is_available():  # the other model is eager
        assert not any(re.search(r"gpt2: [^,]*\(worker 0: compiling the model", line) for line in told), told


def test_the_status_command(service: RunningService, session: str) -> None:
    command = [sys.executable, "-m", "interpose.cli", "status", "--address", service.address]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert re.search(r"^llama +RUNNING +1 ", result.stdout, re.MULTILINE)
    assert re.search(r"^anonymous +1 ", result.stdout, re.MULTILINE)
