"""Tab completion: IPython's own completer with Jedi and without, and `dir()`."""

from __future__ import annotations

import sys

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import interpose
from interpose.notebook import completion
from interpose.tracing.model import Model
from interpose.v1 import model_pb2
from tests.unit.interpose.conftest import description

CHILDREN = {"mlp", "self_attn"}
OF_MODULES = {"output", "input", "inputs", "next", "skip", "path"}
IN_BLOCK = {"iter", "all", "cache", "stop", "log", "result"}


class Connection:
    """A connection to no server: completion asks for nothing."""

    awaited = False


def described() -> Model:
    """Return a model with canonical values, which no server serves."""
    found = description()
    blocks = found.canonical.add(path="blocks", title="Blocks")
    for i in range(3):
        block = found.canonical.add(path=f"blocks.{i}", title="Block")
        block.values.add(name="resid_post", shape="[tokens, 64]")
        block.values.add(name="resid_mid", refusal="this model has none")
        attention = found.canonical.add(path=f"blocks.{i}.attn", title="Attention")
        attention.values.add(name="q", shape="[tokens, 4, 16]")
    assert isinstance(found, model_pb2.ModelDescription) and blocks.path
    return Model(Connection(), found)


@pytest.fixture(scope="module")
def shell():
    """A shell of IPython with a model and its client's package, as a notebook has them."""
    shell = InteractiveShell.instance()
    assert interpose.connect is not None  # the name with which a notebook begins
    completion.install()
    completion.install()
    assert shell.Completer.custom_matchers.count(completion.matcher) == 1
    shell.user_ns.update(model=described(), interpose=interpose, i=1)
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture(params=[False, True], ids=["plain", "jedi"])
def completed(shell, request):
    """Return the names that the shell offers at the end of some code."""
    shell.Completer.use_jedi = request.param

    def names(code):
        with provisionalcompleter():
            return {one.text.removeprefix(".") for one in shell.Completer.completions(code, len(code))}

    return names


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("model.model.layers[2].", CHILDREN | OF_MODULES),
        ("model.model.layers[-1].", CHILDREN | OF_MODULES),
        ("model.model.layers[i].", CHILDREN | OF_MODULES),
        ("x = 1 + model.model.layers[2].next().", CHILDREN | OF_MODULES),
        ("model.model.layers[2].ml", {"mlp"}),
        ("model.model.layers[2].mlp.down_proj.", OF_MODULES | {"weight"}),
        ("model.model.layers.", {"path"}),
        ("model.model.layers[", {"0", "1", "2"}),
        ("print(model.model.", {"embed_tokens", "layers", "norm"} | OF_MODULES),
        ("model.logits.", {"output", "next", "path"}),
        ("model.blocks[0].", {"attn", "resid_post", "next", "path"}),
        ("model.blocks[0].attn.", {"q", "next", "path"}),
        ("interpose.con", {"connect", "connect_async"}),
    ],
)
def test_modules(completed, code, names):
    assert completed(code) == names


def test_a_model_has_what_a_notebook_uses(completed):
    found = completed("model.")
    assert {"trace", "generate", "scan", "edit", "explain", "adapters", "tokenizer", "model", "lm_head"} <= found
    assert not found & {"tree", "tree_of", "call", "job_handle", "encode_prompt", "session_names", "awaited", "save"}


def test_the_package_has_its_public_names(completed):
    assert completed("interpose.") == {name for name in interpose.__all__ if name != "__version__"}
    assert dir(interpose) == sorted(interpose.__all__)


@pytest.mark.parametrize(
    "code", ["model.model.layers[2].output.", "model.blocks[1].attn.q[0].", "model.lm_head.input."]
)
def test_values_have_what_tensors_have_and_save(completed, code):
    assert {"save", "mean", "shape"} <= completed(code)


OUTER = "with model.trace(max_tokens=3) as tracer:\n    "
INVOKE = OUTER + 'with tracer.invoke("Hello"):\n        '


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ('with model.trace("Hello") as tracer:\n    tracer.', IN_BLOCK),
        ('if True:\n  with model.trace("Hello") as t:\n    if i:\n\n      # why\n      t.', IN_BLOCK),
        ('with model.generate(prompt="Hello") as tracer:\n    tracer.', IN_BLOCK),
        ('async with model.trace("Hello") as tracer:\n    tracer.', IN_BLOCK),
        (OUTER + "tracer.", {"invoke", "barrier", "log"}),
        (INVOKE + "tracer.", IN_BLOCK),
        (INVOKE + "pass\n    tracer.", {"invoke", "barrier", "log"}),
        (INVOKE.replace('"):', '") as one:') + "one.", IN_BLOCK),
        ('with model.edit("calm") as edit:\n    edit.', {"iter", "all", "stop", "log"}),
    ],
)
def test_a_tracer_in_the_block_that_is_written(completed, code, names):
    assert completed(code) == names


@pytest.mark.parametrize(
    "code",
    [
        'with model.trace("Hello") as tracer:\n    pass\ntracer.',
        "with open(i) as tracer:\n    tracer.",
        "with other.trace(i) as tracer:\n    tracer.",
        "nothing.model.",
        "'model.",
        "model.model.layers[7].",
        "model.model.nothing.",
        "model.trace.",
        "x.model.",
        "1.",
        "",
    ],
)
def test_other_code_is_left_to_the_other_completers(code):
    assert completion.complete(code, {"model": described(), "other": object(), "i": 1}) is None


def test_after_a_block_a_tracer_shows_what_it_has(service, model):
    with model.trace("Hello") as tracer:
        pass
    names = {name for name in dir(tracer) if not name.startswith("_")}
    assert {"result", "usage", "accounting", "id"} <= names
    assert not names & {"run_block", "watched", "used", "unused", "dropped", "invoke", "job", "stream"}
    assert not [name for name in dir(tracer) if name.startswith("_") and not name.endswith("__")]


def test_saved_things_complete_their_keys():
    cache = interpose.Cache({"model.layers.0": [], "model.norm": []})
    assert cache._ipython_key_completions_() == ["model.layers.0", "model.norm"]
    assert "model" in dir(cache) and {"layers", "norm"} <= set(dir(cache.model)) and "0" not in dir(cache.model.layers)
    result = interpose.JobResult({"hidden": 1}, [], None)
    assert result._ipython_key_completions_() == ["hidden"]


def test_without_ipython_nothing_is_installed():
    assert "IPython" in sys.modules
    InteractiveShell.clear_instance()
    completion.install()
