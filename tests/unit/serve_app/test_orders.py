"""What a session gets to know of a trace, and what whoever attaches to it will read first."""

from __future__ import annotations

from actors.protocol import Target
from interpose.v1 import trace_pb2 as pb
from interpose.v1.value_pb2 import Items, Value
from serve_app.orders import order_of
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
    order = order_of(trace(), ("b",), (), (b"e",), "s", MODEL, Target("a", "d"), "r", True)
    accepted = pb.Accepted.FromString(order.accepted)
    assert (accepted.trace_id, accepted.session_id, accepted.model, accepted.invokes) == ("t", "s", "m", 2)
    assert [(one.name, one.index) for one in accepted.captured] == [("acc", 0), ("table", 2), ("alias", 0)]
    assert order.remotes == ("b",) and order.edits == (b"e",) and order.job and order.keep


def test_what_stays_for_whoever_comes_back() -> None:
    blocking = trace()
    order = order_of(blocking, (), (), (), "s", MODEL, Target("a", "d"), "", False)
    assert not order.job and not order.keep
    blocking.remote = True
    order = order_of(blocking, (), (), (), "s", MODEL, Target("a", "d"), "", False)
    assert not order.job and order.keep
    assert order.follower != order_of(blocking, (), (), (), "s", MODEL, Target("a", "d"), "", False).follower
