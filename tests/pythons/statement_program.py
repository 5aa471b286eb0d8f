# ruff: noqa
"""Whether a call's result is thrown away, with plain asserts: run by each installed interpreter."""

from __future__ import annotations

import sys
import threading

from capturing import statement

found = []


class Made:
    def __init__(self, *args, **options):
        found.append(statement.is_dropped(sys._getframe(1)))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def __await__(self):
        return self
        yield


def dropped(run):
    found.clear()
    run()
    assert len(found) == 1, found
    return found[0]


def as_a_statement():
    Made()


def with_arguments():
    Made(1, *(2, 3), name=4, **{"other": 5})


def over_several_lines():
    Made(
        1,
        name=2,
    )


def as_an_attribute():
    class Holder:
        make = Made

    Holder.make(1)


def in_a_branch():
    found or Made()


def in_a_thread():
    thread = threading.Thread(target=as_a_statement)
    thread.start()
    thread.join()


for run in (as_a_statement, with_arguments, over_several_lines, as_an_attribute, in_a_branch, in_a_thread):
    for _ in range(100):  # an interpreter rewrites code that runs often
        assert dropped(run), run


def assigned():
    made = Made()


def entered():
    with Made():
        pass


def entered_by_name():
    with Made() as made:
        pass


def returned():
    return Made()


def passed():
    print(Made(), file=open("/dev/null", "w"))


def asked():
    Made().__class__


def in_a_list():
    [Made()]


async def awaited():
    await Made()


def run_awaited():
    try:
        awaited().send(None)
    except StopIteration:
        pass


for run in (assigned, entered, entered_by_name, returned, passed, asked, in_a_list, run_awaited):
    for _ in range(100):
        assert not dropped(run), run

found.clear()
sys.displayhook = lambda value: None
exec(compile("Made()\n", "<cell>", "single"), {"Made": Made})
exec(compile("Made()\n", "<cell>", "exec"), {"Made": Made})
assert found == [False, True] and eval("Made()") is not None and not found[-1]
print("ok")
