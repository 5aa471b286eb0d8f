"""The command `interpose serve MODEL`: runs a service on this machine or a Ray cluster."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
from types import FrameType
from typing import Any

from interpose.cli.parsing import SERVER_MISSING, USAGE_STATUS, Parser, complain
from interpose.cli.progress_line import ProgressLine

# vLLM's flags that say which files an engine needs.
_FILES = (
    *("config-format", "download-dir", "hf-config-path", "load-format", "revision"),
    *("tokenizer", "tokenizer-mode", "tokenizer-revision"),
)
_CODE = ("skip-tokenizer-init", "trust-remote-code")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_parser(subparsers: Any) -> Parser:
    """Add the command `serve` to the `interpose` command and return its parser."""
    parser: Parser = subparsers.add_parser(
        "serve",
        summary="serve a model",
        description="Serve a model to interpose clients. Starts Ray on this machine, or joins the cluster at "
        "RAY_ADDRESS (HOST:PORT). Further flags go to the engine, by vLLM's names: --max-model-len 4096.",
        examples=(
            "interpose serve .demo/smollm2 --dtype float32",
            "interpose serve Qwen/Qwen3-8B --tensor-parallel-size 2 --max-model-len 4096",
            "interpose serve --config service.yaml",
        ),
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a path or a Hugging Face id; or `models` in FILE")
    of_model = parser.add_argument_group("the model")
    of_model.add_argument("--name", metavar="NAME", help="for clients (default: the last part of MODEL)")
    of_model.add_argument("--tensor-parallel-size", "-tp", type=int, metavar="N", help="ranks that share each layer")
    of_model.add_argument("--pipeline-parallel-size", "-pp", type=int, metavar="N", help="stages that share the layers")
    of_model.add_argument("--replicas", type=int, metavar="N", help="engines of the model, each with all its workers")
    of_model.add_argument(
        "--lora-modules", nargs="+", metavar="NAME=PATH", help="LoRA adapters, by the names that requests use"
    )
    of_service = parser.add_argument_group("the service")
    add_listening(of_service)
    of_service.add_argument("--host", metavar="HOST", help="where it listens (default: 127.0.0.1, this machine only)")
    flags = frozenset(flag for action in parser._actions for flag in action.option_strings)
    parser.set_defaults(run=run, takes_engine_arguments=True, own_flags=flags)
    return parser


def add_listening(parser: Any) -> None:
    """Add the flags that say which ports a service has, and in which file its settings are."""
    parser.add_argument("--port", type=int, metavar="N", help="where clients connect (default: 9000)")
    parser.add_argument(
        "--http-port", type=int, metavar="N", help="where OpenAI clients connect (default: any free port)"
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file with any of the settings")


def run(args: argparse.Namespace) -> int:
    """Serve until an interrupt; return the exit status."""
    try:
        from executor.cluster.checkpoint import check_model
        from executor.cluster.environment import hide_keys
        from executor.core.engine_names import check_flags
        from serve_app.environment import own_head_environment, proxy_environment
        from serve_app.secrecy import forget_variables, keep_to_itself
        from serve_app.settings import settings_from
        from serve_app.tenants.book import book_of
    except ImportError as error:
        complain("serve", f"{error}. {SERVER_MISSING}")
        return 1
    address = os.environ.get("RAY_ADDRESS")
    try:
        check_flags(args.engine_arguments, args.own_flags)
        settings = settings_from(_arguments(args, _some_engine_arguments(args.engine_arguments)))
        if not address:  # on a cluster a model is where its workers are, and its engine looks for it there
            for model in settings.models:
                check_model(model)
            book_of(settings.tenants, settings.tenants_file)  # on a cluster the file is on the head
        if args.engine_arguments:  # only now: it takes long
            settings = settings_from(_arguments(args, _engine_arguments(args.engine_arguments)))
        if not address:
            # Before Ray is imported.
            os.environ.update(own_head_environment() | proxy_environment(settings))
        for warning in settings.warning.splitlines():
            complain("serve", warning)
        # The settings have the hashes. Blocks run in some of the processes below this process.
        forget_variables(hide_keys())
        from serve_app.builder import autoscaling
        from serve_app.cluster import JoinedCluster, OwnHead
        from serve_app.service import Service, ServiceError

        for model in settings.models:
            autoscaling(model)  # refuses what Serve would, before anything starts
        workers = sum(model.world_size * model.most_replicas for model in settings.models)
        cluster = JoinedCluster(address) if address else OwnHead(workers, settings.metrics.port)
    except (ValueError, ConnectionError) as error:
        complain("serve", error)
        return USAGE_STATUS
    service = Service(settings, cluster)
    line = ProgressLine(sys.stderr)
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    out = sys.stdout
    keep_to_itself()
    try:
        # Ray prints its cluster's complaints to standard output, where only the address belongs.
        with contextlib.redirect_stdout(sys.stderr):
            service.start(line)
            line.end()
            names = ", ".join(model.name for model in settings.models)
            print(f"interpose: serving {names} at {service.address} ({line.seconds:.0f} s)", file=out, flush=True)
            if service.http_address:
                print(f"interpose: OpenAI-compatible requests at {service.http_address}", file=out, flush=True)
            service.run()
    except KeyboardInterrupt:
        return 0
    except ServiceError as error:
        line.end()
        complain("serve", error)
        return 1
    finally:
        # A second signal must not leave half of it running.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        line("stopping")
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            service.stop()
        line.end()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _arguments(args: argparse.Namespace, engine: dict[str, Any]) -> dict[str, Any]:
    of_model = {
        "name": args.name,
        "tensor_parallel_size": args.tensor_parallel_size,
        "pipeline_parallel_size": args.pipeline_parallel_size,
        "replicas": args.replicas,
        "lora_modules": args.lora_modules,
        "engine": engine or None,
    }
    given = {key: value for key, value in of_model.items() if value is not None}
    flags: dict[str, Any] = {"config_file": args.config}
    if args.model:
        flags.update(model=args.model, **given)
    elif given:
        raise ValueError("arguments of a model need a MODEL; without one, put them under `models` in the file")
    grpc = {key: value for key, value in {"port": args.port, "host": args.host}.items() if value is not None}
    http = {"port": args.http_port, "host": args.host} if args.http_port is not None else {}
    http = {key: value for key, value in http.items() if value is not None}
    return {**flags, "grpc": grpc or None, "http": http or None}


def _engine_arguments(arguments: list[str]) -> dict[str, Any]:
    """Parse the given flags of vLLM with vLLM's own parser; defaults are left out."""
    # Without a GPU it warns that Triton is disabled, which no operator can change.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="interpose serve MODEL"))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return vars(parser.parse_args(arguments))


def _some_engine_arguments(arguments: list[str]) -> dict[str, Any]:
    """Return the arguments of vLLM that name files of the engine, without importing vLLM."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in _FILES:
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}")
    for name in _CODE:
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", action=argparse.BooleanOptionalAction)
    parser.add_argument("--hf-token", "--hf_token", nargs="?", const=True)
    return vars(parser.parse_known_args(arguments)[0])
