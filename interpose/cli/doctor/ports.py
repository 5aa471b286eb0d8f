"""The ports of a service: whether they are free, and which process has them."""

from __future__ import annotations

import argparse
import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from interpose.cli.doctor.finding import Finding, Status, judged

_HOST, _PORT = "127.0.0.1", 9000
# Where Ray tells its health on each node. Two services on one machine share it.
_RAY_HEALTH = 52365
_SECONDS = 3.0


@dataclass(frozen=True)
class _Port:
    name: str
    host: str
    number: int
    remedy: str


def of_service(args: argparse.Namespace) -> Iterator[Finding]:
    """Judge the ports that a service with these flags and settings listens on."""
    head = os.environ.get("RAY_ADDRESS")
    if head:
        yield _head(head)
        return
    try:
        ports = _ports(args)
    except ValueError as error:
        yield Finding("settings", Status.MISSING, str(error).splitlines()[0], "\n".join(str(error).splitlines()[1:]))
        return
    for port in ports:
        reason = _taken(port.host, port.number)
        name = f"port {port.number}"
        yield judged(name, not reason, f"{port.name}: {reason or 'free'}", port.remedy)
    reason = _taken(_HOST, _RAY_HEALTH)
    yield judged(
        f"port {_RAY_HEALTH}", not reason, f"Ray's health check: {reason or 'free'}",
        "a service starts all the same; health checks of this port ask the other Ray", Status.WARNING,
    )  # fmt: skip


def _ports(args: argparse.Namespace) -> list[_Port]:
    """Return the fixed ports; Ray and Serve take further ports that are free when they start.

    Raises:
        ValueError: a settings file is wrong.
    """
    host, port, http, metrics = _HOST, args.port or _PORT, args.http_port or 0, 0
    try:
        from serve_app.settings import settings_from
    except ImportError:
        if args.config:
            raise ValueError(f"{args.config} cannot be read without the server's packages") from None
    else:
        given = {"grpc": {"port": args.port} if args.port else None, "http": {"port": http} if http else None}
        settings = settings_from({"config_file": args.config, "model": None if args.config else "any", **given})
        host, port = settings.grpc.host, settings.grpc.port
        http, metrics = settings.http.port, settings.metrics.port
    found = [_Port("clients", host, port, f"choose another: --port {port + 1}, or end the process that has it")]
    if http:
        found.append(_Port("OpenAI clients", host, http, f"choose another: --http-port {http + 1}"))
    if metrics:
        found.append(_Port("metrics", "0.0.0.0", metrics, "choose another: `metrics.port` in the settings"))
    return found


def _head(address: str) -> Finding:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_SECONDS).close()
    except (OSError, ValueError) as error:
        reason = f"RAY_ADDRESS={address} cannot be reached: {error}"
        return Finding(
            "Ray cluster", Status.MISSING, reason, "start its head, or unset RAY_ADDRESS: then Ray is started here"
        )
    return Finding("Ray cluster", Status.OK, f"RAY_ADDRESS={address} can be reached")


def _taken(host: str, number: int) -> str:
    """Return why a port cannot be listened on, or ""."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"taken{_holder(number)}"
            return f"cannot be listened on at {host}: {error.strerror}"
    return ""


def _holder(number: int) -> str:
    """Return " by NAME (process ID)", or "" where that cannot be seen."""
    try:
        import psutil

        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == number and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except Exception:  # psutil is not installed, or the machine does not say
        return ""
    return ""
