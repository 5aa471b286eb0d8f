"""The served model's modules in the notebook: envoys, which are names of modules.

An envoy is the name of a module and holds no values. An envoy that a block uses travels as its path, and the worker replaces
it by an envoy with values. For an unknown name, the error suggests similar names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, overload

from interpose.contract.errors import InvalidArgument
from interpose.contract.names import Name, not_assigned
from interpose.modules.tree import Node


class Envoy(Name):
    """The name of a module of the served model; its values exist only inside a block.

    Raises:
        UnknownLocation: the module has no child of that name or number. The error is an AttributeError too.
        InvalidArgument: code outside a block asked for a value.
    """

    __slots__ = ("_node", "_tree")
    _node: Node
    _tree: Node
    if TYPE_CHECKING:  # values, which code in a block computes with; every other name is an envoy's
        resid_pre: Any
        attn_in: Any
        attn_out: Any
        mlp_in: Any
        mlp_out: Any
        resid_mid: Any
        resid_post: Any
        q: Any
        k: Any
        v: Any
        norm_q: Any
        norm_k: Any
        norm_v: Any
        rot_q: Any
        rot_k: Any
        pattern: Any
        z: Any
        gate: Any
        up: Any
        act: Any
        router_logits: Any
        experts: Any
        expert_weights: Any
        weight: Any
        bias: Any

    def __init__(self, node: Node, tree: Node) -> None:
        object.__setattr__(self, "_node", node)
        object.__setattr__(self, "_tree", tree)

    @property
    def path(self) -> str:
        """The module's path, e.g. "model.layers.2.mlp"; "" for the model itself."""
        return self._node.path

    @property
    def output(self) -> Any:
        """The module's output; inside a block only."""
        raise self._outside("output")

    @property
    def input(self) -> Any:
        """The module's first positional argument; inside a block only."""
        raise self._outside("input")

    @property
    def inputs(self) -> Any:
        """The module's arguments as `(args, kwargs)`; inside a block only."""
        raise self._outside("inputs")

    def next(self) -> Any:
        """The module in the next generation step; inside a block only."""
        raise self._outside("next()")

    def skip(self, value: Any) -> Any:
        """Skip the module for this request, with `value` as its output; inside a block only.

        `value` has the form of the module's output. The block goes on at the module's output. A skipped module with attention
        stores no keys and values for the step, so the block must skip it in every later step too.
        """
        raise self._outside("skip(value)")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the module to values: `model.lm_head(model.model.norm(h))`; inside a block only.

        Arguments and result have their full shapes with any tensor-parallel size, and any number of rows. The result has the
        form of the module's `.output`. `model.logits(h)` is the unembedding with the model's own scale and soft cap.
        """
        raise self._outside("(…)", dot="")

    def _outside(self, what: str, dot: str = ".") -> InvalidArgument:
        spelled = f"{self.path or 'model'}{dot}{what}"
        return InvalidArgument(
            f"{spelled} exists only while the model runs: use it inside `with model.trace(prompt):`, and keep what you want "
            "after the block with .save()",
            location=self.path,
        )

    def __getattr__(self, name: str) -> Envoy:
        if name.startswith("_"):  # notebooks, copy and pickle look up such names
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in self._node.values or name in self._node.weights:
            raise self._outside(name)
        return Envoy(self._node.child(name), self._tree)

    def __setattr__(self, name: str, value: Any) -> None:
        found = self._node.children.get(name) or self._node.pseudo.get(name)
        if found is not None:
            raise InvalidArgument(
                f"{not_assigned(found.path)}, inside `with model.trace(prompt):`", location=found.path
            )
        raise self._outside(f"{name} = …")

    def _misused(self, used: str, then: str = "") -> NoReturn:
        message = f"{self._node.misused(used, then)}, inside `with model.trace(prompt):`"
        raise InvalidArgument(message, location=self.path)

    @overload
    def __getitem__(self, key: int) -> Envoy: ...
    @overload
    def __getitem__(self, key: slice) -> list[Envoy]: ...
    def __getitem__(self, key: int | slice) -> Envoy | list[Envoy]:
        if not self._node.items and not isinstance(key, int):
            self._misused("indexed", "[…]")
        if isinstance(key, slice):
            return [Envoy(node, self._tree) for node in self._node.items[key]]
        if not hasattr(key, "__index__"):
            raise InvalidArgument(f"{self._node.shown}[{key!r}]: modules are numbered; write a number or a slice")
        return Envoy(self._node.child(key.__index__()), self._tree)

    def __len__(self) -> int:
        if not self._node.items:
            self._misused("measured by len()")
        return len(self._node.items)

    def __iter__(self) -> Iterator[Envoy]:
        if not self._node.items:
            self._misused("gone through")
        return (Envoy(node, self._tree) for node in self._node.items)

    def _same(self, other: object) -> bool:
        return isinstance(other, Envoy) and other._node is self._node

    def __hash__(self) -> int:
        return hash(self._node)

    def __copy__(self) -> Envoy:
        return self

    def __deepcopy__(self, memo: object) -> Envoy:
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            "a module of a served model belongs to its connection and cannot be pickled; get it from client.model()"
        )

    def __dir__(self) -> list[str]:
        names = [name for name in (*self._node.children, *self._node.pseudo) if name.isidentifier()]
        return sorted({*names, *self._node.usable, *self._node.weights, *_of_objects()})

    def _ipython_key_completions_(self) -> list[int]:
        return [int(node.path.rpartition(".")[2]) for node in self._node.items]

    def _repr_html_(self) -> str:
        return self._node.to_html()

    def __repr__(self) -> str:
        return "\n".join(self._node.lines())


def _of_objects() -> list[str]:
    return [name for name in dir(Envoy) if name.startswith("__") and name.endswith("__")]
