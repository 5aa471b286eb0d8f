"""Events in bundles are what protobuf makes of them, and come apart as they were."""

from __future__ import annotations

import pytest

from interpose.v1 import trace_pb2 as pb
from interpose.wire.events import BUNDLE_BYTES, apart, bundles, kind_of


def log(text: str) -> bytes:
    return pb.Event(log=pb.Log(text=text)).SerializeToString()


def test_a_bundle_is_the_message_of_its_events() -> None:
    events = [log("a"), log("b" * 300), pb.Event(done=pb.Done()).SerializeToString()]
    [bundle] = bundles(events)
    assert kind_of(bundle) == "bundle"
    message = pb.Event.FromString(bundle)
    assert message.SerializeToString() == bundle
    assert [event.SerializeToString() for event in message.bundle.events] == events == apart(bundle)


def test_an_event_without_another_is_no_bundle() -> None:
    assert list(bundles([log("a")])) == [log("a")] == apart(log("a"))
    assert not list(bundles([]))


@pytest.mark.parametrize("size", [BUNDLE_BYTES // 2 + 1, BUNDLE_BYTES, 2 * BUNDLE_BYTES])
def test_large_events_travel_by_themselves(size: int) -> None:
    events = [log("a"), log("b" * size), log("c" * size), log("d")]
    together = list(bundles(events))
    assert [event for bundle in together for event in apart(bundle)] == events
    assert all(len(bundle) <= BUNDLE_BYTES + 16 or kind_of(bundle) == "log" for bundle in together)
