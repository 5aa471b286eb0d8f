"""Blocks in code that is in no file: at a prompt, on the command line, piped in, in doctests, in cells, in text that is run."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interpreters import installed
from tests.pythons.terminal import Terminal

ROOT = Path(__file__).parents[2]
KEEPS_TEXT = "3.13"  # from this version on the interpreter keeps what it compiles
IMPORT = "from tests.pythons.fileless_lib import CaptureError, Trace, sources"

every_python = pytest.mark.parametrize("version", installed())


@pytest.fixture
def prompt(version: str, tmp_path: Path) -> Iterator[Terminal]:
    """The prompt of an interpreter in a terminal, where what blocks need is imported."""
    with Terminal(installed()[version], tmp_path, pasting=version == KEEPS_TEXT) as prompt:
        prompt.enter(IMPORT)
        yield prompt


def run(version: str, *options: str, **given: object) -> list[str]:
    """Return what an interpreter printed about blocks, as `fileless_lib` prints it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    command = [str(installed()[version]), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False, **given)  # type: ignore[call-overload]
    lines = [line.lstrip(">. ") for line in done.stdout.splitlines()]
    found = [line for line in lines if line.startswith(("captured ", "refused ", "source "))]
    assert found, done.stdout + done.stderr
    return found


@every_python
def test_a_prompt_in_a_terminal(prompt: Terminal) -> None:
    assert prompt.enter("with Trace() as t:\n    x = 1  # one\n    y = '''a\nb'''") == [
        "captured \"    x = 1  # one\\n    y = '''a\\nb'''\\n\" 2 {}"
    ]
    assert prompt.enter("with Trace(): a = 1") == ["captured 'a = 1\\n' 1 {}"]
    assert prompt.enter("for i in range(2):\n    with Trace():\n        é = f'{i}' \\\n        + 'ü'") == [
        "captured \"é = f'{i}' \\\\\\n+ 'ü'\\n\" 3 {'i': 0}",
        "captured \"é = f'{i}' \\\\\\n+ 'ü'\\n\" 3 {'i': 1}",
    ]


@every_python
def test_what_was_defined_at_a_prompt(prompt: Terminal) -> None:
    prompt.enter("def first(a, b):\n    with Trace():\n        z = a - b")
    prompt.enter("older = first")
    prompt.enter("def first(a, b):\n    with Trace():\n        z = b - a")
    assert prompt.enter("older(2, 1)") == ["captured 'z = a - b\\n' 3 {'a': 2, 'b': 1}"]
    assert prompt.enter("first(2, 1)") == ["captured 'z = b - a\\n' 3 {'b': 1, 'a': 2}"]
    prompt.enter("def plus(a): return a + 1")
    prompt.enter("double = lambda a: a * 2")
    prompt.enter("class Probe:\n    rank = 2\n    def score(self, x):\n        return x * self.rank")
    assert prompt.enter("sources(plus, double, Probe)") == [
        "source 'def plus(a): return a + 1\\n'",
        "source 'lambda a: a * 2'",
        "source 'class Probe:\\n    rank = 2\\n    def score(self, x):\\n        return x * self.rank\\n'",
    ]


@every_python
def test_what_the_history_of_a_prompt_leaves_out(version: str, prompt: Terminal) -> None:
    """Before 3.13 the text is taken from there; where it is not the code that runs, the block is refused."""
    (line,) = prompt.enter("with Trace():\n    y = '''a\n\nb'''")
    if version == KEEPS_TEXT:
        assert line == "captured \"    y = '''a\\n\\nb'''\\n\" 2 {}"
    else:
        assert line.startswith("refused 1 the source of this block cannot be found")
        assert "it leaves out blank lines" in line


STATEMENTS = f"""{IMPORT}
with Trace() as t:
    x = 1
    # said

def f():
    with Trace():
        y = 2

f()
"""
CAPTURED = ["captured 'x = 1\\n' 3 {}", "captured 'y = 2\\n' 8 {}"]


@every_python
def test_a_prompt_that_reads_a_file_or_a_pipe(version: str, tmp_path: Path) -> None:
    typed = tmp_path / "typed"
    typed.write_text(STATEMENTS)
    at_prompt = ["captured 'x = 1\\n' 2 {}", "captured 'y = 2\\n' 3 {}"]
    with typed.open() as file:
        assert run(version, "-i", stdin=file) == at_prompt
    piped = run(version, "-i", input=STATEMENTS)
    if version == KEEPS_TEXT:
        assert piped == at_prompt
    else:
        assert [line.partition(" the source ")[0] for line in piped] == ["refused 1", "refused 2"]
        assert "keeps none of what is typed at its prompt" in piped[0]


