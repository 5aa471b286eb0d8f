"""The pool of session actors: how many run, and which actor takes the next session.

An actor is a process of 100 MiB or more that takes seconds to start. A session in it costs next to nothing. So a few actors
are ready before the first client comes, sessions are spread over them, and another actor starts when all are full.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle

from actors.naming import NAMESPACE, SESSION_PREFIX
from actors.placement import on_the_head, remote
from actors.protocol import SessionStats, Target
from actors.session_host import SessionHost
from actors.telemetry.counts import Counted
from actors.telemetry.options import Options

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
RETIRE_SECONDS = 5.0
# Calls that an actor takes at a time. Each followed trace holds one call, and workers' messages need calls beside them.
_CALLS = 20_000

Spawn = Callable[[Coroutine[Any, Any, None]], Any]


@dataclass(eq=False)
class _Member:
    """An actor that is ready, and the number of sessions that it holds or is about to hold."""

    actor: ActorHandle
    sessions: int = 0


class SessionPool:
    """The session actors of one directory, on the directory's event loop.

    Args:
        settings: a `SessionSettings`.
        spawn: runs a coroutine beside the caller.
        counted: takes what an actor counted.

    Attributes:
        settings: as given.
        targets: the engines that actors should be ready for.
        options: what the actors write for operators.
    """

    def __init__(self, settings: Any, spawn: Spawn, counted: Callable[[Counted], None] = lambda counted: None) -> None:
        self.settings = settings
        self._options = Options()
        self._counted = counted
        self.targets: list[Target] = []
        self._spawn = spawn
        self._members: list[_Member] = []
        self._starting = 0
        self._waiting = 0
        self._changed = asyncio.Event()

    @property
    def options(self) -> Options:
        """What the actors write for operators; they are told of a change."""
        return self._options

    @options.setter
    def options(self, options: Options) -> None:
        if options != self._options:
            self._options = options
            for member in self._members:
                member.actor.prepare.remote([], options)

    @property
    def ready(self) -> int:
        """Number of running actors."""
        return len(self._members)

    def has(self, actor: ActorHandle) -> bool:
        """Whether an actor belongs to the pool and is not lost."""
        return self._member(actor) is not None

    async def take(self) -> ActorHandle:
        """Return the actor with the fewest sessions, and count one more session for it.

        If all actors are full, wait until another actor has started. The caller must call `leave` or `lost` later.
        """
        self._waiting += 1
        try:
            while (member := self._free()) is None:
                self.fill()
                await self._changed.wait()
            member.sessions += 1
            return member.actor
        finally:
            self._waiting -= 1

    def leave(self, actor: ActorHandle) -> None:
        """Note that one session of an actor has ended.

        An actor that is no longer needed ends when it holds no session.
        """
        member = self._member(actor)
        if member is None:
            return
        member.sessions -= 1
        self._wake()
        if not member.sessions and len(self._members) > max(self._wanted(), self.settings.warm):
            self._members.remove(member)
            self._spawn(self._retire(actor))

    def lost(self, actor: ActorHandle) -> None:
        """End an actor that is dead or taken for dead; it takes no more sessions.

        Idempotent.
        """
        ray.kill(actor)
        member = self._member(actor)
        if member is not None:
            self._members.remove(member)
            self.fill()

    def fill(self) -> None:
        """Start the actors that are wanted and do not run."""
        for _ in range(self._wanted() - len(self._members) - self._starting):
            self._starting += 1
            self._spawn(self._start())

    async def stats(self) -> dict[str, SessionStats]:
        """Return what each session holds and does, by session id.

        Sessions of actors that cannot be reached are left out.
        """

        async def of(actor: ActorHandle) -> dict[str, SessionStats]:
            try:
                found: dict[str, SessionStats] = await actor.stats.remote()
            except ray.exceptions.ActorDiedError:
                self.lost(actor)
            except ray.exceptions.RayActorError:
                pass  # the actor cannot be reached now
            else:
                return found
            return {}

        found: dict[str, SessionStats] = {}
        for one in await asyncio.gather(*(of(member.actor) for member in list(self._members))):
            found |= one
        return found

    async def collect(self) -> None:
        """Take what the actors have counted. Actors that cannot be reached are left out."""
        for counted in await self.ask_all("counted"):
            self._counted(counted)

    async def ask_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every actor; return the answers of the actors that can be reached."""

        async def of(actor: ActorHandle) -> list[Any]:
            try:
                return [await getattr(actor, method).remote(*args)]
            except ray.exceptions.RayActorError:
                return []

        found = await asyncio.gather(*(of(member.actor) for member in list(self._members)))
        return [answer for one in found for answer in one]

    def end(self) -> None:
        """End all actors."""
        for member in self._members:
            ray.kill(member.actor)
        self._members.clear()

    async def _retire(self, actor: ActorHandle) -> None:
        """End an actor that holds no session, after it has written and told what it counted."""
        try:
            self._counted(await asyncio.wait_for(actor.retire.remote(), RETIRE_SECONDS))
        except Exception:
            logger.warning("what a session actor counted last is lost", exc_info=True)
        finally:
            ray.kill(actor)

    def _member(self, actor: ActorHandle) -> _Member | None:
        return next((member for member in self._members if member.actor == actor), None)

    def _free(self) -> _Member | None:
        least = min(self._members, key=lambda member: member.sessions, default=None)
        return least if least is not None and least.sessions < self.settings.per_actor else None

    def _wanted(self) -> int:
        sessions = sum(member.sessions for member in self._members) + self._waiting
        return max(self.settings.warm, -(-sessions // self.settings.per_actor))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _start(self) -> None:
        try:
            self._members.append(_Member(await self._ready_actor()))
        except Exception:
            logger.exception("a session actor did not start")
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._starting -= 1
            self._wake()

    async def _ready_actor(self) -> ActorHandle:
        name = SESSION_PREFIX + secrets.token_hex(8)
        here = ray.get_runtime_context().current_actor
        actor = (
            remote(SessionHost)
            .options(
                name=name,
                namespace=NAMESPACE,
                num_cpus=0,
                max_concurrency=_CALLS,
                max_restarts=0,
                enable_task_events=False,  # records of calls for Ray's dashboard, which cost each call something
                scheduling_strategy=await asyncio.to_thread(on_the_head),
            )
            .remote(name, here)
        )
        told = None
        while told != self._options:
            told = self._options
            await actor.prepare.remote(self.targets, told)
        return actor
