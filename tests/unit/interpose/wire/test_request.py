"""A trace on its way through the service: its bytes, and what is known of them without parsing them."""

from __future__ import annotations

import pytest

from interpose.v1 import service_pb2
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Objects, Value
from interpose.wire.events import kind_of
from interpose.wire.request import TraceRequest

KINDS = [field.name for field in pb.Event.DESCRIPTOR.fields]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_an_event_is_known_without_parsing_it(kind: str) -> None:
    event = pb.Event()
    getattr(event, kind).SetInParent()
    assert kind_of(event.SerializeToString()) == event.WhichOneof("kind") == kind


def test_kinds_of_events_with_contents() -> None:
    assert kind_of(pb.Event(output=pb.Output(invoke=3, text="x" * 1000)).SerializeToString()) == "output"
    assert kind_of(pb.Event(increment=pb.Increment(sequence=9)).SerializeToString()) == "increment"


@pytest.mark.parametrize("data", [b"", b"\xff", b"\xff" * 20, b"\xfa\x7f\x00"])
def test_what_is_no_event_has_no_kind(data: bytes) -> None:
    assert kind_of(data) == ""


def test_a_request_parses_to_its_trace_under_its_key_with_its_edits() -> None:
    trace = pb.Trace(id="mine", scope=Objects(values=[Value(text="x")]), invokes=[pb.Invoke()])
    edits = tuple(pb.Edit(name=name).SerializeToString() for name in "ab")
    parsed = TraceRequest(trace.SerializeToString(), edits, key="k.mine").parse()
    assert parsed.id == "k.mine" and [edit.name for edit in parsed.applied] == ["a", "b"]
    assert parsed.scope == trace.scope and parsed.invokes == trace.invokes


def test_the_bytes_of_a_trace_come_out_of_a_submit_as_they_were_sent() -> None:
    trace = pb.Trace(id="t", scope=Objects(values=[Value(text="x")]))
    sent = service_pb2.SubmitRequest(protocol=7, session_id="s", trace=trace, job=True)
    got = service_pb2.UnparsedSubmit.FromString(sent.SerializeToString())
    assert (got.protocol, got.session_id, got.job) == (7, "s", True)
    assert got.trace == trace.SerializeToString()


def test_the_two_messages_of_a_submit_have_the_same_fields() -> None:
    sent, got = service_pb2.SubmitRequest.DESCRIPTOR, service_pb2.UnparsedSubmit.DESCRIPTOR
    assert {field.name: field.number for field in sent.fields} == {field.name: field.number for field in got.fields}
    assert [field.name for field in sent.fields if field.type != got.fields_by_name[field.name].type] == ["trace"]
