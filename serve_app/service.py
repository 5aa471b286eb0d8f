"""Runs a service from the command line: the cluster, Serve, the application, and their end."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import NoReturn

import grpc
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve

from actors.naming import DIRECTORY, NAMESPACE
from actors.protocol import Target
from serve_app.builder import APP, build
from serve_app.cluster import Cluster
from serve_app.environment import proxy_environment
from serve_app.proxy import FUNCTIONS
from serve_app.settings import Settings

POLL_SECONDS = 0.5
STATUS_SECONDS = 3.0
LOOK_SECONDS = 5.0
END_SECONDS = 5.0

DEPLOYING = "deploying"
SETTLING = "almost ready"

Progress = Callable[[str], None]


class ServiceError(Exception):
    """The service cannot run; the message is for the operator."""


_ALL = ("0.0.0.0", "::")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Service:
    """One service, from `start` to `stop`.

    Args:
        settings: settings of the service.
        cluster: the cluster that the service runs on.
    """

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self._settings = settings
        self._cluster = cluster
        self._serving = False
        self._failed: dict[str, str] = {}  # reasons why models do not start, by the model's name

    @property
    def address(self) -> str:
        """The address for clients, on the host of the cluster's head; "grpcs://…" with TLS."""
        grpc_settings = self._settings.grpc
        host = (self._cluster.remote_head or "localhost") if grpc_settings.host in _ALL else grpc_settings.host
        return f"{'grpcs://' if grpc_settings.tls else ''}{host}:{grpc_settings.port}"

    @property
    def http_address(self) -> str:
        """The address of the OpenAI-compatible endpoint; "" if the settings give no port."""
        http = self._settings.http
        if not (http.openai and http.port):
            return ""
        host = (self._cluster.remote_head or "localhost") if http.host in _ALL else http.host
        return f"http://{host}:{http.port}/v1"

    def start(self, progress: Progress) -> None:
        """Start everything; return when traces can run.

        Args:
            progress: called repeatedly with the name of the stage.

        Raises:
            ServiceError: something does not start, with the reason.
        """
        listening = self._settings.grpc
        if self._cluster.own:
            check_port(listening.host, listening.port)
        progress("starting Ray")
        try:
            self._cluster.start(progress)
        except Exception as error:
            raise ServiceError(f"Ray does not start: {error}") from error
        if self._cluster.remote_head and listening.host in _LOOPBACK:
            raise ServiceError(
                f"the cluster's head is on another host, {self._cluster.remote_head}, and {listening.host} can be reached from "
                "there only: choose --host 0.0.0.0, or an address of it"
            )
        if not self._cluster.own and not self._cluster.remote_head:
            check_port(listening.host, listening.port)
        progress("starting Serve")
        self._start_serve()
        progress(DEPLOYING)
        serve.run_many(
            [serve.RunTarget(build(self._settings), name=APP)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        asked = 0.0
        while True:
            stage = self._stage()
            progress(stage)
            # Serve's controller answers at length and needs the processor for loading. So it is asked seldom.
            if stage == SETTLING or time.monotonic() - asked > STATUS_SECONDS:
                asked = time.monotonic()
                if self._running():
                    break
            time.sleep(POLL_SECONDS)
        progress("opening the port")
        self._wait_until_reachable()

    def run(self) -> NoReturn:
        """Run until interrupted."""
        while True:
            self._cluster.look_after()
            time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        """End everything that `start` began. Never raises; a second call does nothing."""
        # Processes that Serve ends cannot be examined afterwards.
        self._cluster.look_after()
        with contextlib.suppress(Exception):
            if self._serving:
                self._end_sessions()
                serve.shutdown()
        with contextlib.suppress(Exception):
            ray.kill(ray.get_actor(DIRECTORY, namespace=NAMESPACE))
        self._cluster.stop()

    @staticmethod
    def _end_sessions() -> None:
        """End all sessions while clients can still be told.

        Serve ends its proxies first, and then waits for traces that no client follows.
        """
        with contextlib.suppress(Exception):
            ray.get(ray.get_actor(DIRECTORY, namespace=NAMESPACE).end_sessions.remote(), timeout=END_SECONDS)

    def _start_serve(self) -> None:
        with contextlib.suppress(ValueError):
            ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
            raise ServiceError(
                "Serve runs on this cluster already, and its gRPC port cannot be changed any more: deploy with Serve's "
                "own tools (`serve deploy`), or shut it down first (`serve shutdown`)"
            )
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        self._serving = True
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": self._settings.http.host, "port": self._settings.http.port or free_port()},
            grpc_options={"port": self._settings.grpc.port, "grpc_servicer_functions": FUNCTIONS},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
            controller_options={"runtime_env": {"env_vars": proxy_environment(self._settings)}},
        )

    def _running(self) -> bool:
        application = serve.status().applications[APP]
        if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            if self._failed:
                raise ServiceError("\n".join(f"{name} cannot start: {why}" for name, why in self._failed.items()))
            reasons = [application.message, *(one.message for one in application.deployments.values())]
            raise ServiceError("the application does not start:\n" + "\n".join(reason for reason in reasons if reason))
        return application.status == "RUNNING"

    def _stage(self) -> str:
        try:
            directory = ray.get_actor(DIRECTORY, namespace=NAMESPACE)
            states = {
                model.name: ray.get(directory.model_state.remote(Target(APP, model.deployment)), timeout=5)
                for model in self._settings.models
            }
        except (ValueError, ray.exceptions.RayError):
            return DEPLOYING
        self._failed = {name: state.failed.reason for name, state in states.items() if state.failed is not None}
        for name, state in states.items():
            if state.failed is not None and state.failed.permanent and state.state != "RUNNING":
                raise ServiceError(f"{name} cannot start: {state.failed.reason}")
        idle = {model.name for model in self._settings.models if model.scales_to_zero}
        if all(state.state == "RUNNING" or name in idle for name, state in states.items()):
            return SETTLING
        loading = {name: state.stages[0] for name, state in states.items() if state.stages}
        return (
            ", ".join(f"{name}: {stage} ({seconds:.0f} s)" for name, (stage, seconds) in loading.items()) or DEPLOYING
        )

    def _wait_until_reachable(self) -> None:
        if self._settings.grpc.tls is not None:
            # The application runs already. This process may have neither the certificates that clients trust nor one of a client.
            for _ in range(120):
                if _encrypted(self.address):
                    return
                time.sleep(POLL_SECONDS)
            raise ServiceError(f"the service started but speaks no TLS at {self.address}")
        with grpc.insecure_channel(self.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for _ in range(120):
                with contextlib.suppress(grpc.RpcError):
                    reply = health.Check(health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True)
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                time.sleep(POLL_SECONDS)
        raise ServiceError(f"the service started but does not answer at {self.address}")


def _encrypted(address: str) -> bool:
    """Return whether a port speaks HTTP/2 over TLS, with whichever certificate."""
    host, _, port = address.removeprefix("grpcs://").rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=STATUS_SECONDS) as plain,
            context.wrap_socket(plain) as encrypted,
        ):
            return encrypted.selected_alpn_protocol() == "h2"
    except OSError:
        return False


def check_port(host: str, port: int) -> None:
    """Raise ServiceError if a port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServiceError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another port: --port"
            ) from None


def free_port() -> int:
    """Return a port that no process listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
