"""The commands of operators: `interpose traces`, `cancel`, `drain`, `tenants` and `usage`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from interpose.cli.status import columns, duration

_SECONDS = 30.0  # that the service has to answer in
_POLL_SECONDS = 1.0
KEY_VARIABLE = "INTERPOSE_API_KEY"

# Calls a method of the service with a request; returns the reply.
Ask = Callable[[str, Any], Any]


def add_parsers(subparsers: Any) -> None:
    """Add the commands of operators to the `interpose` command."""
    traces = _parser(
        subparsers, "traces", _traces, "list the traces that wait or run, of all tenants, the oldest first"
    )
    traces.add_argument("--tenant", default="", help="of this tenant only")
    traces.add_argument("--model", default="", help="of this model only")
    traces.add_argument("--most", type=int, default=100, metavar="N", help="rows (default: 100; 1000 at most)")
    cancel = _parser(subparsers, "cancel", _cancel, "cancel traces of any tenant")
    cancel.add_argument("keys", nargs="+", metavar="KEY", help="as `interpose traces` prints it")
    drain = _parser(subparsers, "drain", _drain, "let no new traces begin; the traces that run go on")
    drain.add_argument("--model", default="", help="of this model only (default: the service)")
    drain.add_argument(
        "--replica", default="", help="of this replica of the model only, as `interpose status` prints it"
    )
    drain.add_argument("--end", action="store_true", help="let new traces begin again")
    drain.add_argument("--wait", action="store_true", help="return when no trace runs any more")
    _parser(subparsers, "tenants", _tenants, "list the tenants, with what they hold and may hold")
    usage = _parser(subparsers, "usage", _usage, "print what tenants have used, and the calls that were refused")
    usage.add_argument("--tenant", default="", help="of this tenant only")


def _parser(subparsers: Any, name: str, run: Callable[[argparse.Namespace, Ask], str], text: str) -> Any:
    parser = subparsers.add_parser(
        name, allow_abbrev=False, help=f"{text} (for operators)", description=f"For operators: {text}."
    )
    parser.add_argument(
        "--address", default=os.environ.get("INTERPOSE_ADDRESS", "localhost:9000"), metavar="HOST:PORT",
        help="of the service (default: INTERPOSE_ADDRESS, or localhost:9000)",
    )  # fmt: skip
    parser.add_argument(
        "--api-key", default=os.environ.get(KEY_VARIABLE), help=f"an operator's (default: {KEY_VARIABLE})"
    )
    parser.set_defaults(run=lambda args: _run(name, run, args))
    return parser


def _run(name: str, run: Callable[[argparse.Namespace, Ask], str], args: argparse.Namespace) -> int:
    """Run a command; return the exit status, 1 if the service refuses or does not answer."""
    from interpose.contract.errors import InterposeError

    try:
        with _asking(args.address, args.api_key) as ask:
            print(run(args, ask))
    except InterposeError as error:
        print(f"interpose {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


@contextmanager
def _asking(address: str, api_key: str | None) -> Iterator[Ask]:
    from interpose.rpc.operator import operator_transport

    scheme, _, bare = address.rpartition("://")
    secure = scheme in ("grpcs", "https")
    transport = operator_transport(f"{'grpcs' if secure else 'grpc'}://{bare}", api_key or "", _SECONDS)
    try:
        yield transport.unary
    finally:
        transport.close()


def _traces(args: argparse.Namespace, ask: Ask) -> str:
    from interpose.v1.operator_pb2 import ListTracesRequest

    return traces_table(ask("ListTraces", ListTracesRequest(tenant=args.tenant, model=args.model, most=args.most)))


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
    while args.wait and not args.end and reply.running:
        time.sleep(_POLL_SECONDS)
        reply = ask("Drain", request)
    draining = ", ".join(reply.draining) or "nothing"
    return f"draining: {draining}; {reply.running} still running" if not args.end else f"draining: {draining}"


def _tenants(args: argparse.Namespace, ask: Ask) -> str:
    from interpose.v1.operator_pb2 import ListTenantsRequest

    return tenants_table(ask("ListTenants", ListTenantsRequest()))


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

    return usage_table(ask("GetUsage", GetUsageRequest(tenant=args.tenant)))


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
