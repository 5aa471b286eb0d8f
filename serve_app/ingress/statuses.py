"""The gRPC status that a call ends with, by the code of its `Failure`."""

from __future__ import annotations

import grpc

from interpose.contract.errors import STATUS_NAMES

STATUS_OF: dict[int, grpc.StatusCode] = {code: grpc.StatusCode[name] for code, name in STATUS_NAMES.items()}
