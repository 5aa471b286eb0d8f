"""Failures as answers of the OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import math

from starlette.responses import Response

from interpose.v1 import trace_pb2 as pb

# Bytes of a request's body.
BODY_BYTES = 8 << 20
# Where the proxy puts the body in the request's ASGI scope.
BODY_KEY = "interpose.body"
# HTTP status and OpenAI's type of error, by the code of the failure.
_ANSWERS: dict[int, tuple[int, str]] = {
    pb.ERROR_CODE_INTERVENTION: (400, "invalid_request_error"),
    pb.ERROR_CODE_UNKNOWN_LOCATION: (400, "invalid_request_error"),
    pb.ERROR_CODE_OUT_OF_ORDER: (400, "invalid_request_error"),
    pb.ERROR_CODE_INVALID_ARGUMENT: (400, "invalid_request_error"),
    pb.ERROR_CODE_UNAUTHENTICATED: (401, "authentication_error"),
    pb.ERROR_CODE_PERMISSION_DENIED: (403, "permission_error"),
    pb.ERROR_CODE_NOT_FOUND: (404, "not_found_error"),
    pb.ERROR_CODE_CANCELLED: (409, "cancelled"),
    pb.ERROR_CODE_QUOTA_EXCEEDED: (429, "rate_limit_error"),
    pb.ERROR_CODE_UNAVAILABLE: (503, "service_unavailable"),
    pb.ERROR_CODE_DEADLINE_EXCEEDED: (504, "timeout"),
}
_OTHERS = (500, "server_error")


def error_of(fact: pb.Failure) -> bytes:
    """Return a failure as OpenAI's JSON object of an error."""
    _, kind = _ANSWERS.get(fact.code, _OTHERS)
    code = pb.ErrorCode.Name(fact.code).removeprefix("ERROR_CODE_").lower()
    error: dict[str, object] = {"message": fact.message, "type": kind, "param": None, "code": code}
    if fact.exception_type:
        error["message"] = f"{fact.exception_type}: {fact.exception_message or fact.message}"
    if fact.suggestions:
        error["suggestions"] = list(fact.suggestions)
    return json.dumps({"error": error}).encode()


def answer_of(fact: pb.Failure) -> Response:
    """Return the HTTP answer to a request that failed."""
    status, _ = _ANSWERS.get(fact.code, _OTHERS)
    headers = {"retry-after": str(math.ceil(fact.retry_after))} if fact.retry_after > 0 else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(error_of(fact), status, headers, media_type="application/json")
