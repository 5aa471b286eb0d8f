"""What a sandboxed process answers to a turn, and what it leaves out.

A field that has its usual value is left out. So the answers of a loop are short, and the same from step to step.
"""

from __future__ import annotations

from typing import Any

# The fields of an answer, each with its usual value: the location that the block waits for, with the number of steps until then;
# the barrier where it waits; whether it asked for the result; the module that it wants applied; how it ended, and its failure;
# what it changed in place, what it put in the place of that, and why that does not fit; the modules that it skips, and what it
# has recorded, from here on.
USUAL: dict[str, Any] = {
    "waits": None,
    "barrier": None,
    "asked": False,
    "call": None,
    "ended": None,
    "failure": None,
    "changed": {},
    "value": None,
    "misfit": None,
    "skips": [],
    "recorders": [],
}
