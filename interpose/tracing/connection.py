"""Protocols between the classes of this package: client, model, tracer and edit.

With them the classes import in one direction: client, model, then tracer and edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from interpose.modules.tree import Node
from interpose.program.libraries import Libraries
from interpose.results.job import Job
from interpose.results.session_names import SessionNames
from interpose.rpc.progress import Progress
from interpose.rpc.session import Session
from interpose.v1.service_pb2 import Limits
from interpose.v1.trace_pb2 import Prompt


class Connection(Protocol):
    """The part of a client that a model uses."""

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

    @property
    def libraries(self) -> Libraries:
        """What the server has of the notebook's libraries."""

    def tree_of(self, model: str) -> Node:
        """Return the module tree of a served model by its name."""

    def tokenizer(self, model: str) -> Any:
        """Return a model's tokenizer."""

    def call(self, method: str, request: Any) -> Any:
        """Call a method of the server that has one reply."""


class ServedModel(Protocol):
    """The part of a model that both a tracer and an edit use."""

    @property
    def name(self) -> str:
        """The name that the server gives the model."""

    @property
    def tree(self) -> Node:
        """The module tree as data."""

    @property
    def limits(self) -> Limits:
        """What the server takes."""

    @property
    def libraries(self) -> Libraries:
        """What the server has of the notebook's libraries."""


class EditedModel(ServedModel, Protocol):
    """The part of a model that an edit uses."""

    def call(self, method: str, request: Any) -> Any:
        """Call a method of the server that has one reply."""


class TracedModel(ServedModel, Protocol):
    """The part of a model that a tracer uses."""

    @property
    def awaited(self) -> bool:
        """Whether the model's client serves an event loop, which it must not block."""

    @property
    def progress(self) -> Progress:
        """Makes the client's progress bars."""

    @property
    def session(self) -> Session:
        """The session that traces run in here and now."""

    @property
    def session_names(self) -> SessionNames | None:
        """The names that the traces of the session block assigned; None outside of such a block."""

    def tree_of(self, name: str) -> Node:
        """Return the module tree of another model of the same server."""

    def encode_prompt(self, prompt: Any) -> Prompt:
        """Return a prompt as a message; raise InvalidArgument for another object."""

    def check_sampling(self, sampling: Mapping[str, object]) -> dict[str, object]:
        """Return the sampling parameters and a `lora`, checked; raise InvalidArgument."""

    def job_handle(self, job: Job) -> Any:
        """Return the object that `tracer.job` gives for a job."""
