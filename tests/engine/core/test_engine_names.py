"""The names that are read from the engine's source are those of its own parser and its own dataclass."""

from __future__ import annotations

import dataclasses

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from executor.core.engine_names import arguments, flags


def test_arguments_are_the_fields() -> None:
    assert arguments() == {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def test_flags_are_the_parsers() -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    real = {flag for action in parser._actions for flag in action.option_strings}
    negated = {flag for flag in real if flag.startswith("--no-") and "--" + flag.removeprefix("--no-") in real}
    assert flags() == real - negated - {"-h", "--help"}
