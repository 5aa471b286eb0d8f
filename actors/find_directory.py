"""Finds the cluster's directory for replicas of the ingress and of engines.

The first replica makes the directory.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from actors.directory import Directory
from actors.naming import DIRECTORY, NAMESPACE
from actors.placement import on_the_head, remote

_ANSWER_SECONDS = 60.0
# Calls that the directory takes at a time. A call that brings a saved value waits for the session, and the session may ask
# the directory in the meantime: so these calls must never take all.
_CALLS = 20_000


def serve_id() -> str:
    """Return an id of the running Serve instance.

    It differs from the id of an instance that ran before on the same cluster.
    """
    controller: Any = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    return str(controller._actor_id.hex())


def own_directory(sessions: Any) -> ActorHandle:
    """Return the directory of the running Serve instance; make it if there is none.

    A directory that was made under an earlier Serve instance is ended, with its sessions: they would look for engines of
    the earlier instance, and wait for ever.

    Args:
        sessions: the `SessionSettings` of a new directory.
    """
    now = serve_id()
    while True:
        found = directory(sessions)
        try:
            if ray.get(found.made_under.remote(), timeout=_ANSWER_SECONDS) == now:
                return found
            ray.kill(found)
        except RayActorError:
            pass  # the ended directory's name is free in a moment
        time.sleep(0.1)


def directory(sessions: Any) -> ActorHandle:
    """Return the cluster's directory; make it if there is none.

    Args:
        sessions: the `SessionSettings` of a new directory.
    """
    return (
        remote(Directory)
        .options(
            name=DIRECTORY,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=_CALLS,
            max_restarts=0,
            enable_task_events=False,
            scheduling_strategy=on_the_head(),
        )
        .remote(sessions, serve_id())
    )
