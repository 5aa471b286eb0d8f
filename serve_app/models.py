"""The models that clients can ask for: the ingress's own, and those of other applications."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.failures import unavailable
from actors.protocol import Announced, DirectoryStatus, ModelState, Target
from interpose.contract.errors import ServiceFailure
from interpose.v1 import model_pb2
from serve_app.settings import ModelSettings

DESCRIBED_SECONDS = 2.0


@dataclass
class ServedModel:
    """One model, as the ingress knows it.

    Attributes:
        target: the deployment that holds the model's engine.
        engine: a handle to that deployment.
        description: the engine's description of the model, once the ingress has asked for it.
    """

    settings: ModelSettings
    target: Target
    engine: DeploymentHandle
    description: model_pb2.ModelDescription | None = None
    _waking: asyncio.Task[None] | None = field(default=None, compare=False, repr=False)

    def state(self, known: ModelState) -> str:
        """Return the model's state: the replicas' state, or IDLE if nobody uses the model.

        An idle model has no replica.
        """
        return "IDLE" if known.state == "UNHEALTHY" and self.settings.scales_to_zero else known.state

    def check_running(self, known: ModelState) -> None:
        """Refuse a call if the model's engine does not run; an idle model is woken.

        Raises:
            ServiceFailure: UNAVAILABLE.
        """
        name, state = self.settings.name, self.state(known)
        if state == "IDLE":
            self.wake()
            raise ServiceFailure(
                unavailable(f"nobody has used {name} for a while, so that it has no engine: one starts now")
            )
        if state != "RUNNING":
            raise ServiceFailure(unavailable(f"the engine of {name} is {state.lower()}"))

    def wake(self) -> None:
        """Make Serve start an engine of an idle model, by a call that waits for the engine."""
        if self._waking is None or self._waking.done():
            # A separate context: otherwise Serve takes this call for a part of the call that asks for the model.
            self._waking = asyncio.get_running_loop().create_task(self._ping(), context=contextvars.Context())

    async def _ping(self) -> None:
        with contextlib.suppress(Exception):  # the next call that uses the model reports the error
            await self.engine.ping.remote()


class ServedModels:
    """All models, by name.

    Args:
        app: the name of the ingress's own application.
        own: the models of that application.
        engines: handle of each of these models' engine deployment, by the model's name.
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
        """All models, in the same order as `settings`."""
        return tuple(self._all.values())

    @property
    def targets(self) -> list[Target]:
        """The deployments that hold the models' engines."""
        return [one.target for one in self._all.values()]

    @property
    def lasting(self) -> list[Target]:
        """The deployments whose engines run even when nobody uses them.

        Sessions may connect to these in advance.
        """
        return [one.target for one in self._all.values() if not one.settings.scales_to_zero]

    def __getitem__(self, name: str) -> ServedModel:
        return self._all[name]

    def update(self, announced: Sequence[Announced]) -> bool:
        """Take over the announced models; return whether the list has changed."""
        before = self._all
        self._all = dict(self._own)
        for one in sorted(announced, key=lambda one: str(one.model.name)):
            if one.model.name in self._own:
                continue
            known = before.get(one.model.name)
            if known is None or (known.target, known.settings) != (one.target, one.model):
                # The deployment may have gone before the directory notices. Looking for it would block the event loop.
                engine = serve.get_deployment_handle(one.target.deployment, one.target.app, _check_exists=False)
                known = ServedModel(one.model, one.target, engine)
            self._all[one.model.name] = known
        return list(before.values()) != list(self._all.values())

    async def described(self, status: DirectoryStatus, ask: Callable[[ServedModel], Awaitable[object]]) -> ServedModels:
        """Ask the engines that run for their descriptions; return the models.

        A model that does not answer in time stays without a description.

        Args:
            status: which engines run.
            ask: asks for the description of a model, and keeps it.
        """
        missing = [one for one in self.all if one.description is None]
        running = [one for one in missing if (known := status.models.get(one.target)) and known.state == "RUNNING"]
        calls = (asyncio.wait_for(ask(one), DESCRIBED_SECONDS) for one in running)
        await asyncio.gather(*calls, return_exceptions=True)
        return self
