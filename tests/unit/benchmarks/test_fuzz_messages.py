"""What the fuzz sends: the same for a seed, mostly messages, and none too long."""

from __future__ import annotations

from benchmarks.fuzz_messages import Messages, parsed
from interpose.v1 import service_pb2, value_pb2
from interpose.v1 import trace_pb2 as pb


def real() -> dict[str, list[service_pb2.SubmitRequest | service_pb2.FetchRequest]]:
    value = value_pb2.Value(list=value_pb2.Items(items=[value_pb2.Value(integer=3), value_pb2.Value(text="x")]))
    program = pb.Program(source="a = 1", writes=["a"], reads=[value_pb2.Binding(name="b", value=value)])
    trace = pb.Trace(id="t", model="m", invokes=[pb.Invoke(prompt=pb.Prompt(text="one"), program=program)])
    return {
        "Submit": [service_pb2.SubmitRequest(protocol=1, session_id="s", trace=trace)],
        "Fetch": [service_pb2.FetchRequest(session_id="s", blob_id="b", length=3)],
    }


def made(seed: int) -> list[bytes]:
    messages = Messages(dict(real()), seed)  # type: ignore[arg-type]
    messages.learn("of the service")
    return [messages.message(name) for _ in range(400) for name in ("Submit", "Fetch")]


def test_messages_are_of_their_seed() -> None:
    first = made(7)
    assert first == made(7) and first != made(8)
    assert len(set(first)) > 300 and max(map(len, first)) <= 200_000
    submits = [parsed(service_pb2.SubmitRequest, data) for data in first[::2]]
    understood = [one for one in submits if one is not None]
    assert 0.7 < len(understood) / len(submits) < 1.0, "most are messages, and some are not"
    assert any("of the service" in data.decode(errors="replace") for data in first)
    deep = max(str(one).count("list {") for one in understood)
    assert deep > 20, "some are nested deeply"
