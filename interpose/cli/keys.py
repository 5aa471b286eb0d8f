"""The command `interpose keys`: makes API keys with their hashes, lists and revokes keys."""

from __future__ import annotations

import argparse
import datetime
import sys
from typing import Any

from interpose.cli.asking import Ask, add_service, run_asking
from interpose.cli.parsing import SERVER_MISSING, USAGE_STATUS, Parser, complain
from interpose.cli.printing import as_json, columns


def add_parser(subparsers: Any) -> Parser:
    """Add the command `keys` to the `interpose` command and return its parser."""
    parser: Parser = subparsers.add_parser(
        "keys",
        summary="make, list and revoke API keys",
        examples=("interpose keys new --id laptop --days 90", "interpose keys list", "interpose keys revoke laptop"),
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    new = commands.add_parser(
        "new",
        help="make a key",
        description="Print a new API key, which is stored nowhere, and its hash for the settings of a service.",
        examples=("interpose keys new --id laptop --days 90",),
    )
    new.add_argument("--id", default="", help="a name that the key begins with, to tell keys apart")
    new.add_argument("--days", type=int, metavar="N", help="after which the key expires (default: never)")
    new.set_defaults(run=_new)
    hash_ = commands.add_parser(
        "hash",
        help="hash a key",
        description="Read an API key from the standard input, and print its hash for the settings of a service.",
        examples=("interpose keys hash < key.txt",),
    )
    hash_.set_defaults(run=_hash)
    list_ = commands.add_parser(
        "list",
        help="list keys and their last use",
        description="List the keys of your tenant and their last use; an operator's key lists those of all tenants.",
        examples=("interpose keys list",),
    )
    add_service(list_)
    list_.add_argument("--json", action="store_true", help="as JSON")
    list_.set_defaults(run=lambda args: run_asking("keys", _list, args))
    revoke = commands.add_parser(
        "revoke",
        help="revoke a key",
        description="Revoke a key: no service call with it is accepted from now on.",
        examples=("interpose keys revoke laptop", "interpose keys revoke laptop --tenant biology"),
    )
    revoke.add_argument("label", metavar="KEY", help="the key's id, or its name in the list")
    revoke.add_argument("--tenant", default="", metavar="NAME", help="the key's tenant (default: yours)")
    add_service(revoke)
    revoke.set_defaults(run=lambda args: run_asking("keys", _revoke, args))
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
        complain("keys", error)
        return USAGE_STATUS
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
        complain("keys", "an API key has at least 8 characters")
        return USAGE_STATUS
    name = hashes.id_in(key)
    print(f'{{id: {name}, hash: "{hashes.hashed(key)}"}}' if name else f'{{hash: "{hashes.hashed(key)}"}}')
    return 0


def _list(args: argparse.Namespace, ask: Ask) -> str:
    from interpose.v1.keys_pb2 import ListKeysRequest

    reply = ask("ListKeys", ListKeysRequest())
    if args.json:
        return as_json(reply)
    rows = [
        (one.tenant, one.label, *(_when(seconds) for seconds in (one.expires, one.last_used, one.revoked)))
        for one in reply.keys
    ]
    return "\n".join(columns(("tenant", "key", "expires", "last used", "revoked"), rows))


def _revoke(args: argparse.Namespace, ask: Ask) -> str:
    from interpose.v1.keys_pb2 import RevokeKeyRequest

    ask("RevokeKey", RevokeKeyRequest(tenant=args.tenant, label=args.label))
    return f"{args.label} is revoked: take it out of the settings too"


def _hashes() -> Any:
    try:
        from serve_app import key_hashes
    except ImportError:
        complain("keys", SERVER_MISSING)
        return None
    return key_hashes


def _when(seconds: float) -> str:
    if not seconds:
        return "-"
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc):%Y-%m-%d %H:%M:%S}"
