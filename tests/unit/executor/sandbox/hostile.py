"""Hostile blocks by the hundred: what takes time, memory, or the process's own parts, in families."""

# ruff: noqa: E501 - a block in one line is read more easily

from __future__ import annotations

import itertools

# Calls that the interpreter's timer does not end, or that take more memory than there is.
_CALLS = {
    "factorial": "import math\nmath.factorial(10**8)",
    "binomial": "import math\nmath.comb(10**8, 5 * 10**7)",
    "a tower of powers": "x = 9 ** (9 ** 9)",
    "a shift": "x = 1 << (1 << 40)",
    "digits of a number": "import sys\nsys.set_int_max_str_digits(0)\nstr(7 ** (10 ** 8))",
    "a number of digits": "import sys\nsys.set_int_max_str_digits(0)\nint('9' * 10**8)",
    "scrypt": "import hashlib\nhashlib.scrypt(b'x', salt=b'y', n=1 << 24, r=64, p=64, maxmem=1 << 31)",
    "a bomb of zlib": "import zlib\nx = zlib.decompress(zlib.compress(bytes(1 << 28)) )\nwhile True: x += x",
    "nested quantifiers": "import re\nre.match(r'(x+x+)+y', 'x' * 80)",
    "alternations": "import re\nre.match(r'(a|a)*$', 'a' * 80 + 'b')",
    "a pattern of a million groups": "import re\nre.compile('(a?)' * 10**6 + 'a' * 10**6)",
    "a long replacement": "x = 'a' * 10**7\nwhile True: x = x.replace('a', 'aaaa')",
    "a string without an end": "x = 'x' * 10**13",
    "a wide format": "x = f'{1:{10**12}}'",
    "a wide percent": "x = '%999999999999d' % 1",
    "a deep format": "x = ('{:>' + '9' * 9 + '}').format(1)\nwhile True: x += x",
    "a join": "x = ','.join(['y' * 10**6] * 10**7)",
    "a count": "import itertools\nmax(itertools.count())",
    "permutations": "import itertools\nkept = list(itertools.permutations(range(60)))",
    "a deque": "import collections, itertools\ncollections.deque(itertools.count())",
    "an iterator of one": "import itertools\nall(itertools.repeat(True))",
    "a sum of lists": "sum(([i] for i in range(10**9)), [])",
    "a list of lists": "x = [0]\nwhile True: x = x + x",
    "a dict of dicts": "x = {}\nfor i in range(10**10): x[i] = {}",
    "a set of tuples": "x = {(i, j) for i in range(10**6) for j in range(10**6)}",
    "bytes": "x = bytes(10**13)",
    "an array": "import array\nx = array.array('d', [0.0]) * 10**12",
    "a decimal": "import decimal\ndecimal.getcontext().prec = 10**8\nx = decimal.Decimal(2).sqrt()",
    "fractions": "import fractions\nx = fractions.Fraction(1, 3)\nwhile True: x = x * x + 1",
    "deep json": "import json\njson.loads('[' * 10**7)",
    "deep source": "compile('(' * 10**6 + ')' * 10**6, 'x', 'eval')",
    "long source": "exec('x = 1\\n' * 10**7)",
    "a deep literal": "import ast\nast.literal_eval('-' * 10**6 + '1')",
    "a pickle of itself": "import pickle\npickle.loads(b'\\x80\\x04' + b'(' * 10**7 + b'.')",
    "a deep copy": "import copy\nx = []\nfor i in range(10**6): x = [x]\ncopy.deepcopy(x)",
    "a deep list saved": "x = []\nfor i in range(10**6): x = [x]\nkept = x.save()",
    "a list of itself saved": "x = []\nx.append(x)\nwhile True: x.extend(x)",
    "sleep": "import time\ntime.sleep(10**6)",
    "a lock": "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
    "an event": "import threading\nthreading.Event().wait()",
    "a queue": "import queue\nqueue.Queue().get()",
    "a condition": "import threading\nc = threading.Condition()\nc.acquire()\nc.wait()",
    "a matrix": "import torch\nx = torch.randn(30000, 30000)\nwhile True: x = x @ x",
    "singular values": "import torch\ntorch.linalg.svd(torch.randn(4000, 4000))",
    "a tensor of everything": "import torch\nx = torch.zeros(1 << 45)",
    "a view of everything": "import torch\nx = torch.zeros(1).expand(1 << 50).contiguous()",
    "a sort": "import torch\nwhile True: torch.sort(torch.randn(10**7))",
    "a graph of gradients": (
        "import torch\nx = torch.ones(1, requires_grad=True)\nwith torch.enable_grad():\n    for i in range(10**8): x = x * 2\n"
    ),
    "a storage resized": "import torch\nx = torch.ones(1)\nx.resize_(1 << 45)",
    "numpy": "import numpy\nx = numpy.ones(10**13)",
    "a sum of numpy": "import numpy\nwhile True: numpy.ones(10**7).sum()",
    "a recursion": "f = lambda: f()\nf()",
    "a deep recursion": "import sys\nsys.setrecursionlimit(1 << 30)\nf = lambda: f()\nf()",
    "a recursion in C": "import functools\nf = lambda x: x\nfor i in range(10**6): f = functools.partial(f)\nf(1)",
    "a recursive repr": "x = []\nfor i in range(10**5): x = [x]\nrepr(x)",
    "prints": "while True: print('x', end='')",
    "prints of nothing": "while True: print('', end='')",
    "logs": "while True: tracer.log('x' * 10**6)",
}

