"""Why a block cannot be bound, as its invoke fails with it."""

from __future__ import annotations

import logging

from executor.block.binding import BindingFailed
from executor.core.errors import Refusal
from executor.core.text import clip
from executor.interleave.following import NotFollowed
from interpose.v1 import trace_pb2 as pb
from interpose.wire.encoder import WireError

logger = logging.getLogger(__name__)


def part_cached() -> Refusal:
    """Return why a request is refused part of whose prompt was not computed."""
    return Refusal(pb.ERROR_CODE_ENGINE, "the engine served part of a traced prompt from its prefix cache")


def why_unbound(error: Exception) -> pb.Failure:
    """Return the failure of a block whose program could not be bound."""
    if isinstance(error, BindingFailed | NotFollowed):
        return error.failure
    if isinstance(error, Refusal | WireError):
        code = error.code if isinstance(error, Refusal) else pb.ERROR_CODE_INVALID_ARGUMENT
        return pb.Failure(code=code, message=clip(str(error)))
    logger.exception("a block could not be bound", exc_info=error)
    return pb.Failure(code=pb.ERROR_CODE_ENGINE, message=f"the worker could not bind the block: {type(error).__name__}")
