"""The `interpose` command.

Each subcommand imports its needs when it runs, because the client can be installed alone. The parsers are argparse's: the
client's wheel stays light, and flags of vLLM that the command does not know go on to the engine as they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from interpose.cli import demo_model, doctor, keys, operate, serve, status
from interpose.cli.parsing import USAGE_STATUS, Parser
from interpose.contract.version import VERSION

# The commands in the order of the help.
GROUPS: dict[str, tuple[str, ...]] = {
    "Serve a model": ("serve", "demo-model", "doctor"),
    "Look at a service": ("status", "keys"),
    "For operators of a service": ("traces", "cancel", "drain", "tenants", "usage"),
}
_EXAMPLES = (
    "interpose demo-model .demo/smollm2 --pretrained smollm2",
    "interpose serve .demo/smollm2 --dtype float32",
    "interpose status --address localhost:9000",
)


def make_parser() -> tuple[Parser, Mapping[str, Parser]]:
    """Return the parser of the `interpose` command, and those of its subcommands by their names."""
    parser = Parser(
        prog="interpose",
        usage="interpose [--version] COMMAND [--help] …",
        description="Run your own code inside a served model's forward pass.",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"interpose {VERSION}", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(metavar="COMMAND", help=argparse.SUPPRESS, prog="interpose")
    for command in (serve, status, keys, doctor, demo_model):
        command.add_parser(commands)
    operate.add_parsers(commands)
    parser.epilog = _overview(commands.choices)
    return parser, commands.choices


def _overview(commands: Mapping[str, Parser]) -> str:
    parts = [
        "\n".join((f"{title}:", *(f"  {name:<12}{commands[name].summary}" for name in names)))
        for title, names in GROUPS.items()
    ]
    return "\n\n".join((*parts, "\n".join(("Examples:", *(f"  {line}" for line in _EXAMPLES)))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser, _ = make_parser()
    given, rest = parser.parse_known_args(arguments)
    if rest and not getattr(given, "takes_engine_arguments", False):
        given.parser.refuse(rest)
    if not hasattr(given, "run"):
        parser.print_help(sys.stderr)
        return USAGE_STATUS
    given.engine_arguments = rest
    return int(given.run(given))
