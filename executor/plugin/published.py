"""Keeps what follows a traced request's prompt from other requests in the prefix cache.

A request whose block asks for none of its prompt's rows leaves the prompt's keys and values as the model makes them. Its block
may change the values of generated tokens, so cache blocks with these are the request's own. vLLM finds a cache block by a hash of
its tokens and of all tokens before. From the first generated token on, such hashes are hashed once more with the request's id,
and no other request has the same.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request


def publish_prompt_alone(request: Request) -> None:
    """Have other requests find the cache blocks of a request's prompt alone.

    Args:
        request: it has not generated a token.
    """
    hashes_of, own = request._block_hasher, request.request_id.encode()
    if hashes_of is None:  # the engine has no prefix cache
        return

    def own_hashes_of(one: Request) -> list[Any]:  # of vLLM's BlockHash, which are bytes
        return [hashlib.sha256(own + made).digest() for made in hashes_of(one)]

    request._block_hasher = own_hashes_of
