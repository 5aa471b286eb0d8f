"""The command `interpose status`: prints models, sessions, and the usage of the tenant."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

_SECONDS = 10.0  # that the service has to answer in


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command `status` to the `interpose` command and return its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "status",
        allow_abbrev=False,
        help="print how a service is",
        description="Print a service's models, replicas, sessions and queue, and what the caller's tenant uses.",
    )
    parser.add_argument(
        "--address", default=os.environ.get("INTERPOSE_ADDRESS", "localhost:9000"), metavar="HOST:PORT",
        help="of the service (default: INTERPOSE_ADDRESS, or localhost:9000)",
    )  # fmt: skip
    parser.add_argument("--api-key", default=os.environ.get("INTERPOSE_API_KEY"), help="(default: INTERPOSE_API_KEY)")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the status; return the exit status, 1 if the service gives no answer."""
    from interpose.contract.errors import InterposeError

    try:
        print(table(ask(args.address, args.api_key)))
    except InterposeError as error:
        print(f"interpose status: {error}", file=sys.stderr)
        return 1
    return 0


def ask(address: str, api_key: str | None) -> Any:
    """Return a service's `StatusReply`.

    Raises:
        InterposeError: the service does not answer, or refuses the call.
    """
    from interpose.rpc.channel import Transport
    from interpose.v1.service_pb2 import StatusRequest

    scheme, _, bare = address.rpartition("://")
    secure = scheme in ("grpcs", "https")
    transport = Transport(f"{'grpcs' if secure else 'grpc'}://{bare}", api_key or "", timeout=_SECONDS)
    try:
        return transport.unary("Status", StatusRequest())
    finally:
        transport.close()


def table(status: Any) -> str:
    """Return a `StatusReply` as text."""
    lines = [
        f"interpose {status.server_version}, up {duration(status.uptime_seconds)}, "
        f"{status.sessions} sessions open, {status.warm_sessions} warm",
        "",
        *columns(
            ("model", "state", "replicas", "running", "waiting"),
            [(one.name, one.state, one.replicas, one.running, one.waiting) for one in status.models],
        ),
    ]
    replicas = [(model.name, replica) for model in status.models for replica in model.each]
    if len(replicas) > len(status.models) or any(replica.stage for _, replica in replicas):
        rows = [
            (name, one.name, one.sessions, one.running, one.waiting, f"{one.stage or 'ready'} ({one.seconds:.0f} s)")
            for name, one in replicas
        ]
        lines += ["", *columns(("model", "replica", "sessions", "running", "waiting", "stage"), rows)]
    for one in status.models:
        if one.adapters:
            lines += ["", f"LoRA adapters of {one.name}: {', '.join(one.adapters)}"]
    if status.tenants:
        usage = [
            (one.name, one.sessions, one.traces_running, one.traces_done, f"{one.stored_bytes / 2**20:.1f} MiB")
            for one in status.tenants
        ]
        lines += ["", *columns(("tenant", "sessions", "running", "traces", "stored"), usage)]
        quotas = [
            (one.name, quota.name, f"{quota.used:.0f}", f"{quota.limit:.0f}", quota.refused)
            for one in status.tenants
            for quota in one.quotas
        ]
        if quotas:
            lines += ["", *columns(("tenant", "quota", "used", "limit", "refused"), quotas)]
    return "\n".join(lines)


def columns(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    """Return a table's lines, with columns as wide as their widest cell."""
    cells = [head, *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def duration(seconds: float) -> str:
    """Return seconds as hours and minutes, or minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
