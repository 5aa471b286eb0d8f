"""The channel for the calls of operators."""

from __future__ import annotations

from interpose.rpc.channel import Transport
from interpose.v1 import operator_pb2_grpc


def operator_transport(address: str, api_key: str, timeout: float) -> Transport:
    """Return a channel with the methods of `interpose.v1.Operator`.

    The arguments are as of `Transport`.
    """
    return Transport(address, api_key, timeout, stub=operator_pb2_grpc.OperatorStub)
