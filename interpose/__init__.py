"""Run your own code inside a served model's forward pass.

    client = interpose.connect("localhost:9000")
    model = client.model()
    print(model)  # the module tree
    with model.trace("The Eiffel Tower is in", max_tokens=3) as tracer:
        hidden = model.model.layers[2].output[0].save()  # [tokens, hidden]
    print(hidden.shape, tracer.result.text)

The body of the block does not run in the notebook. The client sends its source to the engine, and the engine runs it inside
the forward pass. After the block, the names of saved values hold these values. A name that the block assigned without
`.save()` keeps the value it had before the block.

More help: `help(interpose.connect)`; `help(interpose.Model)` for trace, generate, scan and edit; `help(interpose.Tracer)` for
the methods of a tracer; `help(interpose.Client)` for sessions and jobs; `help(interpose.InterposeError)` for errors.
`interpose.connect_async` connects a client for asyncio. `help(interpose.verbs)` for the experiments of the field, and
`help(interpose.plots)` for their pictures.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interpose import plots, verbs
    from interpose.aio.client import AsyncClient, AsyncModel, connect_async
    from interpose.aio.handles import AsyncJob, AsyncSession
    from interpose.contract.accounting import Accounting
    from interpose.contract.cache import Cache
    from interpose.contract.errors import (
        Cancelled,
        DeadlineExceeded,
        EngineError,
        InterposeError,
        InterposeWarning,
        InterventionError,
        InvalidArgument,
        NotFound,
        OutOfOrder,
        PermissionDenied,
        QuotaExceeded,
        Unauthenticated,
        Unavailable,
        UnknownLocation,
        UnsavedWarning,
        VersionMismatch,
    )
    from interpose.contract.explanation import ExplainedPart, Explanation
    from interpose.contract.result import Logprob, Result
    from interpose.contract.saving import save
    from interpose.contract.tracebacks import full_tracebacks
    from interpose.contract.version import VERSION as __version__
    from interpose.modules.envoy import Envoy
    from interpose.results.job import Job, JobResult, JobStatus
    from interpose.results.stream import StreamOutput
    from interpose.rpc.remote import RemoteValue
    from interpose.tracing.client import Client, connect
    from interpose.tracing.model import Model
    from interpose.tracing.tracer import Tracer
    from interpose.wire.arrays import ShapeOnly

# The module of each public name. A module is imported when its name is first used, so that `import interpose` is fast.
_HOMES = {
    "Accounting": "contract.accounting",
    "AsyncClient": "aio.client",
    "AsyncJob": "aio.handles",
    "AsyncModel": "aio.client",
    "AsyncSession": "aio.handles",
    "Cache": "contract.cache",
    "Client": "tracing.client",
    "connect_async": "aio.client",
    "connect": "tracing.client",
    "Envoy": "modules.envoy",
    "ExplainedPart": "contract.explanation",
    "Explanation": "contract.explanation",
    "Job": "results.job",
    "JobResult": "results.job",
    "JobStatus": "results.job",
    "Logprob": "contract.result",
    "Model": "tracing.model",
    "RemoteValue": "rpc.remote",
    "ShapeOnly": "wire.arrays",
    "Result": "contract.result",
    "StreamOutput": "results.stream",
    "Tracer": "tracing.tracer",
    "full_tracebacks": "contract.tracebacks",
    "save": "contract.saving",
    "__version__": "contract.version",
} | dict.fromkeys(
    (
        "Cancelled",
        "DeadlineExceeded",
        "EngineError",
        "InterposeError",
        "InterposeWarning",
        "InterventionError",
        "InvalidArgument",
        "NotFound",
        "OutOfOrder",
        "PermissionDenied",
        "QuotaExceeded",
        "Unauthenticated",
        "Unavailable",
        "UnknownLocation",
        "UnsavedWarning",
        "VersionMismatch",
    ),
    "contract.errors",
)

# Folders that are public as they are.
_FOLDERS = ("plots", "verbs")

# With these names a notebook begins, which then gets tab completion and short tracebacks.
_CONNECTING = ("connect", "connect_async")

__all__ = [
    "Accounting",
    "AsyncClient",
    "AsyncJob",
    "AsyncModel",
    "AsyncSession",
    "Cache",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "EngineError",
    "Envoy",
    "ExplainedPart",
    "Explanation",
    "InterposeError",
    "InterposeWarning",
    "InterventionError",
    "InvalidArgument",
    "Job",
    "JobResult",
    "JobStatus",
    "Logprob",
    "Model",
    "NotFound",
    "OutOfOrder",
    "PermissionDenied",
    "QuotaExceeded",
    "RemoteValue",
    "Result",
    "ShapeOnly",
    "StreamOutput",
    "Tracer",
    "Unauthenticated",
    "Unavailable",
    "UnknownLocation",
    "UnsavedWarning",
    "VersionMismatch",
    "__version__",
    "connect",
    "connect_async",
    "full_tracebacks",
    "plots",
    "save",
    "verbs",
]


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"interpose.{name}")
    home = _HOMES.get(name)
    if home is None:
        hint = importlib.import_module("interpose.contract.idioms").OF_PACKAGE.get(name, "")
        raise AttributeError(f"module 'interpose' has no attribute {name!r}{hint and f': {hint}'}")
    value = getattr(importlib.import_module(f"interpose.{home}"), "VERSION" if name == "__version__" else name)
    globals()[name] = value
    if name in _CONNECTING:
        importlib.import_module("interpose.notebook.install").install()
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
