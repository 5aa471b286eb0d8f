"""`model.explain`: tiers of a block's parts, the lines that keep them from better tiers, and what runs afterwards as it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import interpose
from interpose.cli.demo_model import write_demo_model
from tests.engine.conftest import Bench
from tests.engine.harness import LocalEngine
from tests.engine.notebook import notebook

PROMPT = [5, 400, 17, 99, 256, 31, 8]
STEPS = 6
EVERY = {"max_tokens": STEPS, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    """An engine whose loops run in the tables."""
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    engine = LocalEngine(checkpoint, graphs=True, dtype="float32", max_num_seqs=8)
    yield engine
    assert engine.interleaver.idle, "a trace left something behind"
    engine.close()


@pytest.fixture
def model(engine: LocalEngine) -> Any:
    return notebook(engine)


# A block, the tier of its loop, the line that keeps the loop from a better one, and a part of the reason.
HEAD = "kept = [].save()\nfor step in tracer.iter[:]:\n"
TIERS = {
    "a change": (HEAD + "    model.model.layers[1].output[0][:] += vector\n", "graph", 0, ""),
    "a read": (HEAD + "    kept.append(model.blocks[1].resid_post.save())\n", "graph", 0, ""),
    "a product": (
        HEAD + "    h = model.model.layers[1].output[0]\n    h[:] = torch.relu(h @ square)\n",
        "graph",
        0,
        "",
    ),
    "logits": (HEAD + "    kept.append(model.logits.output.argmax(-1))\n", "graph", 0, ""),
    "steps left out": (
        "kept = [].save()\nfor step in tracer.iter[1::2]:\n    kept.append(model.model.layers[1].output[0].save())\n",
        "plan",
        0,
        "consecutive steps",
    ),
    "a decision": (
        HEAD + "    h = model.model.layers[1].output[0]\n    if h.norm() > 3:\n        h[:] = 0\n",
        "graph",
        0,
        "",
    ),
    "a save where a value decides": (
        HEAD + "    h = model.model.layers[1].output[0]\n    if h.norm() > 3:\n        h.save()\n",
        "block",
        5,
        "saved where a value decides",
    ),
    "a print": (HEAD + "    print(step)\n", "block", 3, "print sends text"),
    "an attention pattern": (HEAD + "    kept.append(model.blocks[0].attn.pattern)\n", "block", 3, "attn.pattern"),
    "a loop in another statement": (
        "kept = [].save()\nif True:\n    for step in tracer.iter[:]:\n        kept.append(model.logits.output)\n",
        "block",
        3,
        "inside another statement",
    ),
    "a recorder": (
        "cache = tracer.cache(modules=[model.model.layers[0]])\n" + HEAD + "    kept.append(model.model.norm.input)\n",
        "plan",
        0,
        "records the steps",
    ),
    "a state of the process": (
        "torch.set_default_dtype(torch.float64)\n" + HEAD + "    kept.append(model.model.norm.input)\n",
        "block",
        0,
        "state of the process",
    ),
    "no loop": ("print(1)\nkept = model.model.layers[1].output[0].save()\n", "block", 1, "print sends text"),
}


@pytest.mark.parametrize("name", TIERS)
def test_a_trace_runs_in_the_tier_that_the_explanation_names(engine: LocalEngine, name: str) -> None:
    text, tier, line, why = TIERS[name]
    model, vector, square = notebook(engine), torch.ones(128), torch.eye(128)
    [part] = model.explain(text, PROMPT).parts
    assert (part.tier, part.best, part.at) == (tier, tier, line), part
    assert why in part.why and (part.why == "") == (tier == "graph")
    assert part.at_text == (text.splitlines()[line - 1].strip() if line else "")
    before = engine.interleaver.loops.steps
    scope = {"model": model, "torch": torch, "vector": vector, "square": square}
    lines = ["with model.trace(prompt, **every) as tracer:", *(f"    {one}" for one in text.splitlines())]
    ran = _ran("\n".join(lines), scope | {"prompt": PROMPT, "every": EVERY})
    assert ran.tiers.get("graph", 0) == engine.interleaver.loops.steps - before
    if tier == "block":
        assert ran.tiers.keys() <= {"block", "idle"}
    else:
        assert ran.tiers[tier] > 1


def _ran(text: str, names: dict[str, Any]) -> Any:
    """Run a trace that is given as a text; return its accounting."""
    import linecache

    filename = f"<explained {hash(text)}>"
    linecache.cache[filename] = (len(text), None, [line + "\n" for line in text.splitlines()], filename)
    exec(compile(text, filename, "exec"), names)
    return names["tracer"].accounting


# A block, the tier of its part, a part of the reason, and of the note about the prompt's step.
PROMPTS = {
    "reads": ("kept = model.model.layers[1].output[0].save()\n", "graph", "", "for the second time"),
    "patches": (
        "h = model.model.layers[1].output[0]\nh[[1, 3]] = vector\nh[-1] += vector\n",
        "graph",
        "",
        "second time",
    ),
    "a probe": ("kept = torch.relu(model.model.layers[1].output[0]).save()\n", "block", "aten.relu", ""),
    "a loop that reads": (HEAD + "    kept.append(model.model.layers[1].output[0].save())\n", "graph", "", ""),
    "a loop with a product": (
        HEAD + "    kept.append(torch.relu(model.model.layers[1].output[0]).save())\n",
        "graph",
        "",
        "",
    ),
    "a loop over all rows": (
        HEAD + "    kept.append(torch.softmax(model.model.layers[1].output[0], 0).save())\n",
        "graph",
        "",
        "line 2: the step of the prompt runs as it is: the tables",
    ),
    "a loop after a read": (
        "first = model.model.layers[0].output[0].save()\n" + HEAD + "    kept.append(model.model.norm.input)\n",
        "graph",
        "",
        "line 3: the step of the prompt runs as it is: the block asks for something",
    ),
    "the last row alone": (
        "kept = [].save()\nfor step in tracer.iter[:]:\n    kept.append(model.blocks[1].resid_post[-1].save())\n",
        "graph",
        "",
        "none of its prompt's rows but the last 1",
    ),
    "a loop from the second step on": (
        "kept = [].save()\nfor step in tracer.iter[1:]:\n    kept.append(model.model.layers[1].output[0].save())\n",
        "graph",
        "",
        "may come from the engine's prefix cache",
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_the_prompt_s_step_runs_in_the_tier_that_the_explanation_names(engine: LocalEngine, name: str) -> None:
    text, tier, why, note = PROMPTS[name]
    model = notebook(engine)
    vector = torch.ones(128)
    scope = {"model": model, "torch": torch, "vector": vector}
    found = model.explain(text, PROMPT)
    [part] = found.parts
    assert (part.tier, part.best) == (tier, tier) and why in part.why and bool(part.why) == bool(why)
    assert len(found.notes) == bool(note) and note in "".join(found.notes), found.notes
    lines = ["with model.trace(prompt, **every) as tracer:", *(f"    {one}" for one in text.splitlines())]
    names = scope | {"prompt": PROMPT, "every": EVERY | {"max_tokens": 1}}
    for _ in range(2):  # the second time, the length is known
        ran = _ran("\n".join(lines), names)
    skipped = "tracer.iter[1:]" in text
    as_it_is = tier == "block" or "runs as it is" in note
    assert ran.tiers == ({} if skipped else {"block": 1} if as_it_is else {"graph": 1}) or (
        skipped and "graph" not in ran.tiers
    )


def test_a_block_where_it_stands_does_not_run(model: Any, engine: LocalEngine) -> None:
    kept = vector = None
    vector = torch.ones(128)
    with model.trace(PROMPT, explain=True) as tracer:
        kept = [].save()
        print("nothing of this arrives")
        for _ in tracer.iter[:]:
            model.model.layers[1].output[0][:] += vector
            kept.append(model.model.layers[2].output[0].save())
    found = tracer.explanation
    assert kept is None and [part.tier for part in found.parts] == ["graph"] and found.notes == ()
    [part] = found.parts
    assert part.reads == ("model.layers.1.output", "model.layers.2.output")
    assert part.writes == ("model.layers.1.output",)
    assert part.text == "for _ in tracer.iter[:]:"
    assert f"line {part.line}: for _" in str(found) and "<table>" in found._repr_html_()
    assert not engine.scheduler.requests and tracer.accounting.generated_tokens == 0


def test_every_loop_of_a_function_is_explained(model: Any) -> None:
    weights = torch.eye(128)

    def block(tracer: Any) -> None:
        """Two loops, and code after them that needs what a generation gives."""
        kept = [].save()
        for step in tracer.iter[1:4]:
            kept.append((step, model.model.layers[1].output[0].save()))
        for _ in tracer.iter[5:8]:
            kept.append(torch.relu(model.logits.output[:, :128] @ weights))
        print(tracer.result.text[0])

    parts = model.explain(block, PROMPT, max_tokens=100).parts
    first = block.__code__.co_firstlineno
    assert [(part.line - first, part.tier) for part in parts] == [(3, "graph"), (5, "graph")]


def test_code_that_needs_elements_leaves_the_loops_to_their_text(model: Any) -> None:
    text = "if model.model.layers[0].output[0].sum() > 0:\n    x = 1\nfor step in tracer.iter[1:]:\n    model.logits.output\n"
    found = model.explain(text)
    assert any("line 1 needs the elements" in note for note in found.notes)
    [part] = found.parts
    assert part.line == 3 and "only its text" in part.why


def test_errors_are_those_of_a_trace(model: Any) -> None:
    with pytest.raises(interpose.UnknownLocation, match="never called"):
        model.explain("model.lm_head.output\nfor step in tracer.iter[1:]:\n    model.logits.output\n")
    [part] = model.explain("for step in tracer.iter[1:]:\n    model.lm_head.output\n").parts
    assert (part.best, part.at) == ("block", 2) and "never called" in part.why
    with pytest.raises(interpose.InterventionError, match="ZeroDivisionError"):
        model.explain("x = 1 / 0\nfor step in tracer.iter[:]:\n    model.logits.output\n")
    with pytest.raises(interpose.InterventionError, match="not_there"):
        model.explain("x = not_there\nfor step in tracer.iter[:]:\n    model.logits.output\n")


def test_a_carried_tensor_is_judged_in_a_step_of_one_row(model: Any) -> None:
    text = (
        "old, kept = None, [].save()\nfor step in tracer.iter[:]:\n    h = model.model.layers[1].output[0]\n"
        "    if old is not None:\n        kept.append((h - old[-1]).save())\n    old = h\n"
    )
    [part] = model.explain(text, PROMPT, max_tokens=6).parts
    assert part.best != "block", part


def test_without_plans_the_settings_are_named(bench: Bench) -> None:
    """A model that runs no plans; the tests of this folder may run with plans or tables."""
    model = notebook(bench.engine)
    [part] = (found := model.explain("for step in tracer.iter[:]:\n    model.logits.output[:] *= 2\n")).parts
    assert part.best != "block"
    settings = bench.engine.worker.vllm_config.additional_config["interpose"]
    if settings["plans"]:
        assert part.tier == part.best or not settings["graphs"]
    else:
        assert part.tier == "block" and "plans: false in the model's settings" in found.notes[0]
    assert bench.engine.interleaver.idle
