"""What a session gets to know of a trace, and what a client that attaches to it will read first."""

from __future__ import annotations

from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Items, Value
from serve_app.ingress.requests import request_of
from serve_app.settings import ModelSettings

MODEL = ModelSettings(model="folder/m")


def trace() -> pb.Trace:
    made = pb.Trace(id="t", invokes=[pb.Invoke(), pb.Invoke()])
    made.scope.values.extend([Value(list=Items()), Value(text="x"), Value(dict={})])
    made.shared.add(name="acc", value=Value(ref=0))
    for invoke in made.invokes:
        invoke.program.reads.add(name="acc", value=Value(ref=0))
        invoke.program.reads.add(name="word", value=Value(ref=1))
        invoke.program.reads.add(name="number", value=Value(integer=0))
        invoke.program.reads.add(name="beyond", value=Value(ref=9))
    made.invokes[1].program.reads.add(name="table", value=Value(ref=2))
    made.invokes[1].program.reads.add(name="alias", value=Value(ref=0))
    return made


def test_names_of_containers_go_to_whoever_attaches() -> None:
    request = request_of(b"data", trace(), MODEL, "s", job=True, edits=(b"e",), remotes=("b",))
    accepted = pb.Event.FromString(request.accepted).accepted
    assert (accepted.trace_id, accepted.session_id, accepted.model, accepted.invokes) == ("t", "s", "m", 2)
    assert [(one.name, one.index) for one in accepted.captured] == [("acc", 0), ("table", 2), ("alias", 0)]
    assert request.remotes == ("b",) and request.edits == (b"e",) and request.job and request.keep
    assert request.trace == b"data", "the client's own bytes"


def test_what_stays_for_whoever_comes_back() -> None:
    blocking = trace()
    request = request_of(b"", blocking, MODEL, "s")
    assert not request.job and not request.keep
    blocking.remote = True
    request = request_of(b"", blocking, MODEL, "s")
    assert not request.job and request.keep
