"""Why the machine fails a block, or raises an error in it: the messages."""

from __future__ import annotations

from executor.core.location import Location
from executor.interleave.machine.events import Code, Failure

OUT_OF_STEP = Failure(
    Code.ENGINE, "the engine did not run the invokes that an invoke without a prompt sees in the same steps"
)
EVICTED = Failure(Code.UNAVAILABLE, "the engine ran out of cache and evicted the request while it ran; submit it again")
NOT_BOUND = Failure(Code.ENGINE, "the block could not be bound on another rank of the model")


def no_room(gang: int) -> Failure:
    """Why the requests of a gang fail that could not start in one step."""
    return Failure(
        Code.INVALID_ARGUMENT,
        f"the {gang} invokes that run together could not start in one step: the engine's KV cache has no "
        "room for all of them at once. Trace fewer or shorter prompts together, or give them a smaller max_tokens",
    )


def too_long(prompt_tokens: int) -> Failure:
    """Why a request fails whose prompt the engine cut into several steps."""
    return Failure(
        Code.INVALID_ARGUMENT,
        f"the prompt has {prompt_tokens} tokens, more than the engine runs in one step; trace a shorter one, "
        "or have max_num_batched_tokens raised where the model is served",
    )


def not_reached(location: Location) -> Failure:
    """Why a block does not get a location that the step did not come to."""
    return Failure(
        Code.UNKNOWN_LOCATION,
        f"{location} was not reached in step {location.step}: the forward pass did not call {location.path}",
        location=str(location),
    )


def divergence(awaited: object, ranks: int) -> Failure:
    """Why a block fails whose turn did not end alike on all ranks.

    Args:
        awaited: what the block waits for on this rank, None if it has ended.
        ranks: the number of ranks.
    """
    return Failure(
        Code.INTERVENTION,
        f"the block went different ways on the model's {ranks} ranks (on one it failed, ran out of time, or "
        f"asked for another location than {awaited or 'its end'}); it must not depend on the "
        "clock, on the order of sets, or on anything else that differs between processes",
        exception_type="Divergence",
        exception_message="the block went different ways on the ranks of the model",
    )


def different_values(step: int, ranks: int) -> Failure:
    """Why a block fails that wrote other values on another rank in a step."""
    return Failure(
        Code.INTERVENTION,
        f"the block wrote different values on the model's {ranks} ranks in step {step}; what it writes must not "
        "depend on the clock, on the order of sets, on generators of random numbers that it makes itself without a seed "
        "(torch.randn and numpy.random are the same on all ranks), or on operations whose results differ from run to run",
        exception_type="Divergence",
        exception_message="the block wrote different values on the ranks of the model",
    )


def not_finite(step: int) -> Failure:
    """Why a block fails whose request left a NaN or infinity in the cache in a step."""
    return Failure(
        Code.INTERVENTION,
        f"what the block changed made keys or values of the attention NaN, infinite, or too large to compute with, in step "
        f"{step} or shortly before: they would stay in the engine's cache, which other requests use afterwards; keep what you "
        "write finite, as with torch.nan_to_num",
        exception_type="NotFinite",
        exception_message="keys or values that are not finite",
    )


def broken(why: str) -> Failure:
    """Why a block does not pass a barrier."""
    return Failure(Code.INVALID_ARGUMENT, why, location="barrier()")
