"""The command `interpose keys`: makes API keys with their hashes, lists and revokes keys."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from typing import Any

_SECONDS = 10.0  # that the service has to answer in


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command `keys` to the `interpose` command and return its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "keys", allow_abbrev=False, help="make, list and revoke API keys", description="Make, list and revoke API keys."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    new = commands.add_parser(
        "new",
        allow_abbrev=False,
        help="make a key",
        description="Print a new API key, which is stored nowhere, and its hash for the settings of a service.",
    )
    new.add_argument("--id", default="", help="a name that the key begins with, to tell keys apart")
    new.add_argument("--days", type=int, help="after which the key expires (default: never)")
    new.set_defaults(run=_new)
    hash_ = commands.add_parser(
        "hash",
        allow_abbrev=False,
        help="hash a key",
        description="Read an API key from the standard input, and print its hash for the settings of a service.",
    )
    hash_.set_defaults(run=_hash)
    for name, what, run in (("list", "list keys and their last use", _list), ("revoke", "revoke a key", _revoke)):
        command = commands.add_parser(name, allow_abbrev=False, help=what, description=f"{what.capitalize()}.")
        command.add_argument(
            "--address", default=os.environ.get("INTERPOSE_ADDRESS", "localhost:9000"), metavar="HOST:PORT",
            help="of the service (default: INTERPOSE_ADDRESS, or localhost:9000)",
        )  # fmt: skip
        command.add_argument(
            "--api-key", default=os.environ.get("INTERPOSE_API_KEY"), help="(default: INTERPOSE_API_KEY)"
        )
        if name == "revoke":
            command.add_argument("label", metavar="KEY", help="the key's id, or its name in the list")
            command.add_argument("--tenant", default="", help="the key's tenant (default: the caller's)")
        command.set_defaults(run=run)
    return parser


def _new(args: argparse.Namespace) -> int:
    hashes = _hashes()
    if hashes is None:
        return 1
    try:
        key = hashes.new_key(args.id)
        if args.days is not None and not 0 < args.days <= 36500:
            raise ValueError("--days is from 1 to 36500")
    except ValueError as error:
        print(f"interpose keys: {error}", file=sys.stderr)
        return 2
    fields = [f"id: {args.id}"] if args.id else []
    fields.append(f'hash: "{hashes.hashed(key)}"')
    if args.days is not None:
        end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=args.days)
        fields.append(f'expires: "{end:%Y-%m-%dT%H:%M:%S}Z"')
    print("# The key, for the client; it is stored nowhere:", file=sys.stderr)
    print(key)
    print("# For `api_keys` of a tenant in the settings:", file=sys.stderr)
    print(f"{{{', '.join(fields)}}}")
    return 0


def _hash(args: argparse.Namespace) -> int:
    hashes = _hashes()
    if hashes is None:
        return 1
    key = sys.stdin.readline(2000).strip()
    if len(key) < 8:
        print("interpose keys: an API key has at least 8 characters", file=sys.stderr)
        return 2
    name = hashes.id_in(key)
    print(f'{{id: {name}, hash: "{hashes.hashed(key)}"}}' if name else f'{{hash: "{hashes.hashed(key)}"}}')
    return 0


def _list(args: argparse.Namespace) -> int:
    from interpose.v1.keys_pb2 import ListKeysRequest

    reply = _ask(args, "ListKeys", ListKeysRequest())
    if reply is None:
        return 1
    rows = [("tenant", "key", "expires", "last used", "revoked")]
    rows += [
        (one.tenant, one.label, *(_when(seconds) for seconds in (one.expires, one.last_used, one.revoked)))
        for one in reply.keys
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _revoke(args: argparse.Namespace) -> int:
    from interpose.v1.keys_pb2 import RevokeKeyRequest

    if _ask(args, "RevokeKey", RevokeKeyRequest(tenant=args.tenant, label=args.label)) is None:
        return 1
    print(f"{args.label} is revoked: take it out of the settings too", file=sys.stderr)
    return 0


def _ask(args: argparse.Namespace, method: str, request: Any) -> Any:
    """Return a service's reply, or None after printing why there is none."""
    from interpose.contract.errors import InterposeError
    from interpose.rpc.channel import Transport

    try:
        transport = Transport(args.address, args.api_key or "", timeout=_SECONDS)
        try:
            return transport.unary(method, request)
        finally:
            transport.close()
    except InterposeError as error:
        print(f"interpose keys: {error}", file=sys.stderr)
        return None


def _hashes() -> Any:
    try:
        from serve_app import key_hashes
    except ImportError:
        print("interpose keys: the server is not part of the client package: run this from a clone", file=sys.stderr)
        return None
    return key_hashes


def _when(seconds: float) -> str:
    if not seconds:
        return "-"
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc):%Y-%m-%d %H:%M:%S}"