# What a block does with an object whose methods are hostile.
_USES = {
    "saved": "kept = one.save() if hasattr(type(one), 'save') else interpose.save(one)",
    "in a list": "import interpose\nkept = [one, {'a': one}]\ninterpose.save(kept)",
    "assigned": "model.layers[0].linear.output = one",
    "an item assigned": "model.layers[0].output[0] = one",
    "printed": "print(one)",
    "raised": "raise ValueError(one)",
    "left": "globals()['left'] = one",
    "asked for": "model.layers[one].output",
    "applied": "tracer.iter[one:one]\nfor step in tracer.iter[one]: pass",
}
_METHODS = (
    "__del__ __repr__ __str__ __eq__ __hash__ __bool__ __len__ __iter__ __getattribute__ __getattr__ __reduce_ex__ __index__ "
    "__float__ __format__ __array__ __getitem__ __contains__ __dir__ __next__ __call__ __enter__ __copy__ __deepcopy__ "
    "__sizeof__ __torch_function__ __torch_dispatch__ __set_name__ __mro_entries__ __getstate__ __class__"
).split()
_DOES = {
    "loops": "while True: pass",
    "loops and catches": "while True:\n            try:\n                while True: pass\n            except BaseException: pass",
    "exits": "import os; os._exit(3)",
    "raises": "raise SystemExit(1)",
    "counts": "return sum(range(10**12))",
}

