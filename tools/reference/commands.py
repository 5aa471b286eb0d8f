"""The page of the commands, from their parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from interpose.cli import GROUPS, make_parser
from interpose.cli.parsing import Parser

_INTRODUCTION = """\
# Commands

`python -m tools.reference` writes this page from the parsers of the commands, and a test holds it against them.
`--help` says the same. `interpose serve` hands flags that are not here on to vLLM. A command or a
flag that does not exist gets the names that are near, and exit status 2.
"""


def commands_page() -> str:
    """Return the page as Markdown."""
    _, commands = make_parser()
    parts = [_INTRODUCTION]
    for title, names in GROUPS.items():
        parts += [f"## {title}\n"]
        for name in names:
            parts += _command(f"interpose {name}", commands[name])
    return "\n".join(parts).rstrip() + "\n"


def _command(name: str, parser: Parser) -> Iterator[str]:
    below = next((one for one in parser._actions if isinstance(one, argparse._SubParsersAction)), None)
    yield f"### `{name}`\n"
    yield f"{parser.description}\n"
    if below is None:
        yield "```sh"
        yield from parser.examples
        yield "```\n"
        yield "| argument | what |"
        yield "| --- | --- |"
        yield from (_row(action) for action in parser._actions if not isinstance(action, argparse._HelpAction))
        yield ""
    else:
        for inner, one in below.choices.items():
            yield from _command(f"{name} {inner}", one)


def _row(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    names = [f"`{option}{value and ' ' + value}`" for option in action.option_strings] or [f"`{value}`"]
    return f"| {', '.join(names)} | {(action.help or '').replace('|', chr(92) + '|')} |"
