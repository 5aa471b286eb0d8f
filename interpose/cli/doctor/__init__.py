"""The command `interpose doctor` says what this machine lacks, and how to get it.

It starts nothing, asks no service, and needs nothing but the client's package.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from interpose.cli.doctor import engine, machine, packages, ports
from interpose.cli.doctor.finding import Finding, Status
from interpose.cli.parsing import Parser
from interpose.cli.serve import add_listening


def add_parser(subparsers: Any) -> Parser:
    """Add the command `doctor` to the `interpose` command and return its parser."""
    parser: Parser = subparsers.add_parser(
        "doctor",
        summary="say what this machine lacks, and how to get it",
        description="Look at Python, packages, ports, GPUs, memory and disk of this machine, and say what is missing for a "
        "client or a service, and how to get it. Exit status 1: something that is needed is missing.",
        examples=(
            "interpose doctor",
            "interpose doctor --server --port 9001 --workers 4",
            "interpose doctor --config service.yaml --json",
        ),
    )
    role = parser.add_mutually_exclusive_group()
    role.add_argument("--client", action="store_true", help="look only at what a client needs")
    role.add_argument(
        "--server",
        action="store_true",
        help="look at what a service needs too (default: if a part of a server is installed)",
    )
    add_listening(parser)
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="of all engines on this machine (default: 1)"
    )
    parser.add_argument(
        "--shared-memory", default=machine.SHARED_MEMORY, metavar="FOLDER", help=f"(default: {machine.SHARED_MEMORY})"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print what was found; return the exit status, 1 if something that is needed is missing."""
    server = args.server or (not args.client and packages.has_server_part())
    findings = list(examined(args, server))
    missing = [one for one in findings if one.status is Status.MISSING]
    if args.json:
        fields = {"role": "server" if server else "client", "ok": not missing}
        print(json.dumps({**fields, "findings": [one.fields() for one in findings]}, indent=2, ensure_ascii=False))
    else:
        print(report(findings, server))
    return 1 if missing else 0


def examined(args: argparse.Namespace, server: bool) -> Sequence[Finding]:
    """Return what was found of a client, and of a service too if the machine is to be a server."""
    found = [packages.python(server), *packages.of_client()]
    if not server:
        return found
    kind = packages.engine_kind()
    found += [
        machine.system(),
        *packages.of_server(kind),
        *packages.imports(kind),
        *engine.devices(kind),
        *ports.of_service(args),
        machine.shared_memory(args.shared_memory, args.workers),
        machine.memory(),
        *machine.disks(),
        *machine.tools(kind),
    ]
    return found


def report(findings: Sequence[Finding], server: bool) -> str:
    """Return findings as text: a line for each, and below it the remedy where there is one."""
    width = max(len(one.name) for one in findings)
    lines = [f"This machine as a {'server' if server else 'client'}, with {sys.executable}", ""]
    for one in findings:
        lines.append(f"{one.status.value:<8} {one.name:<{width}}  {one.found}")
        if one.remedy:
            lines += [f"{'':<{width + 11}}{line}" for line in one.remedy.splitlines()]
    missing = sum(one.status is Status.MISSING for one in findings)
    warnings = sum(one.status is Status.WARNING for one in findings)
    lines += ["", f"Missing: {missing}. Warnings: {warnings}." if missing or warnings else "Nothing is missing."]
    if not server:
        lines.append("`interpose doctor --server` looks at what a service needs.")
    return "\n".join(lines)