@every_python
def test_a_program_as_the_standard_input(version: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STATEMENTS)
    for options in ((), ("-",), ("-O", "-", "argument")):
        with script.open() as file:
            assert run(version, *options, stdin=file) == CAPTURED
    (piped,) = run(version, "-", input=STATEMENTS)
    assert piped.startswith("refused 2 the source of this block cannot be found: the program came through a pipe")


@every_python
def test_a_program_on_the_command_line(version: str) -> None:
    assert run(version, "-c", STATEMENTS) == CAPTURED
    assert run(version, "-Oc", STATEMENTS, "argument") == CAPTURED
    behind = STATEMENTS.replace(IMPORT, f"import sys; sys.path.insert(0, {str(ROOT)!r}); {IMPORT}")
    assert run(version, f"-Ec{behind}") == CAPTURED


EXECUTED = f"""
{IMPORT}
import linecache
text = "with Trace():\\n    x = 1\\n    y = 2\\n"
try:
    exec(text)
except CaptureError:
    pass
name = "<my text>"
linecache.cache[name] = (len(text), None, text.splitlines(True), name)
exec(compile(text, name, "exec"))
"""


@every_python
def test_text_that_is_run_by_exec(version: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(EXECUTED)
    refused, captured = run(version, str(script))
    assert refused == "refused 1 the source of this block cannot be found under the name '<string>'"
    assert captured == "captured 'x = 1\\ny = 2\\n' 2 {}"


def test_the_refusal_says_what_to_write(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{IMPORT}\nexec('with Trace():\\n    x = 1\\n')\n")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=False
    )
    assert 'File "<string>", line 1' in done.stderr
    assert "Text that you exec needs a name that linecache knows: linecache.cache[name] = (len(text)," in done.stderr


DOCUMENT = rf"""
# A page with examples

>>> {IMPORT}
>>> given = 2
>>> with Trace() as tracer:
...     x = [given]
...     text = '''one
...   two'''
captured "    x = [given]\n    text = '''one\n  two'''\n" 2 {{'given': 2}}
>>> def later(a):
...     with Trace():
...         y = a

And further down:

>>> later(3)
captured 'y = a\n' 3 {{'a': 3}}
>>> with Trace():
...     return_ = 1; break_ = lambda: 2
captured 'return_ = 1; break_ = lambda: 2\n' 2 {{}}
"""
MODULE = f'''
def plus(a):
    r"""Adds one.
{textwrap.indent(DOCUMENT, "    ")}
    """
    return a + 1


if __name__ == "__main__":
    import doctest

    print("source", doctest.testmod())
'''


@every_python
def test_doctests_of_a_page_and_of_a_module(version: str, tmp_path: Path) -> None:
    page, module = tmp_path / "page.md", tmp_path / "examples.py"
    page.write_text(DOCUMENT)
    module.write_text(MODULE)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in (["-m", "doctest", "-v", str(page)], ["-m", "doctest", "-v", str(module)]):
        done = subprocess.run(
            [str(installed()[version]), *command], capture_output=True, text=True, env=env, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout
        assert "6 passed" in done.stdout, done.stdout
    assert run(version, str(module)) == ["source TestResults(failed=0, attempted=6)"]


def test_doctests_under_pytest(tmp_path: Path) -> None:
    (tmp_path / "examples.py").write_text(MODULE)
    (tmp_path / "page.md").write_text(DOCUMENT)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--doctest-modules", "--doctest-glob=*.md", str(tmp_path)],
        capture_output=True, text=True, env=env, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


CELLS = f"""
import linecache
cells = [
    {IMPORT!r},
    "with Trace() as t:\\n    x = 1\\n\\n    y = 2",
    "def f(a):\\n    with Trace():\\n        z = a\\n",
    "f(3)\\nsources(f)",
]
namespace = {{}}
for number, cell in enumerate(cells):
    name = f"<ipython-input-{{number}}>"
    linecache.cache[name] = (len(cell), None, [line + "\\n" for line in cell.splitlines()], name)
    exec(compile(cell, name, "exec"), namespace)
"""


@every_python
def test_cells_that_linecache_knows(version: str, tmp_path: Path) -> None:
    """As a notebook's kernel runs them; IPython's own are test_cells.py's."""
    script = tmp_path / "script.py"
    script.write_text(CELLS)
    assert run(version, str(script)) == [
        "captured 'x = 1\\n\\ny = 2\\n' 2 {}",
        "captured 'z = a\\n' 3 {'a': 3}",
        "source 'def f(a):\\n    with Trace():\\n        z = a\\n'",
    ]
