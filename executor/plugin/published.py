"""Keeps what a traced request's block may change from other requests in the prefix cache.

A request whose block asks for none of its prompt's rows, or for the last rows alone, leaves the keys and values of the rows
before them as the model makes them. Its block may change the rows behind, so cache blocks with these are the request's own. vLLM
finds a cache block by a hash of its tokens and of all tokens before. From the first cache block with such a row on, the hashes
are hashed once more with the request's id, and no other request has the same. So the request finds nothing there either: what it
has from the cache ends before the first row that its block may ask for.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request


def publish_prompt_alone(request: Request, tokens: int, size: int) -> None:
    """Have other requests find the cache blocks of the beginning of a request's prompt alone.

    Args:
        request: it has not generated a token.
        tokens: how many tokens of the prompt its block leaves as they are.
        size: the tokens of a hash.
    """
    hashes_of, own = request._block_hasher, request.request_id.encode()
    if hashes_of is None:  # the engine has no prefix cache
        return

    def own_hashes_of(one: Request) -> list[Any]:  # of vLLM's BlockHash, which are bytes
        return [hashlib.sha256(own + made).digest() for made in hashes_of(one)]

    request._block_hasher = own_hashes_of
    if tokens < request.num_prompt_tokens:
        del request.block_hashes[tokens // size :]
        request.update_block_hashes()