# What a block does to the interpreter that runs it.
_HOOKS = {
    "a trace function": "import sys\ndef trace(*a):\n    while True: pass\nsys.settrace(trace)\n(lambda: 1)()",
    "a profile function": "import sys\nsys.setprofile(lambda *a: sum(range(10**11)))\n(lambda: 1)()",
    "a hook of exceptions": "import sys\nsys.excepthook = sys.unraisablehook = lambda *a: sum(range(10**12))\nraise ValueError",
    "a hook of audits": "import sys\nsys.addaudithook(lambda *a: sum(range(10**12)))\nmodel.layers[0].output",
    "a callback of the collector": "import gc\ngc.callbacks.append(lambda *a: sum(range(10**12)))\ngc.collect()",
    "the collector off": "import gc\ngc.disable()\nwhile True:\n    x = []\n    x.append([x] * 1000)",
    "a callback of a reference": "import weakref\nclass A: pass\na = A()\nr = weakref.ref(a, lambda _: sum(range(10**12)))\ndel a",
    "modules away": "import sys\nsys.modules.clear()\nx = model.layers[0].output[0].save()",
    "builtins away": "import builtins\nvars(builtins).clear()\nx = model.layers[0].output[0].save()",
    "an end at exit": "import atexit\natexit.register(lambda: sum(range(10**12)))\nraise SystemExit",
    "all signals": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, lambda *a: None)\n    except (OSError, ValueError): pass\n"
        "while True: pass"
    ),
    "all signals blocked": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
    "a handler that goes on": "import signal\nsignal.signal(signal.SIGALRM, lambda *a: sum(range(10**12)))\nwhile True: pass",
    "another timer": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)\nwhile True: pass",
    "the interval": "import sys\nsys.setswitchinterval(10**6)\nwhile True: pass",
    "None changed": "import ctypes\nctypes.memset(id(None), 0, 16)",
    "True changed": "import ctypes\nctypes.memmove(id(True), id(False), 28)\nx = model.layers[0].output[0].save()",
    "a type changed": "import ctypes\nctypes.memset(id(list), 255, 400)\n[].append(1)",
    "a jump": "import ctypes\nctypes.CFUNCTYPE(None)(8)()",
    "a write to nowhere": "import ctypes\nctypes.memset(8, 0, 8)",
    "a stack overrun": "import ctypes\nb = (ctypes.c_char * 8)()\nctypes.memset(b, 255, 1 << 30)",
    "an anonymous map": "import mmap\nkept = []\nwhile True: kept.append(mmap.mmap(-1, 1 << 30))",
    "memory of C": "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.malloc.restype = ctypes.c_void_p\nwhile True: libc.memset(ctypes.c_void_p(libc.malloc(1 << 24)), 1, 1 << 24)",
    "C's exit": "import ctypes\nctypes.CDLL(None)._exit(0)",
    "C's pause": "import ctypes\nctypes.CDLL(None).poll(None, 0, -1)",
    "C's loop": "import ctypes\nctypes.CDLL(None).usleep(4 * 10**9)\nwhile True: pass",
    "raise in C": "import ctypes\nctypes.CDLL(None)['raise'](19)",
    "another greenlet": "import greenlet\ndef f():\n    while True: pass\ngreenlet.greenlet(f).switch()",
    "the main greenlet": "import greenlet\ng = greenlet.getcurrent()\nwhile g.parent: g = g.parent\ng.switch()",
    "a generator": "def f():\n    while True: yield 1\nkept = list(f())",
    "a generator that catches": (
        "def f():\n    while True:\n        try: yield 1\n        except GeneratorExit: pass\ng = f()\nnext(g)\ndel g\nimport gc\ngc.collect()"
    ),
    "a coroutine": "async def f():\n    while True: pass\nc = f()\nc.send(None)",
    "a metaclass": "class M(type):\n    def __call__(cls):\n        while True: pass\nclass A(metaclass=M): pass\nA()",
    "a metaclass that counts": "class M(type):\n    @classmethod\n    def __prepare__(m, *a):\n        return sum(range(10**12))\nclass A(metaclass=M): pass",
    "a class of many bases": "class A: pass\nwhile True: A = type('A', (A,), {})",
    "a property of a class": "class A:\n    @property\n    def __class__(self):\n        while True: pass\nimport interpose\ninterpose.save([A()])",
    "a mode of torch": (
        "import torch\nfrom torch.overrides import TorchFunctionMode\nclass M(TorchFunctionMode):\n"
        "    def __torch_function__(self, *a, **k):\n        while True: pass\nM().__enter__()\nmodel.layers[0].output[0].sum()"
    ),
    "threads of torch": "import torch\ntorch.set_num_threads(64)\nx = torch.randn(2000, 2000)\nwhile True: x = x @ x",
    "a default type": "import torch\ntorch.set_default_dtype(torch.float64)\nx = model.layers[0].output[0].save()",
    "no gradients": "import torch\ntorch.autograd.set_detect_anomaly(True)\ntorch.set_grad_enabled(True)\nx = model.layers[0].output[0].save()",
    "a switched class": "x = model.layers[0].output\nx.__class__ = dict",
    "a tensor over all memory": (
        "import torch\nx = model.layers[0].output[0]\ny = torch.as_strided(x, (1 << 40,), (1,))\ny.sum()"
    ),
    "a tensor of memory of C": (
        "import ctypes, torch\nb = (ctypes.c_float * 24).from_address(8)\nmodel.layers[0].linear.output = torch.frombuffer(b, dtype=torch.float32).view(3, 8)"
    ),
}

