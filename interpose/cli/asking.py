"""Calls of commands to a running service: where it is, the key, and how it is asked."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from interpose.cli.parsing import Parser, complain

ADDRESS_VARIABLE = "INTERPOSE_ADDRESS"
KEY_VARIABLE = "INTERPOSE_API_KEY"
DEFAULT_ADDRESS = "localhost:9000"

_SECONDS = 30.0  # that the service has to answer in

# Calls a method of the service with a request; returns the reply.
Ask = Callable[[str, Any], Any]
# Runs a command on a service; returns what it prints.
Command = Callable[[argparse.Namespace, Ask], str]


def add_service(parser: Parser, whose_key: str = "yours") -> None:
    """Add the flags that say which service is asked, and with which key."""
    parser.add_argument(
        "--address", default=os.environ.get(ADDRESS_VARIABLE, DEFAULT_ADDRESS), metavar="HOST:PORT",
        help=f"of the service (default: {ADDRESS_VARIABLE}, or {DEFAULT_ADDRESS})",
    )  # fmt: skip
    parser.add_argument(
        "--api-key", default=os.environ.get(KEY_VARIABLE), metavar="KEY", help=f"{whose_key} (default: {KEY_VARIABLE})"
    )


def run_asking(name: str, run: Command, args: argparse.Namespace, operator: bool = False) -> int:
    """Run a command on a service and print the outcome.

    Args:
        name: the command, for errors.
        run: what the command does.
        args: with the flags of `add_service`.
        operator: whether the command calls the methods of operators.

    Returns:
        The exit status, 1 if the service refuses or does not answer.
    """
    from interpose.contract.errors import InterposeError

    try:
        with asking(args.address, args.api_key, operator) as ask:
            print(run(args, ask))
    except InterposeError as error:
        complain(name, error)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


@contextmanager
def asking(address: str, api_key: str | None, operator: bool = False, seconds: float = _SECONDS) -> Iterator[Ask]:
    """Give a function that calls a service, and end the connection afterwards.

    Raises:
        InterposeError: the address is none.
    """
    from interpose.rpc.channel import Transport
    from interpose.rpc.operator import operator_transport

    scheme, _, bare = address.rpartition("://")
    kind = {"http": "grpc", "https": "grpcs"}.get(scheme, scheme)
    open_ = operator_transport if operator else Transport
    transport = open_(f"{kind}://{bare}" if kind else bare, api_key or "", seconds)
    try:
        yield transport.unary
    finally:
        transport.close()
