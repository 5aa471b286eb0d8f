"""What the checkpoints that are asked for most get by their configuration alone: `docs/models.md`.

The command `python -m tests.fidelity.checkpoints [ARCHITECTURE…]` serves each configuration of `tests.fidelity.configurations`,
with random weights, on the CPU. It asks for every canonical value of every layer, first as `model.serves` does and then in a
trace, and writes the page. If the command names architectures, it measures these and leaves the other architectures as the page
has them. With `--check` it writes nothing, and fails if the page says otherwise.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests import stand_ins
from tests.conftest import ENVIRONMENT

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
NOT_SERVED = "vLLM's CPU build does not serve it"
MODULES = "modules alone, by their names: vLLM serves it with transformers' code, whose parts have no canonical names"
GIVEN, NONE, UNKNOWN = "yes", "–", "not measured"
SECONDS = 300
_TITLES = ("## Checkpoints", "## Values", "## Why")
_TRACED = """\
failed = {{}}
for name, place in {{
{places}
}}.items():
    try:
        place()
    except Exception as error:
        failed[name] = str(error)
failed.save()
"""
HEAD = """\
# Models

What the checkpoints that are asked for most get by their configuration alone. Each configuration has the facts of the real one
(kinds of layers, of attention and of experts, norms, biases, windows, multipliers), two layers, 128 columns and random
weights. The command `python -m tests.fidelity.checkpoints` serves each configuration on a CPU with one rank, and asks
`model.serves` for every [canonical value](views.md) of every layer. Then a trace reads each value that `model.serves` says is
given, and the command writes this page.

This page says what is given. [fidelity.md](fidelity.md) says how true it is, for the architectures that have a column there.
Weights that are quantised, sizes that need another kernel, or a GPU may change what is given: ask `model.serves` of the model as
you serve it.

On CPUs with AMX the service refuses traces of models with latent attention (DeepSeek, Kimi, GLM-4.7-Flash): vLLM's kernels for it
there have not been compared with transformers. This page says what they would give.