# What a block says to the worker in the place of its process. `end` is the channel, `own` the trace's id.
_LIES = (
    "import gc\nend = next(o for o in gc.get_objects() if type(o).__name__ == 'ChildEnd')\n"
    "from executor.sandbox.channel import Kind, HEAD\nimport os, struct, torch\n"
    "own = next(o for o in gc.get_objects() if type(o).__name__ == 'Child')._opened.trace.id\n"
)
_SAYS = {
    "an answer too early": "end.send(Kind.ANSWER, {'waits': None})",
    "many answers": "while True: end.send(Kind.ANSWER, {})",
    "an answer of nothing": "end.send(Kind.ANSWER, None)",
    "an answer of itself": "end.send(Kind.ANSWER, [[[[]]]])",
    "another number": "end._number += 7\nend.send(Kind.ANSWER, {})",
    "a question": "end.send(Kind.START, {})",
    "a go": "end.send(Kind.GO, None)",
    "a text for another block": "end.send(Kind.LOG, ('other', 'x'))",
    "a text that is none": "end.send(Kind.LOG, 5)",
    "a flood of texts": "while True: end.send(Kind.LOG, (own + '-0', 'x' * 60000))",
    "a flood of no text": "while True: end.send(Kind.LOG, (own + '-0', ''))",
    "a blob of another trace": "end.send(Kind.PIECE, ('other/0/0', 1, b'x'))",
    "a blob of no size": "end.send(Kind.PIECE, (own + '/0/0', -1, b'x'))",
    "a blob too large": "end.send(Kind.PIECE, (own + '/0/0', 1 << 60, b'x'))",
    "a blob of strings": "end.send(Kind.PIECE, (b't', 'x', 5))",
    "a blob's piece without an end": "while True:\n    end.send(Kind.PIECE, (own + '/0/0', 1 << 20, b''))\n    end.next()",
    "an upload of another session": "end.send(Kind.BLOB, ('sha256:' + '0' * 64, 0))",
    "an upload that is none": "end.send(Kind.BLOB, None)",
    "an increment": "end.send(Kind.INCREMENT, b'x')",
    "a router": "end.send(Kind.CHOOSE, ('blocks.0.mlp', 1, torch.ones(1 << 20, 8)))",
    "no router": "end.send(Kind.CHOOSE, ())",
    "half a head": "os.write(end._socket, b'\\x00\\x00')\nwhile True: pass",
    "a long body": "os.write(end._socket, HEAD.pack(4 << 20, 16, end._number))\nwhile True: pass",
    "a body too long": "os.write(end._socket, HEAD.pack((1 << 32) - 1, 16, end._number))",
    "a kind that is none": "os.write(end._socket, HEAD.pack(1, 200, end._number) + b'N')",
    "a list of a billion": "os.write(end._socket, HEAD.pack(5, 16, end._number) + b'l' + struct.pack('<I', 1 << 30))",
    "a deep list": "os.write(end._socket, HEAD.pack(10000, 16, end._number) + (b'l' + struct.pack('<I', 1)) * 2000)",
    "a tensor of a billion": (
        "body = b'x' + bytes((0, 2)) + struct.pack('<qq', 1 << 30, 1 << 30) + struct.pack('<QQ', 0, 1 << 62)\n"
        "os.write(end._socket, HEAD.pack(len(body), 16, end._number) + body)"
    ),
    "a tensor outside": (
        "body = b'x' + bytes((0, 1)) + struct.pack('<q', 16) + struct.pack('<QQ', 1 << 40, 64)\n"
        "os.write(end._socket, HEAD.pack(len(body), 16, end._number) + body)"
    ),
    "a tensor of no type": (
        "body = b'x' + bytes((99, 1)) + struct.pack('<q', 16) + struct.pack('<QQ', 0, 64)\n"
        "os.write(end._socket, HEAD.pack(len(body), 16, end._number) + body)"
    ),
    "a shape without elements": (
        "body = b'm' + bytes((0, 3)) + struct.pack('<qqq', 1 << 40, 1 << 40, 1 << 40)\n"
        "os.write(end._socket, HEAD.pack(len(body), 16, end._number) + body)"
    ),
    "a number without an end": "body = b'h+' + struct.pack('<QQ', 0, 1 << 28)\nos.write(end._socket, HEAD.pack(len(body), 16, end._number) + body)",
    "memory that changes": (
        "import ctypes\nanswer = end._shared.up._memory\nx = model.layers[0].output[0]\nanswer.fill_(255)\nx[:] = 1\n"
    ),
    "silence": "import time\nend.send = lambda *a: time.sleep(10**6)\nx = model.layers[0].output",
    "nothing": "end.send = lambda *a: None\nx = model.layers[0].output",
}


def blocks() -> dict[str, str]:
    """Return the hostile blocks by name; each object's method with another use and another deed."""
    found = {f"call: {name}": source for name, source in _CALLS.items()}
    found |= {f"interpreter: {name}": source for name, source in _HOOKS.items()}
    found |= {f"channel: {name}": _LIES + source for name, source in _SAYS.items()}
    uses, does = itertools.cycle(_USES.items()), itertools.cycle(_DOES.items())
    for method in _METHODS:
        for _ in range(3):
            (use, used), (deed, done) = next(uses), next(does)
            found[f"object: {method} {deed}, {use}"] = (
                "import interpose, torch\n"
                f"class Hostile{'(torch.Tensor)' if 'torch' in method else ''}:\n"
                f"    def {method}(self, *a, **k):\n        {done}\n"
                f"one = {'torch.ones(3, 8).as_subclass(Hostile)' if 'torch' in method else 'Hostile()'}\n{used}\n"
            )
    return found
