"""The models that clients can ask for: those of the ingress's own application, and those that other applications announce."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.protocol import Announced, ModelState, Target
from interpose.v1 import model_pb2
from serve_app.settings import ModelSettings


@dataclass
class ServedModel:
    """One model, as the ingress knows it.

    Attributes:
        target: the deployment that holds its engine.
        engine: a handle to that.
        description: what its engine said of it, once it was asked.
    """

    settings: ModelSettings
    target: Target
    engine: DeploymentHandle
    description: model_pb2.ModelDescription | None = None
    _waking: asyncio.Task[None] | None = field(default=None, compare=False, repr=False)

    def state(self, known: ModelState) -> str:
        """Return its state in a word: what its replicas say, or IDLE if there are none because nobody uses it."""
        return "IDLE" if known.state == "UNHEALTHY" and self.settings.scales_to_zero else known.state

    def wake(self) -> None:
        """Have Serve start an engine of an idle model, by a call that waits for one."""
        if self._waking is None or self._waking.done():
            # In a context of its own: Serve would take it for a part of the call that asks for the model.
            self._waking = asyncio.get_running_loop().create_task(self._ping(), context=contextvars.Context())

    async def _ping(self) -> None:
        with contextlib.suppress(Exception):  # whoever wants to use the model finds out by himself
            await self.engine.ping.remote()


class ServedModels:
    """All models, by name.

    Args:
        app: the name of the ingress's own application.
        own: its models.
        engines: handle of each one's engine deployment, by the model's name.
    """

    def __init__(self, app: str, own: Sequence[ModelSettings], engines: Mapping[str, DeploymentHandle]) -> None:
        self._own = {
            model.name: ServedModel(model, Target(app, model.deployment), engines[model.name]) for model in own
        }
        self._all = self._own

    @property
    def settings(self) -> tuple[ModelSettings, ...]:
        """The settings of all models: this application's first, the others by name."""
        return tuple(one.settings for one in self._all.values())

    @property
    def all(self) -> tuple[ServedModel, ...]:
        """All of them, in the same order."""
        return tuple(self._all.values())

    @property
    def targets(self) -> list[Target]:
        """The deployments that hold their engines."""
        return [one.target for one in self._all.values()]

    @property
    def lasting(self) -> list[Target]:
        """Those whose engines are there whether anybody uses them or not, so that sessions may look for them in advance."""
        return [one.target for one in self._all.values() if not one.settings.scales_to_zero]

    def __getitem__(self, name: str) -> ServedModel:
        return self._all[name]

    def update(self, announced: Sequence[Announced]) -> bool:
        """Take note of what engines there are; returns whether that changes anything."""
        before = self._all
        self._all = dict(self._own)
        for one in sorted(announced, key=lambda one: str(one.model.name)):
            if one.model.name in self._own:
                continue
            known = before.get(one.model.name)
            if known is None or (known.target, known.settings) != (one.target, one.model):
                # It may be gone before the directory notices, and looking for it would stop everything else meanwhile.
                engine = serve.get_deployment_handle(one.target.deployment, one.target.app, _check_exists=False)
                known = ServedModel(one.model, one.target, engine)
            self._all[one.model.name] = known
        return list(before.values()) != list(self._all.values())
