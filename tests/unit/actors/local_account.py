"""A directory without Ray that has the account of the tenants, for sessions of one test."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable
from typing import Any

from actors.account import Account
from actors.allowance import Allowance, Allowances
from actors.archive import Archive
from actors.protocol import Route, Target, Terms
from actors.session import Session
from interpose.v1 import trace_pb2 as pb
from interpose.wire.request import TraceRequest
from tests.unit.actors.local_directory import Uploaded

ROUTE = Route(Target("a", "d"))


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class _Method:
    """A method that gets copies of its arguments and answers, or fails, a moment later."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def remote(self, *args: Any) -> asyncio.Task[Any]:
        copies = pickle.loads(pickle.dumps(args))

        async def call() -> Any:
            await asyncio.sleep(0)
            return self._function(*copies)

        return asyncio.ensure_future(call())


class Engine:
    """Runs every trace until the test opens its gate: two prompt tokens and three generated ones.

    Attributes:
        running: traces that run now.
        most: the most that ran at a time.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.running = self.most = 0
        self.fails = False

    async def run(self, route: Route, request: TraceRequest) -> AsyncGenerator[bytes, None]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            yield pb.Event(output=pb.Output(token_ids=[6], prompt_token_ids=[1, 2])).SerializeToString()
            await self.gate.wait()
            if self.fails:
                raise ValueError("the engine fails")
            yield pb.Event(output=pb.Output(token_ids=[7, 8], finished=True)).SerializeToString()
        finally:
            self.running -= 1


class LocalAccount:
    """A directory whose sessions belong to the tenant "red"."""

    def __init__(self, **quotas: int) -> None:
        self.clock = Clock()
        self.account = Account(self._turn, self.clock)
        self.account.allowances = Allowances(tenants={"red": Allowance(**quotas)})
        self.engine = Engine()
        self.sessions: dict[str, Session] = {}
        self.archive = Archive()
        for name in ("keep", "drop", "drop_variables"):
            setattr(self, name, _Method(getattr(self.archive, name)))
        self.admit = _Method(lambda *args: self.account.admit("red", *args))
        self.hold = _Method(lambda *args: self.account.hold("red", *args))
        self.settle = _Method(self.account.settle)
        self.uploaded = Uploaded()
        self.find_upload, self.keep_upload = self.uploaded.find_upload, self.uploaded.keep_upload

    async def open(self, session_id: str, kept: bool = False, stored_bytes: int = 1 << 20) -> Session:
        """Open a session of the tenant."""
        terms = Terms(600.0, stored_bytes, 900.0, counted=True)
        session = self.sessions[session_id] = Session(self.engine, self, terms)  # type: ignore[arg-type]
        self.archive.begin(session_id, kept)
        await session.open(session_id, kept, terms)
        return session

    async def settled(self) -> None:
        """Wait until every call that is under way has ended."""
        for _ in range(50):
            await asyncio.sleep(0)

    def used(self, name: str) -> float:
        """Return how much of a quota is used."""
        return next(one.used for one in self.account.usage("red").quotas if one.name == name)

    def _turn(self, session_id: str, key: str) -> None:
        self.sessions[session_id].turn(key)


def submission(trace_id: str, session_id: str = "s", tokens: int = 10, job: bool = True) -> Any:
    """What the ingress hands to a session."""
    accepted = pb.Accepted(trace_id=trace_id, session_id=session_id, model="m", invokes=1)
    request = TraceRequest(
        pb.Trace(id=trace_id).SerializeToString(), session_id=session_id, trace_id=trace_id,
        accepted=pb.Event(accepted=accepted).SerializeToString(), max_saved_bytes=1 << 30, job=job, keep=job, tokens=tokens,
    )  # fmt: skip
    return request, ROUTE, {}
