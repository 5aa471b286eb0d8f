"""The session actor: a process that holds many sessions.

A process for each session would cost more than the session itself. The actor runs no code of a client. A client's call
carries a session's id, a worker's message carries a trace's key; so each reaches its own session, and a session sees
nothing of another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import ray

from actors.archive import Kept
from actors.caller_watch import CallerWatch
from actors.engine_stream import EngineCalls
from actors.failures import not_found
from actors.grouped import Item, merged
from actors.protocol import SessionStats, Target, Terms
from actors.saved import Saved
from actors.session import Session
from actors.telemetry.counts import Counted
from actors.telemetry.options import Options
from actors.telemetry.telemetry import Telemetry

SWEEP_SECONDS = 10.0
LOOK_SECONDS = 1.0

# The methods of `Session` that the ingress calls.
_ASKED = frozenset("upload start job describe leave cancel blob_ref fetched saved plain may_run told".split())
_FOLLOWED = frozenset({"run", "attach"})


class SessionHost:
    """State of a session actor; every method runs on the actor's event loop.

    Args:
        name: the actor's name; workers send saved values and logs there.
        directory: handle of the directory.
    """

    def __init__(self, name: str, directory: Any) -> None:
        self._directory = directory
        self._engines = EngineCalls(name, directory)
        self._sessions: dict[str, Session] = {}
        self._telemetry = Telemetry("session")
        self._retention = SWEEP_SECONDS
        self._watch = CallerWatch()
        self._sweeper: asyncio.Task[None] | None = None
        self._looker: asyncio.Task[None] | None = None

    # The directory's side

    async def prepare(self, targets: list[Target], options: Options | None = None) -> None:
        """Get ready to hold sessions: make a handle to each engine.

        Args:
            targets: the engines.
            options: what the actor writes for operators.
        """
        if options is not None:
            self._telemetry.heed(options)
        for target in targets:
            with contextlib.suppress(Exception):  # the engine may have gone: the next call that uses it says so
                self._engines.warm(target)
        self._sweeper = self._sweeper or asyncio.create_task(self._sweep())
        self._looker = self._looker or asyncio.create_task(self._look())

    async def open(self, session_id: str, kept: bool, terms: Terms) -> None:
        """Begin a session (see `Session.open`)."""
        self._retention = terms.retention_seconds
        session = Session(self._engines, self._directory, terms, self._telemetry, self._watch)
        await session.open(session_id, kept, terms)
        self._sessions[session_id] = session

    async def restore(self, session_id: str, kept: Kept, terms: Terms) -> None:
        """Go on with a session whose actor is dead (see `Session.restore`)."""
        session = Session(self._engines, self._directory, terms, self._telemetry, self._watch)
        await session.restore(session_id, kept, terms)
        self._sessions[session_id] = session

    async def close(self, session_id: str) -> SessionStats | None:
        """End a session: cancel its traces and drop its values.

        Returns:
            What the session held and did; None if there is no such session.
        """
        session = self._sessions.pop(session_id, None)
        return await session.close() if session is not None else None

    async def heed(self, session_id: str, terms: Terms) -> None:
        """Set the rules for a session from now on."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.heed(terms)

    async def turn(self, session_id: str, key: str) -> None:
        """Note that a trace of a session may run (see `Session.turn`)."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.turn(key)

    async def leave_jobs(self, session_id: str) -> bool:
        """Note that the client goes and leaves only its jobs (see `Session.leave_jobs`).

        False if there is no such session.
        """
        session = self._sessions.get(session_id)
        return session is not None and await session.leave_jobs()

    async def stats(self) -> dict[str, SessionStats]:
        """Return what each session holds and does, by session id."""
        return {session_id: await session.stats() for session_id, session in list(self._sessions.items())}

    # The operator's side

    async def counted(self) -> Counted:
        """Return what was counted since the last call."""
        return self._telemetry.take()

    async def traces(self) -> list[bytes]:
        """Return the traces that wait or run, as serialized `TraceRow`s."""
        return [row.SerializeToString() for session in self._sessions.values() for row in session.rows()]

    async def cancel_key(self, key: str) -> bool:
        """Cancel a trace by its key; return whether it was running here."""
        session = self._with(key)
        return session is not None and await session.cancel_key(key)

    async def retire(self) -> Counted:
        """Write all that waits to be written, because the actor ends; return what was counted."""
        await asyncio.to_thread(self._telemetry.close)
        return self._telemetry.take()

    # The client's side, through the ingress

    async def ask(self, session_id: str, method: str, *args: Any) -> Any:
        """Call a method of a session.

        Raises:
            ServiceFailure: NOT_FOUND, the session has ended; or what the method raises.
        """
        return await self._method(session_id, method, _ASKED)(session_id, *args)

    async def follow(self, session_id: str, method: str, *args: Any) -> AsyncGenerator[bytes, None]:
        """Yield the serialized events that a session's method yields.

        Raises:
            ServiceFailure: as for `ask`.
        """
        async for event in self._method(session_id, method, _FOLLOWED)(*args):
            yield event

    async def follow_all(self, calls: list[tuple[Any, ...]]) -> AsyncIterator[list[Item]]:
        """Yield what `follow` yields for each of some calls (see `merged`)."""
        async for some in merged([self.follow(*call) for call in calls]):
            yield some

    # The workers' side

    async def log(self, key: str, invoke: int, text: str) -> None:
        """Record a text that a block printed."""
        if (session := self._with(key)) is not None:
            await session.log(key, invoke, text)

    async def adopt(self, key: str, blob_id: str, saved: Saved) -> None:
        """Take one saved value, which the directory owns."""
        if (session := self._with(key)) is not None:
            await session.adopt(key, blob_id, saved)

    async def no_room(self, key: str) -> None:
        """Note that the object store has no room for a saved value."""
        if (session := self._with(key)) is not None:
            await session.no_room(key)

    async def increment(self, key: str, data: bytes) -> None:
        """Take a serialized event with values that a block of a streamed trace saved."""
        if (session := self._with(key)) is not None:
            await session.increment(key, data)

    async def blobs(self, key: str, ids: list[str]) -> list[ray.ObjectRef]:
        """Return references to the blobs that a trace needs (see `Session.blobs`)."""
        session = self._with(key)
        if session is None:
            raise not_found(f"there is no trace {key}")
        return await session.blobs(key, ids)

    # Internal

    def _method(self, session_id: str, method: str, known: frozenset[str]) -> Callable[..., Any]:
        if method not in known:
            raise ValueError(f"a session is not asked for {method!r}")
        session = self._sessions.get(session_id)
        if session is None:
            raise not_found("the session has ended; open a new one")
        found: Callable[..., Any] = getattr(session, method)
        return found

    def _with(self, key: str) -> Session | None:
        """Return the session of a trace."""
        return next((session for session in self._sessions.values() if session.has(key)), None)

    async def _look(self) -> None:
        """Find out again and again whether an ingress is gone."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with contextlib.suppress(Exception):  # Ray's control process may be away for a while
                await self._watch.look()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self._retention / 2))
            for session in list(self._sessions.values()):
                session.sweep()
