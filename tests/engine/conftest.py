"""One in-process engine for each architecture, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from interpose.cli.demo_model import write_demo_model
from tests.engine.harness import LocalEngine, compile_here
from tests.engine.in_two_ways import in_two_ways
from tests.engine.kept import KEPT, Kept
from tests.oracle import Oracle

# vLLM's kernels for adapters on GPUs take half precision only, and what is compared here is float32: see tests/gpu.
collect_ignore = ["test_lora.py"] if torch.cuda.is_available() else []

# A context of ZeroMQ that is collected together with its open sockets waits for them for ever. vLLM closes them before, but not
# those of an engine that did not come up: after one failed start the whole run would hang.
zmq.Context.__del__ = lambda self: None  # type: ignore[method-assign]


class Bench:
    """An engine and the oracle on the same checkpoint."""

    def __init__(
        self, checkpoint: Path, arch: str, engine: Callable[..., LocalEngine] = LocalEngine, **options: Any
    ) -> None:
        self.checkpoint = checkpoint
        self.arch = arch
        self.engine = engine(checkpoint, **{"dtype": "float32", **options})
        self.oracle = Oracle(checkpoint)

    def block(self, layer: int) -> str:
        """The path of one block."""
        return f"transformer.h.{layer}" if self.arch == "gpt2" else f"model.layers.{layer}"


def expression(path: str) -> str:
    """What a block writes to name the module at `path`."""
    return "model." + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split(".")).lstrip(".")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalEngine, LocalEngine]]:
    """Two engines of one model: loops as blocks, and in the tables."""
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    with in_two_ways(checkpoint, {"graphs": False}, {"graphs": True}, max_num_seqs=8) as made:
        yield made


@pytest.fixture(scope="package")
def kept() -> Iterator[Kept]:
    """The engines that stay for the next file."""
    yield KEPT
    KEPT.close()


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def bench(request: pytest.FixtureRequest, kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """An engine that files share, as it was when it started: nothing is in its cache, and nothing was left behind."""

    def start() -> Bench:
        checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / request.param, request.param)
        return Bench(checkpoint, request.param)

    with kept.use(request.param, start, lambda bench: bench.engine.close()) as bench:
        yield bench
        assert bench.engine.interleaver.idle, "a trace left something behind"
        assert not any(
            module._forward_hooks or module._forward_pre_hooks
            for module in bench.engine.worker.model_runner.get_model().modules()
        )
        assert not bench.engine.applied and not bench.engine.trusted and bench.engine.compile is compile_here
        assert bench.engine.llm.reset_prefix_cache()
