"""The command `interpose status`: prints models, sessions, and the usage of the tenant."""

from __future__ import annotations

import argparse
from typing import Any

from interpose.cli.asking import Ask, add_service, run_asking
from interpose.cli.parsing import Parser
from interpose.cli.printing import as_json, columns, duration


def add_parser(subparsers: Any) -> Parser:
    """Add the command `status` to the `interpose` command and return its parser."""
    parser: Parser = subparsers.add_parser(
        "status",
        summary="print the models, sessions and queues of a service",
        description="Print a service's models, replicas, sessions and queue, and what your tenant uses.",
        examples=("interpose status", "interpose status --address gpu-box:9000", "interpose status --json"),
    )
    add_service(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=lambda args: run_asking("status", _status, args))
    return parser


def _status(args: argparse.Namespace, ask: Ask) -> str:
    from interpose.v1.service_pb2 import StatusRequest

    reply = ask("Status", StatusRequest())
    return as_json(reply) if args.json else table(reply)


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
