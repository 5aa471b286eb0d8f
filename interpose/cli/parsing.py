"""The parsers of the command: examples in the help, and near misses in the errors."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

USAGE_STATUS = 2
SERVER_MISSING = (
    "The server is not part of the client's package: `interpose doctor --server` says what is missing and how to get it"
)


class Parser(argparse.ArgumentParser):
    """A parser whose help ends with examples, and whose errors name what is near.

    Args:
        summary: what the command does, in a few words without a full stop.
        examples: command lines, which the help shows as they are.
        options: as of `argparse.ArgumentParser`.
    """

    def __init__(self, summary: str = "", examples: Sequence[str] = (), **options: Any) -> None:
        self.summary = summary
        self.examples = tuple(examples)
        if summary:
            options.setdefault("description", f"{summary[0].upper()}{summary[1:]}.")
        if examples:
            options.setdefault("epilog", "\n".join(("examples:", *(f"  {line}" for line in examples))))
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)
        # The innermost parser of a command line, to which an unknown flag belongs.
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """End the program with status 2, a reason in one line, and the way to the help."""
        self.exit(USAGE_STATUS, f"{self.prog}: {message}\n`{self.prog} --help` shows what can be given\n")

    def refuse(self, rest: Sequence[str]) -> NoReturn:
        """End the program because of arguments that this parser does not have."""
        flags = [argument.partition("=")[0] for argument in rest if argument.startswith("-") and argument != "-"]
        if not flags:
            self.error(f"unexpected argument {rest[0]!r}")
        known = [option for action in self._actions for option in action.option_strings]
        self.error("; ".join(f"unknown flag {flag}{near(flag, known)}" for flag in flags))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        hint = near(str(value), known) or f"; there are {', '.join(known)}"
        if action.option_strings:
            self.error(f"{'/'.join(action.option_strings)} cannot be {value!r}{hint}")
        self.error(f"there is no command {value!r}{hint}")


class _Formatter(argparse.HelpFormatter):
    """Wraps text of one line, and leaves text of several lines as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "".join(f"{indent}{line}\n" for line in text.splitlines())
        return super()._fill_text(text, width, indent)


def near(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean a or b?" for a name that is close to known names, else ""."""
    # Here, so that `interpose doctor` runs where the packages that errors need are missing.
    from interpose.contract.errors import did_you_mean

    found = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    return f"; {did_you_mean(found)}" if found else ""


def complain(command: str, message: object) -> None:
    """Print the reason why a command does not succeed."""
    print(f"interpose {command}: {message}", file=sys.stderr)