Models that take images are served for text (`--language-model-only`); a trace takes no images. vLLM's code of Qwen3.5, Qwen3.6
and the Qwen-VL models imports torchvision. It must be installed, and be built for the torch that is installed.
"""


# architecture → value → what is said of each layer that differs: `GIVEN`, or a refusal. Under "" why there is no engine.
Found = dict[str, dict[str, list[str]]]


def measure(architecture: str, result: Path) -> None:
    """Serve one configuration, and write what it gives; this process ends afterwards."""
    from vllm.model_executor.model_loader import dummy_loader

    from executor.plugin.config import check_config, prepare_environment
    from interpose.cli.demo_model import Shape, _tokenizer
    from interpose.modules.tree import tree_of
    from tests.engine.harness import LocalEngine
    from tests.fidelity.configurations import CONFIGURATIONS, CONTEXT, VOCABULARY

    prepare_environment(1)
    # vLLM's own are alike in all layers, and too small for the sums of a probe run.
    torch.manual_seed(0)
    dummy_loader.initialize_single_dummy_weight = _randomise  # type: ignore[assignment]
    [one] = [one for one in CONFIGURATIONS if one.architecture == architecture]
    folder = result.with_suffix("")
    folder.mkdir()
    made = one.made()
    delta = "linear_attention" in (getattr(made.get_text_config(), "layer_types", None) or ())
    dtype = "bfloat16" if delta else "float32"  # vLLM's CPU build has Gated DeltaNet in bfloat16 alone
    config = made.to_dict() | {"architectures": [architecture], "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    _tokenizer(Shape(vocab=VOCABULARY, context=CONTEXT), with_bos=False).save_pretrained(folder)
    options: dict[str, Any] = {"language_model_only": True} if "text_config" in config else {}
    try:
        engine = LocalEngine(folder, dtype=dtype, load_format="dummy", **options)
        check_config(engine.llm.llm_engine.vllm_config)
    except Exception as error:
        found = {"": [_reason(error)]}
    else:
        found = _asked(tree_of(engine.describe()), engine) or {"": [MODULES]}
    new = result.with_suffix(".new")
    new.write_text(json.dumps(found))
    new.rename(result)
    os._exit(0)  # with nothing of the engine left


def _randomise(parameter: torch.Tensor, *_: Any, **__: Any) -> None:  # any shape
    if parameter.is_floating_point() and parameter.device.type != "meta":
        parameter.data.uniform_(-0.2, 0.2)


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = next(
        (line for line in lines if line.startswith(("Value error,", "Assertion failed,"))), lines[-1] if lines else ""
    )
    text = text.removeprefix("Value error, ").partition(" [type=")[0]
    return (text or type(error).__name__)[:200]


def _asked(tree: Any, engine: Any) -> dict[str, list[str]]:
    from executor.model.tree import LOGITS
    from interpose.contract.names import written
    from interpose.modules.serves import verdict
    from tests.engine.harness import Block

    places = [
        f"{written(node.path)}.{name}"
        for root in tree.pseudo.values()
        for node in root.walk()
        if node.canonical
        for name in [*node.values, *node.lacking]
    ]
    said = {place: verdict(tree, place).reason for place in places}
    modules = engine.worker.interpose_tree

    def order(place: str) -> int:
        above, _, name = ".".join(place.replace("[", ".").replace("]", "").split(".")[1:]).rpartition(".")
        view = modules.find(above).views[name] if modules.find(above).views else None
        path, kind = (view.node.path, view.kind) if view is not None else (LOGITS, "output")
        return int(modules.order_of(path, kind))

    given = sorted((place for place, why in said.items() if not why), key=order)
    source = _TRACED.format(places="\n".join(f"    {place!r}: lambda: {place}," for place in given))
    [ran] = engine.run(Block([5, 40, 17, 200], source, {"max_tokens": 2, "ignore_eos": True}))
    if ran.failure is not None:
        raise RuntimeError(ran.failure.message)
    said |= ran.saved["failed"]
    found: dict[str, list[str]] = {}
    for place, why in said.items():
        row = re.sub(r"\bblocks\[\d+\]", "blocks[i]", place).removeprefix("model.")
        text = general(why) if why else GIVEN
        layers = found.setdefault(row, [])
        if text not in layers:
            layers.append(text)
    return found


def general(message: str) -> str:
    """Return a refusal without the number of the layer."""
    return re.sub(r"\b(layers|blocks|h)(\[|\.)\d+", r"\1\2i", message)


def measured(architectures: Sequence[str]) -> Found:
    """Measure; each configuration in a process of its own, which another one's failure does not reach."""
    from vllm import LLM  # noqa: F401 - imported here, for all

    fork = multiprocessing.get_context("fork")
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in architectures:
            result = Path(folder) / f"{name}.json"
            process = fork.Process(target=measure, args=(name, result))
            process.start()
            process.join(SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
            if not result.exists():  # no word of whether vLLM serves it
                raise RuntimeError(f"{name} was not measured: its process ended with {process.exitcode}")
            found[name] = json.loads(result.read_text())
    return found


def render(found: Found) -> str:
    """Return the page."""
    from tests.fidelity.configurations import CONFIGURATIONS

    whys: dict[str, str] = {}

    def short(said: str) -> str:
        return said if said == GIVEN else whys.setdefault(said, f"R{len(whys) + 1}")

    values = list(dict.fromkeys(value for rows in found.values() for value in rows if value))
    served = [one for one in CONFIGURATIONS if "" not in found[one.architecture]]
    lines = [
        HEAD,
        _TITLES[0],
        "",
        "| checkpoint | vLLM's class | values given | refused |",
        "| --- | --- | --- | --- |",
    ]
    for one in CONFIGURATIONS:
        rows = found[one.architecture]
        [lacks] = rows.get("", [UNKNOWN])
        why = lacks if lacks in (UNKNOWN, MODULES) else f"{NOT_SERVED}: {_cell(lacks)}"
        said = f"{why} | " if "" in rows else _counted(rows)
        lines += [f"| {name} | `{one.architecture}` | {said} |" for name in one.checkpoints]
    classes = [one.architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration") for one in served]
    lines += [
        "",
        _TITLES[1],
        "",
        f'"{GIVEN}", or a refusal by its number below; both where layers of one model differ.',
        "",
    ]
    lines += [f"| | {' | '.join(classes)} |", f"| --- {'| --- ' * len(classes)}|"]
    for value in values:
        cells = ["/".join(map(short, found[one.architecture].get(value, []))) or NONE for one in served]
        lines.append(f"| `{value}` | {' | '.join(cells)} |")
    lines += ["", _TITLES[2], "", *(f"- {number}: {_cell(why)}" for why, number in whys.items()), ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return re.sub(r"([|<>*_\[\]])", r"\\\1", " ".join(text.split()))


def _counted(rows: dict[str, list[str]]) -> str:
    given = sum(said == [GIVEN] for said in rows.values())
    partly = sum(GIVEN in said and said != [GIVEN] for said in rows.values())
    beside = f", and {partly} in some layers" if partly else ""
    return f"{given}{beside} | {len(rows) - given - partly}"


def parse(page: str) -> Found:
    """Return what a page says."""
    from tests.fidelity.configurations import CONFIGURATIONS

    first, second, third = (page.split(f"\n{title}\n")[1].split("\n## ")[0] for title in _TITLES)
    whys = {number: _plain(why) for number, why in re.findall(r"^- (R\d+): (.*)$", third, re.M)}
    found: Found = {}
    served = []
    for one in CONFIGURATIONS:
        line = next((line for line in first.splitlines() if f"`{one.architecture}`" in line), "")
        cell = line.split(" | ")[2] if line else UNKNOWN
        lacks = NOT_SERVED in cell or _plain(cell) in (UNKNOWN, MODULES)
        found[one.architecture] = {"": [_plain(cell.removeprefix(f"{NOT_SERVED}: "))]} if lacks else {}
        served += [] if lacks else [one.architecture]
    for line in second.splitlines():
        if line.startswith("| `"):
            value, *cells = [cell.strip() for cell in line.strip("| ").split("|")]
            for name, cell in zip(served, cells, strict=True):
                if cell != NONE:
                    found[name][value.strip("`")] = [whys.get(said, said) for said in cell.split("/")]
    return found


def _otherwise(said: Found, now: Found) -> list[str]:
    """Return what was measured otherwise than a page says."""
    places = [(name, value) for name in now for value in sorted({*said[name], *now[name]})]
    return [
        f"{name}, {value or 'start'}: the page has {said[name].get(value)}, measured was {now[name].get(value)}"
        for name, value in places
        if said[name].get(value) != now[name].get(value)
    ]


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text.strip().removesuffix("|").strip())


def main() -> None:
    """Measure, and write the page; see the module's docstring."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    stand_ins.use()
    from tests.fidelity.configurations import CONFIGURATIONS

    known = [one.architecture for one in CONFIGURATIONS]
    parser = argparse.ArgumentParser("tests.fidelity.checkpoints", description="Measure, and write docs/models.md.")
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help="vLLM's class, as the page names it")
    parser.add_argument("--check", action="store_true", help="compare with the page, and write nothing")
    given = parser.parse_args()
    asked = given.architectures or known
    before = parse(PAGE.read_text()) if PAGE.exists() else {}
    if given.check:
        sys.exit("\n".join(_otherwise({name: before[name] for name in asked}, measured(asked))) or None)
    found = {name: before.get(name, {"": [UNKNOWN]}) for name in known}
    for name in asked:  # the page is written after each, so that nothing is measured twice
        found |= measured([name])
        PAGE.write_text(render(found))


if __name__ == "__main__":
    main()
