"""The commands of operators: `interpose traces`, `cancel`, `drain`, `tenants` and `usage`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from interpose.cli.asking import Ask, Command, add_service, run_asking
from interpose.cli.parsing import Parser
from interpose.cli.printing import as_json, columns, duration
from interpose.cli.progress_line import ProgressLine

_POLL_SECONDS = 1.0


def add_parsers(subparsers: Any) -> None:
    """Add the commands of operators to the `interpose` command."""
    traces = _parser(
        subparsers, "traces", _traces, "list the traces that wait or run, of all tenants, the oldest first",
        ("interpose traces", "interpose traces --tenant biology --model smollm2"),
    )  # fmt: skip
    traces.add_argument("--tenant", default="", metavar="NAME", help="of this tenant only")
    traces.add_argument("--model", default="", metavar="NAME", help="of this model only")
    traces.add_argument("--most", type=int, default=100, metavar="N", help="rows (default: 100; 1000 at most)")
    traces.add_argument("--json", action="store_true", help="as JSON")
    cancel = _parser(
        subparsers, "cancel", _cancel, "cancel traces of any tenant",
        ("interpose cancel biology/5f0c1a", "interpose traces --json | jq -r .traces[].key | xargs interpose cancel"),
    )  # fmt: skip
    cancel.add_argument("keys", nargs="+", metavar="KEY", help="as `interpose traces` prints it")
    drain = _parser(
        subparsers, "drain", _drain, "let no new traces begin; the traces that run go on",
        ("interpose drain --wait", "interpose drain --model smollm2", "interpose drain --end"),
    )  # fmt: skip
    drain.add_argument("--model", default="", metavar="NAME", help="of this model only (default: the service)")
    drain.add_argument(
        "--replica",
        default="",
        metavar="NAME",
        help="of this replica of the model only, as `interpose status` prints it",
    )
    drain.add_argument("--end", action="store_true", help="let new traces begin again")
    drain.add_argument("--wait", action="store_true", help="return when no trace runs any more")
    tenants = _parser(
        subparsers, "tenants", _tenants, "list the tenants, with what they hold and may hold", ("interpose tenants",)
    )
    tenants.add_argument("--json", action="store_true", help="as JSON")
    usage = _parser(
        subparsers, "usage", _usage, "print what tenants have used, and the calls that were refused",
        ("interpose usage", "interpose usage --tenant biology --json"),
    )  # fmt: skip
    usage.add_argument("--tenant", default="", metavar="NAME", help="of this tenant only")
    usage.add_argument("--json", action="store_true", help="as JSON")


def _parser(subparsers: Any, name: str, run: Command, summary: str, examples: tuple[str, ...]) -> Parser:
    parser: Parser = subparsers.add_parser(
        name, summary=summary, description=f"For operators: {summary}.", examples=examples
    )
    add_service(parser, whose_key="an operator's")
    parser.set_defaults(run=lambda args: run_asking(name, run, args, operator=True))
    return parser


def _shown(args: argparse.Namespace, reply: Any, table: Callable[[Any], str]) -> str:
    return as_json(reply) if args.json else table(reply)


def _traces(args: argparse.Namespace, ask: Ask) -> str:
    from interpose.v1.operator_pb2 import ListTracesRequest

    request = ListTracesRequest(tenant=args.tenant, model=args.model, most=args.most)
    return _shown(args, ask("ListTraces", request), traces_table)


def traces_table(reply: Any) -> str:
    """Return a `ListTracesReply` as text."""
    from interpose.v1.service_pb2 import JobState

    if not reply.traces:
        return "no trace waits or runs"
    rows = [
        (
            row.key,
            row.tenant,
            row.status.model,
            row.method,
            JobState.Name(row.status.state).removeprefix("JOB_STATE_").lower(),
            f"{row.status.finished_invokes}/{row.status.invokes}",
            row.status.generated_tokens,
            f"{row.status.seconds_since_submitted:.1f} s",
        )
        for row in reply.traces
    ]
    lines = columns(("key", "tenant", "model", "method", "state", "invokes", "tokens", "age"), rows)
    if reply.total > len(rows):
        lines += [f"and {reply.total - len(rows)} more"]
    return "\n".join(lines)


def _cancel(args: argparse.Namespace, ask: Ask) -> str:
    from interpose.v1.operator_pb2 import CancelTraceRequest

    found = {key: ask("CancelTrace", CancelTraceRequest(key=key)).found for key in args.keys}
    return "\n".join(f"{key}: {'cancelled' if was else 'does not run'}" for key, was in found.items())


def _drain(args: argparse.Namespace, ask: Ask) -> str:
    from interpose.v1.operator_pb2 import DrainRequest

    request = DrainRequest(model=args.model, replica=args.replica, end=args.end)
    reply = ask("Drain", request)
    line = ProgressLine(sys.stderr)
    while args.wait and not args.end and reply.running:
        line(f"{reply.running} {'trace runs' if reply.running == 1 else 'traces run'} still")
        time.sleep(_POLL_SECONDS)
        reply = ask("Drain", request)
    line.end()
    draining = ", ".join(reply.draining) or "nothing"
    return f"draining: {draining}; {reply.running} still running" if not args.end else f"draining: {draining}"


def _tenants(args: argparse.Namespace, ask: Ask) -> str:
    from interpose.v1.operator_pb2 import ListTenantsRequest

    return _shown(args, ask("ListTenants", ListTenantsRequest()), tenants_table)


def tenants_table(reply: Any) -> str:
    """Return a `ListTenantsReply` as text."""
    rows = [
        (
            row.use.name,
            f"{row.trust}, operator" if row.operator else row.trust,
            row.keys,
            row.use.sessions,
            row.use.traces_running,
            row.use.traces_done,
            f"{row.use.stored_bytes / 2**20:.1f} MiB",
            ", ".join(f"{quota.name} {quota.used:g}/{quota.limit:g}" for quota in row.use.quotas) or "-",
        )
        for row in reply.tenants
    ]
    return "\n".join(
        columns(("tenant", "trust", "keys", "sessions", "running", "traces", "stored", "quotas: used/limit"), rows)
    )


def _usage(args: argparse.Namespace, ask: Ask) -> str:
    from interpose.v1.operator_pb2 import GetUsageRequest

    return _shown(args, ask("GetUsage", GetUsageRequest(tenant=args.tenant)), usage_table)


def usage_table(reply: Any) -> str:
    """Return a `GetUsageReply` as text."""
    rows = [
        (
            row.tenant,
            row.model,
            row.traces,
            row.failed,
            row.cancelled,
            row.invokes,
            row.prompt_tokens,
            row.generated_tokens,
            row.steps,
            f"{row.block_seconds:.3f} s",
            f"{row.queue_seconds:.1f} s",
            f"{row.running_seconds:.1f} s",
            f"{row.saved_bytes / 2**20:.1f} MiB",
        )
        for row in reply.rows
    ]
    head = ("tenant", "model", "traces", "failed", "cancelled", "invokes", "prompt", "generated", "steps", "blocks")
    lines = [f"since {duration(reply.seconds)}", "", *columns((*head, "queued", "running", "saved"), rows)]
    if reply.refusals:
        refused = [(one.tenant or "-", one.method, one.code, one.limit or "-", one.count) for one in reply.refusals]
        lines += ["", *columns(("tenant", "refused call", "code", "limit", "times"), refused)]
    return "\n".join(lines)
