"""What a block without trust once did to its neighbours and to the service, tried from a sandbox on a real engine."""

# ruff: noqa: E501 - a block in one line is read more easily

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from interpose.cli.demo_model import write_demo_model
from interpose.v1 import trace_pb2 as pb
from tests.engine.harness import Block, Limits, LocalEngine, Ran
from tests.engine.interleave.test_sandbox import same

CANARY = [5, 400, 17, 99]
PROMPT = [3, 77, 8]
LONG = {"max_tokens": 4, "ignore_eos": True}
CANARY_BLOCK = (
    "secret = torch.arange(7.0) + 12345.0\nkept = []\nfor step in tracer.iter[:]:\n"
    "    model.model.layers[0].output[0][:] *= 1.5\n    kept.append(model.logits.output.save())\n"
)

# Each says in `found` what it got hold of.
READS = {
    "files": "found = [open(p).read(99) for p in ('/etc/passwd', '/proc/self/environ', '/proc/self/maps')]",
    "the environment": "import os\nfound = [dict(os.environ)] if os.environ else []",
    "the parent's memory": "import os\nfound = [open(f'/proc/{os.getppid()}/mem', 'rb')]",
    "every process's environment": (
        "import os\nfor n in range(1, 3000):\n    try: found.append(open(f'/proc/{n}/environ').read())\n    except OSError: pass"
    ),
    "Ray": "import ray\nfound = [ray.get_runtime_context()]",
    "the service": "import serve_app.settings\nfound = [serve_app.settings]",
    "the service's actors": "import sys\nfound = [name for name in sys.modules if name.split('.')[0] in ('ray', 'actors', 'serve_app')]",
    "a neighbour's tensors": (
        "import gc\nfound = [o.tolist() for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.numel() == 7 and "
        "float(o.float().sum()) > 12345]"
    ),
    "a neighbour's names": (
        "import gc\nfound = [sorted(o) for o in gc.get_objects() if type(o) is dict and 'secret' in o and 'kept' in o]"
    ),
    "a neighbour's frames": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n    found += [n for n in frame.f_locals if n in ('mediators', 'interleaver')]\n"
        "    frame = frame.f_back"
    ),
    "the model's weights": (
        "import gc\nfound = [tuple(o.shape) for o in gc.get_objects() if isinstance(o, torch.nn.Parameter) and o.numel() > 1000]"
    ),
    "the engine": (
        "import gc\nfound = [type(o).__name__ for o in gc.get_objects() if type(o).__name__ in ('LLMEngine', 'Interleaver', "
        "'SaveStream', 'InterposeCPUWorker', 'EngineCore', 'Session')]"
    ),
    "sockets": "import socket\nfound = [socket.create_connection(('127.0.0.1', 22), 1)]",
}

CHANGES = {
    "a weight": "w = model.model.layers[0].mlp.down_proj.weight\nw.mul_(2)",
    "a weight's memory": "w = model.model.layers[0].mlp.down_proj.weight\nw.data.mul_(2)\nw.numpy()[:] = 0",
    "a class of the model": (
        "import sys\nm = sys.modules.get('vllm.model_executor.models.llama')\nif m: m.LlamaMLP.forward = lambda s, x: x * 0"
    ),
    "a class of torch": "torch.nn.Linear.forward = lambda s, x: x * 0\ntorch.Tensor.__add__ = lambda a, b: a",
    "the registry of saves": (
        "import executor.saves.registry as r\nr.SaveRegistry.save = lambda self, value, served: None\n"
        "r.SaveRegistry.reaches = lambda *a: False"
    ),
    "a global hook": "torch.nn.modules.module.register_module_forward_hook(lambda m, a, o: o * 0)",
    "the default dtype": "torch.set_default_dtype(torch.float64)",
    "the precision": "torch.set_float32_matmul_precision('medium')\ntorch.backends.cuda.matmul.allow_tf32 = True",
    "the seed": "torch.manual_seed(5)\nimport random\nrandom.seed(5)",
    "a function mode": (
        "from torch.overrides import TorchFunctionMode\nclass M(TorchFunctionMode):\n    def __torch_function__(self, f, t, a=(), k=None):\n"
        "        return f(*a, **(k or {})) if 'linear' not in str(f) else a[0] * 0\nM().__enter__()"
    ),
    "modules": "import sys\nfor name in list(sys.modules): sys.modules[name] = None",
    "builtins": "import builtins\nbuiltins.len = lambda x: 0",
    "signals": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.signal(signal.SIGINT, signal.SIG_IGN)",
    "threads": "torch.set_num_threads(64)",
    "the recursion limit": "import sys\nsys.setrecursionlimit(50)",
}

