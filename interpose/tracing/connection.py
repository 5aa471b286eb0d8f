"""What a model needs of its client, and a tracer or an edit of its model.

The classes themselves import in one direction: client, model, then tracer and edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from interpose.modules.envoy import Node
from interpose.results.job import Job
from interpose.results.session_names import SessionNames
from interpose.rpc.progress import Progress
from interpose.rpc.session import Session
from interpose.v1.service_pb2 import Limits
from interpose.v1.trace_pb2 import Prompt


class Connection(Protocol):
    """What a model needs of its client."""

    @property
    def awaited(self) -> bool:
        """Whether the client serves an event loop, which it must not block."""

    @property
    def limits(self) -> Limits:
        """What the server takes."""

    @property
    def progress(self) -> Progress:
        """Makes the client's progress bars."""

    @property
    def current_session(self) -> Session:
        """The session that traces run in here and now."""

    def tree_of(self, model: str) -> Node:
        """Return the module tree of a served model by its name."""

    def tokenizer(self, model: str) -> Any:
        """Return a model's tokenizer."""

    def call(self, method: str, request: Any) -> Any:
        """Call a method of the server that has one reply."""


class ServedModel(Protocol):
    """What both need of a model."""

    @property
    def name(self) -> str:
        """The name it is served under."""

    @property
    def tree(self) -> Node:
        """The module tree as data."""

    @property
    def limits(self) -> Limits:
        """What the server takes."""


class EditedModel(ServedModel, Protocol):
    """What an edit needs of its model."""

    def call(self, method: str, request: Any) -> Any:
        """Call a method of the server that has one reply."""


class TracedModel(ServedModel, Protocol):
    """What a tracer needs of its model."""

    @property
    def awaited(self) -> bool:
        """Whether its client serves an event loop, which it must not block."""

    @property
    def progress(self) -> Progress:
        """Makes the client's progress bars."""

    @property
    def session(self) -> Session:
        """The session that traces run in here and now."""

    @property
    def session_names(self) -> SessionNames | None:
        """What the traces of the `with client.session()` around it left in the notebook; None outside of one."""

    def tree_of(self, name: str) -> Node:
        """Return the module tree of a model of the same server by its name."""

    def encode_prompt(self, prompt: Any) -> Prompt:
        """Return a prompt as it travels; InvalidArgument for what is none."""

    def check_sampling(self, sampling: Mapping[str, object]) -> dict[str, object]:
        """Return sampling parameters that the engine has, and a `lora`; InvalidArgument for another."""

    def job_handle(self, job: Job) -> Any:
        """Return a background job as the notebook gets it."""
