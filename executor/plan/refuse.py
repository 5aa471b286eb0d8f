"""The reason why a block is no plan: the notebook's line, and what to write instead."""

from __future__ import annotations


class Refused(Exception):
    """A block, or a part of it, cannot be a plan; it runs as it is.

    Attributes:
        line: the line of the notebook, 0 if no line is known.
        what: what stands there, and why a plan cannot have it.
        instead: what to write instead, "" if nothing helps.
        later: whether a later step may be a plan.
    """

    def __init__(self, line: int, what: str, instead: str = "", later: bool = False) -> None:
        super().__init__(line, what, instead)
        self.later = later
        self.line = line
        self.what = what
        self.instead = instead

    def again(self) -> Refused:
        """Return the same reason without the frames that raised it."""
        return Refused(self.line, self.what, self.instead, self.later)

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        return f"{where}{self.what}" + (f"; {self.instead}" if self.instead else "")


# What a statement or an expression is refused for, by the name of its class in `ast`.
STATEMENTS: dict[str, tuple[str, str]] = {
    "While": ("a while loop ends on a value", "write a for loop over a range"),
    "Try": ("a plan has no exceptions to catch", "move the try out of the loop"),
    "TryStar": ("a plan has no exceptions to catch", "move the try out of the loop"),
    "Raise": ("a raise ends the block", "save the value and raise after the loop"),
    "ClassDef": ("a class is made anew in every step", "define the class before the loop"),
    "Import": ("an import runs Python in every step", "import before the loop"),
    "ImportFrom": ("an import runs Python in every step", "import before the loop"),
    "Global": ("a function changes a name outside of itself", "return the value and assign it"),
    "Nonlocal": ("a function changes a name outside of itself", "return the value and assign it"),
    "Delete": ("a del changes which names are bound", "leave the name bound"),
    "AsyncFor": ("a plan has no coroutines", "write a plain loop"),
    "AsyncWith": ("a plan has no coroutines", "write plain code"),
    "AsyncFunctionDef": ("a plan has no coroutines", "write a plain function"),
    "Await": ("a plan has no coroutines", "write plain code"),
    "Yield": ("a generator keeps Python state between its values", "return a list"),
    "YieldFrom": ("a generator keeps Python state between its values", "return a list"),
    "With": ("a context runs Python around the tensors", "write the code without the with"),
    "Match": ("a match looks at a value", "write if and elif on the step"),
}

_TO_HOST = ("takes a value out of the tensors", "keep it a tensor; decide with torch.where(condition, a, b)")
_MEMORY = ("reaches the tensor's memory", "use operations on the tensor")
_GRADIENT = ("computes gradients, which a plan has not", "save the values and differentiate after the trace")
_SHAPE = ("has a shape that depends on values", "keep all rows and mask: torch.where(condition, a, 0)")

# Attributes that no plan has, with the reason.
ATTRIBUTES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__"), _TO_HOST),
    **dict.fromkeys(
        ("data", "data_ptr", "storage", "untyped_storage", "set_", "resize_", "resize_as_", "share_memory_"), _MEMORY
    ),
    **dict.fromkeys(("backward", "grad", "requires_grad_", "requires_grad", "register_hook", "grad_fn"), _GRADIENT),
    **dict.fromkeys(("nonzero", "masked_select", "unique", "unique_consecutive", "argwhere"), _SHAPE),
    "skip": ("skips a module, which the engine does", "assign the module's output"),
    "next": ("moves on by itself to another step", "read the location in the step's own turn of the loop"),
    "cache": ("starts to record", "call tracer.cache() before the loop"),
    "result": ("waits for the end of the generation", "read tracer.result after the loop"),
    "stop": ("ends the request from inside", "bound the loop: tracer.iter[a:b]"),
    "log": ("sends text in every step", "append the values to a list and print them after the loop"),
    "barrier": ("waits for other invokes", "meet before the loop"),
    "__dict__": ("reaches into an object", "use the object's values"),
    "__class__": ("reaches into an object", "use the object's values"),
}

# Builtins that no plan calls, with the reason.
BUILTINS: dict[str, tuple[str, str]] = {
    "print": ("print sends text in every step", "append the values to a list and print them after the loop"),
    "open": ("open reaches files", "read the file before the trace"),
    "input": ("input waits for a person", "ask before the trace"),
    **dict.fromkeys(("eval", "exec", "compile", "__import__"), ("code that is made from text", "write the code out")),
    **dict.fromkeys(
        ("globals", "locals", "vars", "dir", "setattr", "delattr", "getattr", "hasattr", "super"),
        ("names that are looked up as text", "write the name out"),
    ),
    **dict.fromkeys(("id", "hash", "repr", "ascii"), ("the identity or text of an object", "save the value itself")),
    **dict.fromkeys(
        ("isinstance", "issubclass", "type", "callable"), ("a test of a value's type", "write the code for the type")
    ),
    **dict.fromkeys(("iter", "next"), ("an iterator keeps Python state", "write a for loop over the values")),
    "breakpoint": ("a breakpoint stops the engine", "remove it"),
}

ALLOWED_BUILTINS = frozenset(
    {
        *("abs", "all", "any", "bool", "dict", "divmod", "enumerate", "filter", "float", "frozenset", "int", "len", "list"),
        *("map", "max", "min", "pow", "range", "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "zip"),
        *("True", "False", "None", "format", "__build_class__"),
    }
)  # fmt: skip
