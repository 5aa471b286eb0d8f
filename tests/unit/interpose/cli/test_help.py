"""The help of `interpose`: it fits a screen, its examples are understood, and mistakes get the names that are near."""

from __future__ import annotations

import shlex

import pytest

from interpose.cli import GROUPS, main, make_parser
from interpose.cli.parsing import Parser

LINES, COLUMNS = 24, 80
# Commands with a flag for each size of a model, or for each thing that a service can be given.
LONG = {"serve": 45, "demo-model": 35, "doctor": 30}


def parsers() -> dict[str, Parser]:
    parser, commands = make_parser()
    below = {
        f"{name} {inner}": one
        for name, command in commands.items()
        for action in command._actions
        if isinstance(action.choices, dict)
        for inner, one in action.choices.items()
    }
    return {"": parser, **commands, **below}


@pytest.mark.parametrize("name", parsers())
def test_help_fits_a_screen_and_ends_with_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    lines = parsers()[name].format_help().splitlines()
    assert len(lines) <= LONG.get(name, LINES), len(lines)
    assert all(len(line) <= COLUMNS for line in lines)
    assert lines[-1].startswith("  interpose ") and "xamples:" in "".join(lines)


def test_the_overview_has_each_command_once() -> None:
    _, commands = make_parser()
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(commands) and all(parser.summary for parser in commands.values())


def examples() -> list[str]:
    shown = [line.strip() for parser in parsers().values() for line in parser.format_help().splitlines()]
    return sorted({line for line in shown if line.startswith("interpose ") and "…" not in line})


@pytest.mark.parametrize("line", examples())
def test_examples_are_understood(line: str) -> None:
    parser, _ = make_parser()
    _, *arguments = shlex.split(line.partition(" | ")[0].partition(" < ")[0])
    given, rest = parser.parse_known_args(arguments)
    assert callable(given.run) and (not rest or given.takes_engine_arguments)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stauts", "interpose: there is no command 'stauts'; did you mean status"),
        ("xyz", "interpose: there is no command 'xyz'; there are serve, status, keys"),
        ("keys lst", "interpose keys: there is no command 'lst'; did you mean list?"),
        ("status --adress x", "interpose status: unknown flag --adress; did you mean --address?"),
        ("drain --modle=x", "interpose drain: unknown flag --modle; did you mean --model?"),
        ("tenants extra", "interpose tenants: unexpected argument 'extra'"),
        ("demo-model x --arch lama", "interpose demo-model: --arch cannot be 'lama'; did you mean llama?"),
        ("cancel", "interpose cancel: the following arguments are required: KEY"),
    ],
)
def test_a_mistake_gets_one_line_with_what_is_near(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    said = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and said[0].startswith(message), said
    assert len(said) == 2 and said[1].endswith("--help` shows what can be given")


def test_without_a_command_there_is_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "For operators of a service:" in capsys.readouterr().err
