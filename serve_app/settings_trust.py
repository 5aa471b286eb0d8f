"""Where blocks run, by the trust of the service's tenants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from executor.sandbox.kernel import missing
from serve_app.settings_model import ModelSettings


class Trusted(Protocol):
    """A tenant, as far as trust goes.

    Attributes:
        name: the tenant's name.
        trust: "none", "code" or "full".
    """

    @property
    def name(self) -> str: ...

    @property
    def trust(self) -> str: ...


def sandboxes(model: ModelSettings, tenants: Sequence[Trusted], grows: bool) -> bool:
    """Return whether blocks of tenants without trust run in sandboxed processes.

    Args:
        model: the model.
        tenants: the service's tenants.
        grows: whether there may be other tenants later.
    """
    if model.sandbox != "auto":
        return model.sandbox == "on"
    return grows or (len(tenants) > 1 and any(tenant.trust == "none" for tenant in tenants))


def decided(models: Iterable[ModelSettings], tenants: Sequence[Trusted], grows: bool) -> tuple[ModelSettings, ...]:
    """Return models whose `sandbox` is "on" or "off".

    The arguments are those of `sandboxes`.
    """
    states = {True: "on", False: "off"}
    return tuple(model.model_copy(update={"sandbox": states[sandboxes(model, tenants, grows)]}) for model in models)


def warnings(models: Iterable[ModelSettings], tenants: Sequence[Trusted], grows: bool) -> Iterator[str]:
    """Yield what an operator should know of where blocks run.

    The arguments are those of `sandboxes`.
    """
    lesser = [tenant.name for tenant in tenants if tenant.trust == "none"]
    more = [tenant.name for tenant in tenants if tenant.trust != "none"]
    for model in models:
        apart = sandboxes(model, tenants, grows)
        if lesser and more and model.accepts == "all":
            yield (
                f"model {model.name}: blocks of {_named(more)} run in the workers' own processes, where they can read and change "
                f"everything of {_named(lesser)}, who have less trust; let a model serve one kind only (`accepts`)"
            )
        if len(lesser) > 1 and not apart and model.accepts != "trusted":
            yield (
                f"model {model.name}: its sandbox is off, so that {_named(lesser)} can read and change what is of the others"
            )
        if apart and (lacks := missing()):
            yield (
                f"model {model.name}: this machine lacks {', '.join(lacks)} for sandboxed processes; traces of tenants "
                "with trust none are refused unless the model's `sandbox` is off"
            )


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