STOPS = {
    "a __del__ that loops": "class A:\n    def __del__(self):\n        while True: pass\nglobals()['left'] = A()",
    "a tensor that loops": (
        "class T(torch.Tensor):\n    @classmethod\n    def __torch_function__(cls, *a, **k):\n        while True: pass\n"
        "kept = torch.ones(3).as_subclass(T).save()"
    ),
    "a long source": "x = 1\n" * 20_000 + "exec('y = 1\\n' * 3_000_000)",
    "the engine's greenlet": "import greenlet\ngreenlet.getcurrent().parent.throw(KeyboardInterrupt())",
    "a default device": "torch.set_default_device('meta')\nmodel.model.layers[0].output",
    "an exit": "import os\nos._exit(1)",
    "time in C": "sum(range(10**12))",
    "a hash": "import hashlib\nhashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9)",
    "the timer disarmed": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\nwhile True: pass",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    checkpoint = write_demo_model(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
    limits = type("Short", (Limits,), {"step_seconds": 2.0})
    made = LocalEngine(checkpoint, limits, sandbox=True, dtype="float32")
    yield made
    assert made.interleaver.idle, "a trace left something behind"
    made.close()


def beside(engine: LocalEngine, source: str) -> list[Ran]:
    """Run a block with a canary of another tenant and a plain prompt beside it; return the three."""
    engine.trusted = False
    while True:
        rans = engine.run_traces(
            [[Block(PROMPT, source, LONG)], [Block(CANARY, CANARY_BLOCK, LONG)]], plain=([44, 45, 46],)
        )
        codes = [ran.failure.code for ran in rans if ran.failure is not None]
        if pb.ERROR_CODE_UNAVAILABLE not in codes:  # no process was there in time, on cores that have much to do
            return rans


@pytest.fixture(scope="module")
def canary(engine: LocalEngine) -> list[Any]:
    """What the canary and the plain prompt get beside a block that does nothing, which is what they get in the worker."""
    engine.trusted = True
    [_, here, _] = engine.run_traces(
        [[Block(PROMPT, "x = 1\n", LONG)], [Block(CANARY, CANARY_BLOCK, LONG)]], plain=([44, 45, 46],)
    )
    _, kept, plain = beside(engine, "x = 1\n")
    assert kept.failure is None and same(kept.saved, here.saved)
    return [kept.saved, kept.token_ids, plain.token_ids]


def check_canary(canary: list[Any], kept: Ran, plain: Ran) -> None:
    assert kept.failure is None, kept.failure
    assert same(canary[0], kept.saved)
    assert [kept.token_ids, plain.token_ids] == canary[1:]


def test_a_block_reads_nothing_that_is_not_its_own(engine: LocalEngine, canary: list[Any]) -> None:
    lines = ["kept = {}", "model.model.layers[0].output"]
    for name, source in READS.items():
        lines += ["found = []", "try:", *(f"    {line}" for line in source.splitlines())]
        lines += [
            "except (OSError, ImportError) as error:",
            "    pass",
            f"kept[{name!r}] = [str(one) for one in found]",
        ]
    ran, kept, plain = beside(engine, "\n".join([*lines, "kept.save()", ""]))
    assert ran.failure is None, ran.failure
    assert ran.saved["kept"] == {name: [] for name in READS}
    check_canary(canary, kept, plain)


@pytest.mark.parametrize("name", CHANGES)
def test_a_block_changes_nobody(engine: LocalEngine, canary: list[Any], name: str) -> None:
    ran, kept, plain = beside(engine, "model.model.layers[0].output\n" + CHANGES[name] + "\n")
    assert ran.failure is None or ran.failure.code != pb.ERROR_CODE_ENGINE
    check_canary(canary, kept, plain)


@pytest.mark.parametrize("name", STOPS)
def test_a_block_stops_nobody(engine: LocalEngine, canary: list[Any], name: str) -> None:
    ran, kept, plain = beside(engine, STOPS[name] + "\n")
    if "__del__" not in name:  # what is left behind goes with the process
        assert ran.failure is not None and ran.failure.code != pb.ERROR_CODE_ENGINE
    check_canary(canary, kept, plain)
