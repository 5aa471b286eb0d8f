"""Tracebacks end at the notebook's own line: at the `with` of a block, and at a call."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import traceback
import weakref
from pathlib import Path

import pytest

import interpose
from interpose.contract.errors import ServiceFailure, failure
from interpose.contract.tracebacks import cut
from interpose.v1 import trace_pb2

ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def _short():
    interpose.full_tracebacks(False)
    yield
    interpose.full_tracebacks()


def files(error):
    """Return the names of the files in an error's traceback, below this one."""
    return [Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)]


def fails(service):
    service.refusals["Submit"] = [ServiceFailure(failure(trace_pb2.ERROR_CODE_INTERVENTION, "ZeroDivisionError: boom"))]


def test_a_block_fails_at_its_with(service, model):
    fails(service)
    with pytest.raises(interpose.InterventionError) as caught:
        with model.trace("Hello"):
            1 / 0
    assert files(caught.value) == ["test_tracebacks.py"]
    assert caught.value.__traceback__.tb_lineno == test_a_block_fails_at_its_with.__code__.co_firstlineno + 3
    assert caught.value.__context__ is None


async def test_a_block_of_asyncio_fails_at_its_with(service):
    async with await interpose.connect_async(service.address, progress=False) as client:
        model = await client.model()
        fails(service)
        with pytest.raises(interpose.InterventionError) as caught:
            async with model.trace("Hello"):
                1 / 0
    assert files(caught.value) == ["test_tracebacks.py"]


def test_the_switch_shows_all_frames(service, model):
    fails(service)
    interpose.full_tracebacks()
    with pytest.raises(interpose.InterventionError) as caught:
        with model.trace("Hello"):
            1 / 0
    assert {"captured.py", "skip.py", "tracer.py"} <= set(files(caught.value))


def test_an_outer_block_keeps_the_users_own_frames(service, model):
    def divided(by):
        return 1 / by

    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace():
            divided(0)
    assert files(caught.value) == ["test_tracebacks.py"] * 3
    with pytest.raises(interpose.InvalidArgument) as refused:
        with model.trace() as tracer:
            with tracer.invoke("Hello", qqq=1):
                pass
    assert files(refused.value) == ["test_tracebacks.py"] * 2


def test_an_error_in_a_handler_has_the_handled_error_as_its_context(service, model):
    fails(service)
    with pytest.raises(interpose.InterventionError) as caught:
        try:
            raise KeyError("first")
        except KeyError:
            with model.trace("Hello"):
                1 / 0
    assert isinstance(caught.value.__context__, KeyError) and caught.value.__context__.__context__ is None


def test_causes_and_contexts_are_cut_too(service, model):
    fails(service)
    with pytest.raises(RuntimeError) as caught:
        try:
            model.modle
        except interpose.UnknownLocation as error:
            raise RuntimeError("mine") from error
    assert {"envoy.py"} <= set(files(caught.value.__cause__))
    assert files(cut(caught.value).__cause__) == ["test_tracebacks.py"]


def test_a_mistake_of_the_library_keeps_its_frames(service, model, monkeypatch):
    monkeypatch.setattr("interpose.program.builder.TraceBuilder.build", None)
    with pytest.raises(TypeError) as caught:
        with model.trace("Hello"):
            pass
    assert "tracer.py" in files(caught.value)


def test_an_error_is_freed_with_its_last_reference(service, model):
    fails(service)
    gc.disable()
    try:
        try:
            with model.trace("Hello"):
                1 / 0
        except interpose.InterventionError as error:
            error.__traceback__ = None
            gone = weakref.ref(error)
        assert gone() is None
    finally:
        gc.enable()


SCRIPT = """
import sys
import interpose
client = interpose.connect(sys.argv[1], progress=False)
def ask():
    {call}
ask()
"""


@pytest.mark.parametrize("call", ['client.model("gone").lm_head', "client.model().modle"])
def test_a_call_in_plain_python(service, tmp_path, call):
    script = tmp_path / "notebook.py"
    script.write_text(SCRIPT.format(call=call))
    service.refusals["DescribeModel"] = []
    if "gone" in call:
        service.refusals["DescribeModel"] = [ServiceFailure(failure(trace_pb2.ERROR_CODE_NOT_FOUND, "no such model"))]
    done = subprocess.run(
        [sys.executable, script, service.address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=_environment(),
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count('  File "') == 2 and "interpose/" not in done.stderr, done.stderr
    lines = done.stderr.splitlines()
    if sys.version_info >= (3, 11):  # which has notes
        assert lines.pop().startswith("Remedies: docs/errors.md#"), done.stderr
    assert lines[-1].startswith("interpose.contract.errors."), done.stderr


def _environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_a_call_in_ipython(service, capsys):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance(colors="nocolor")
    try:
        shell.user_ns["interpose"] = interpose
        shell.run_cell(f'model = interpose.connect("{service.address}", progress=False).model()')
        capsys.readouterr()
        shell.run_cell("def ask():\n    return model.modle\n\nask()")
        said = capsys.readouterr()
        text = said.out + said.err
        assert "UnknownLocation" in text and "did you mean model" in text and "return model.modle" in text
        assert "envoy.py" not in text and "interpose/" not in text, text
    finally:
        InteractiveShell.clear_instance()


PYTEST = """
import interpose

def test_it():
    model = interpose.connect("{address}", progress=False).model()
    model.modle
"""


def test_a_call_in_pytest(service, tmp_path):
    (tmp_path / "test_it.py").write_text(PYTEST.format(address=service.address))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=_environment(), check=False)
    assert "UnknownLocation" in done.stdout and "model.modle" in done.stdout, done.stdout + done.stderr
    assert "envoy.py" not in done.stdout, done.stdout
