"""The session actors: how many run, how many sessions each holds, and which one takes the next.

An actor is a process of 100 MiB and more, which takes seconds to start; a session in it costs next to nothing. So a few actors
are ready before anybody comes, sessions are spread over them, and another one starts when all of them are full.
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

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
# Each trace that is followed holds one of an actor's calls; what workers send must get in beside all of them.
_CALLS = 20_000

Spawn = Callable[[Coroutine[Any, Any, None]], Any]


@dataclass(eq=False)
class _Member:
    """An actor that is ready, and how many sessions it holds or is about to."""

    actor: ActorHandle
    sessions: int = 0


class SessionPool:
    """The session actors of one directory, on whose event loop it runs.

    Args:
        settings: a `SessionSettings`.
        spawn: runs something beside the caller.
    """

    def __init__(self, settings: Any, spawn: Spawn) -> None:
        self.settings = settings
        self.targets: list[Target] = []
        self._spawn = spawn
        self._members: list[_Member] = []
        self._starting = 0
        self._waiting = 0
        self._changed = asyncio.Event()

    @property
    def ready(self) -> int:
        """Actors that run."""
        return len(self._members)

    def has(self, actor: ActorHandle) -> bool:
        """Whether an actor is one of those, and not lost."""
        return self._member(actor) is not None

    async def take(self) -> ActorHandle:
        """Return the actor with the fewest sessions, which counts as having one more; wait for one to start if all are full.

        Sooner or later `leave`, or `lost`, must be called.
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
        """One session of an actor has ended; an actor that is needed no longer ends when it holds none."""
        member = self._member(actor)
        if member is None:
            return
        member.sessions -= 1
        self._wake()
        if not member.sessions and len(self._members) > max(self._wanted(), self.settings.warm):
            self.lost(actor)

    def lost(self, actor: ActorHandle) -> None:
        """An actor is dead, or taken for dead: it ends, and takes no more sessions. Idempotent."""
        ray.kill(actor)
        member = self._member(actor)
        if member is not None:
            self._members.remove(member)
            self.fill()

    def fill(self) -> None:
        """Start the actors that are wanted and not there."""
        for _ in range(self._wanted() - len(self._members) - self._starting):
            self._starting += 1
            self._spawn(self._start())

    async def stats(self) -> dict[str, SessionStats]:
        """Return what each session holds and does, by its id; of actors that cannot be reached now, nothing."""

        async def of(actor: ActorHandle) -> dict[str, SessionStats]:
            try:
                found: dict[str, SessionStats] = await actor.stats.remote()
            except ray.exceptions.ActorDiedError:
                self.lost(actor)
            except ray.exceptions.RayActorError:
                pass  # it cannot be reached now
            else:
                return found
            return {}

        found: dict[str, SessionStats] = {}
        for one in await asyncio.gather(*(of(member.actor) for member in list(self._members))):
            found |= one
        return found

    def end(self) -> None:
        """End all actors."""
        for member in self._members:
            ray.kill(member.actor)
        self._members.clear()

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
                scheduling_strategy=await asyncio.to_thread(on_the_head),
            )
            .remote(name, here)
        )
        await actor.prepare.remote(self.targets)
        return actor
