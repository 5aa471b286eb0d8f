"""The `interpose` command.

Each subcommand imports its needs when it runs, because the client can be installed alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from interpose.cli import demo_model, keys, operate, serve, status
from interpose.contract.version import VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="interpose", description="Run your own code inside a served model's forward pass.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"interpose {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (serve, status, keys, demo_model):
        command.add_parser(commands)
    operate.add_parsers(commands)
    given, rest = parser.parse_known_args(arguments)
    if rest and not getattr(given, "takes_engine_arguments", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    given.engine_arguments = rest
    return int(given.run(given))
