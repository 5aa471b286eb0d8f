"""What `make demo` serves: the tiny model over two ranks, and SmolLM2 in one; and what it does where that cannot be had."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.fixture
def demo() -> Any:
    spec = importlib.util.spec_from_file_location("demo_of_the_examples", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ran(demo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the demo with services and commands stood in for; returns its status, what was traced, and what was made."""

    def run(made: int = 0, statuses: tuple[int, ...] = (0, 0)) -> tuple[int, list[tuple[str, int]], list[list[str]]]:
        traced: list[tuple[str, int]] = []
        commands: list[list[str]] = []

        def command(arguments: list[str], check: bool) -> Any:
            commands.append(arguments[1:])
            return SimpleNamespace(returncode=made if "--pretrained" in arguments else 0)

        def trace(models: dict[Path, int], directory: Path) -> dict[Path, int]:
            traced.extend((checkpoint.name, workers) for checkpoint, workers in models.items())
            return dict(zip(models, statuses, strict=True))

        monkeypatch.setattr(demo.subprocess, "run", command)
        monkeypatch.setattr(demo, "traced", trace)
        monkeypatch.setattr(sys, "argv", ["demo.py", "--directory", str(tmp_path), "--pip-args=-i there"])
        return demo.main(), traced, commands

    return run


def test_both_models_are_served(ran: Any) -> None:
    status, traced, commands = ran()
    assert (status, traced) == (0, [("tiny-llama", 2), ("smollm2", 1)])
    assert commands[-1][2:] == ["--pretrained", "smollm2", "--pip-args=-i there"]


def test_a_checkpoint_of_an_earlier_run_is_kept(ran: Any, tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "model.safetensors").touch()
    status, traced, commands = ran()
    assert (status, len(traced)) == (0, 2)
    assert not any("--pretrained" in command for command in commands)


def test_without_the_package_the_tiny_model_is_enough(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, traced, _ = ran(made=3, statuses=(0,))
    assert (status, traced) == (0, [("tiny-llama", 2)])
    assert "SmolLM2 cannot be had here" in capsys.readouterr().out


def test_a_failed_conversion_is_a_failed_demo(ran: Any, demo: Any) -> None:
    with pytest.raises(demo.DemoFailed, match="ended with status 1"):
        ran(made=1)


@pytest.mark.parametrize("statuses", [(1, 0), (0, 1)])
def test_an_edit_without_effect_is_a_failed_demo(ran: Any, statuses: tuple[int, ...]) -> None:
    assert ran(statuses=statuses)[0] == 1
