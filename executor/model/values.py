"""The values a block gets at a location: private copies of its own rows.

Copies that the block changed are written back. The value a block sees is never the engine's memory. Each tensor is narrowed
to the request's rows, gathered over the tensor-parallel ranks, and copied into an ordinary tensor (not an inference tensor,
so it has a version counter and autograd works on it). When the block moves on, a tensor whose version counter moved was
changed in place and is written into the engine's rows. Some writes do not move the counter (through `.data`, `.numpy()`, a
storage), so a tensor whose counter stands still is written back if its contents differ. A value that a block
assigned goes into a new tensor that takes the place of the old one, as returning a value from a torch hook does. Other
requests' rows are in neither copy.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from executor.core.errors import Refusal
from executor.core.location import COMPUTED, Kind
from executor.model.bits import bits, same_bits
from executor.model.items import Opaque, Path, Spot, as_served, check, outputs_like
from executor.model.layouts import WHOLE, Layout
from executor.model.rows import Rows, SomeRows
from interpose.v1 import trace_pb2 as pb


class Change(enum.Enum):
    """Whether a copy was changed in place.

    To compare contents at once, the worker would have to wait for the device. Writing the copy back costs less, changed or not.
    The result of the comparison is read once, when the model has run.
    """

    NONE = enum.auto()
    POSSIBLE = enum.auto()
    MADE = enum.auto()


@dataclass
class Derived:
    """A value computed from a location's tensors, and the way back into them.

    Attributes:
        value: what the block sees.
        version: its version counter when it agreed with the sources.
        sources: the tensors that it was computed from, with their version counters then.
        compute: computes it from the sources.
        put: given the value before and now, changes the sources.
    """

    value: torch.Tensor
    version: int
    sources: list[tuple[torch.Tensor, int]]
    compute: Callable[[], torch.Tensor]
    put: Callable[[torch.Tensor, torch.Tensor], None]

    def same(self) -> bool:
        """Return whether the value still is what the sources give.

        Not every write moves the version counter.
        """
        with torch.inference_mode(False), torch.no_grad():
            return same_bits(self.compute(), self.value)

    def stale(self, sources: list[torch.Tensor]) -> bool:  # any shape
        """Return whether the sources are other tensors now, or were changed."""
        return any(
            now is not then or now._version != version
            for now, (then, version) in zip(sources, self.sources, strict=True)
        )


@dataclass
class Leaf:
    """One tensor of a served value: the engine's tensor, its rows, and the block's private copy.

    Attributes:
        before: what the block was given: all of it, or a rank that holds what was not changed would take the block for one that
            changed nothing.
        part: the shape of what this rank holds of it.
        differs: where the change is only possible, a tensor that says whether it was made.
    """

    original: torch.Tensor
    layout: Layout
    private: torch.Tensor
    version: int
    before: torch.Tensor
    part: torch.Size
    change: Change = Change.NONE
    differs: torch.Tensor | None = None

    def look(self, counted: bool = False) -> None:
        """Find out whether the block changed its copy in place.

        Args:
            counted: whether torch has counted each write to the copy.
        """
        if self.private._version != self.version or self.private.shape != self.before.shape:
            self.change = Change.MADE
        elif counted:
            return
        elif self.private.device.type != "cpu":
            self.change = Change.POSSIBLE
            with torch.inference_mode(False), torch.no_grad():
                self.differs = bits(self.private).ne(bits(self.before)).any()
        elif not same_bits(self.private, self.before):
            self.change = Change.MADE


class Served:
    """One location of one request in one step, while the block is at it.

    Args:
        location: its name, e.g. "model.layers.2.output".
        value: the engine's value: a tensor, or tuples, lists and dicts of them.
        rows: the request's rows in it.
        layout_of: the layout of the tensor at a path of keys into `value`, e.g. `(0,)` for the first of a tuple.

    Attributes:
        at: the location, whose text is its name.
        value: what the block sees; `assign` replaces the whole.
        written: whether the block changed it.
        differs: tensors on a device, any of which says that it did although torch did not count a write.
        put: what it wrote, each with one of `differs` where only that says whether it did.
        counted: whether torch has counted each write to the copies, because the block itself has only copies of these.
    """

    counted = False
    _refused: Refusal | None = None  # why a change of the block's does not fit

    def __init__(self, location: str, value: Any, rows: SomeRows, layout_of: Callable[[Path], Layout]) -> None:
        self.at: object = location
        self.location = location
        self.written = False
        self.differs: list[torch.Tensor] = []
        self.put: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._rows = rows
        self._layout_of = layout_of
        self._leaves: list[Leaf] = []
        self._derived: list[tuple[object, Derived]] = []
        self._original = value
        self._spot = Spot(location)
        self.value = self._expose(value, ())

    def leave(self) -> None:
        """Note that the block has gone on; a later assignment in the value would reach nothing."""
        self._spot.over = (
            "the block had gone on from there, when the model had used it already, so the model would not see it; assign it "
            "before asking for the next location, or work on a copy: values = list(values)"
        )

    def _expose(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._expose_tensor(value, path)
        if isinstance(value, tuple | list):
            items = [self._expose(item, (*path, i)) for i, item in enumerate(value)]
            return outputs_like(value, items, self._spot, path)
        if isinstance(value, dict):
            return {name: self._expose(item, (*path, name)) for name, item in value.items()}
        if value is None or isinstance(value, bool | int | float | str | Opaque):
            return value
        return Opaque(f"a {type(value).__name__} at {self.location}")

    def _expose_tensor(self, value: torch.Tensor, path: Path) -> Any:  # [batch rows, ...]
        known = next((leaf for leaf in self._leaves if leaf.original is value), None)
        if known is not None:
            return known.private
        rows = self._rows
        if value.dim() == 0 or not rows.holds(value):
            shape = list(value.shape)
            return Opaque(f"a tensor of shape {shape} at {self.location} whose rows do not belong to single requests")
        layout = self._layout_of(path)
        shard = rows.of(value)
        mine = self._gathered(layout, shard)
        part = shard.shape if mine is shard else layout.scatter(mine).shape
        given = self._widened(mine)
        private = self._copied(given)
        self._leaves.append(Leaf(value, layout, private, private._version, given, part))
        return private

    def _gathered(
        self, layout: Layout, shard: torch.Tensor
    ) -> torch.Tensor:  # [rows, ..., part] -> [rows, ..., features]
        return layout.gather(shard)

    def _widened(self, mine: torch.Tensor) -> torch.Tensor:  # [rows, ...]
        """Return what the block is given, whose rows of this step are `mine`."""
        return mine

    def _own_rows(self, whole: torch.Tensor) -> torch.Tensor:  # [rows, ...]
        """Return this step's rows of what the block made of what it was given."""
        return whole

    def _copied(self, mine: torch.Tensor) -> torch.Tensor:  # [rows, ...]
        with torch._C._InferenceMode(False):  # Leaving it brings back the mode of gradients too.
            torch._C._set_grad_enabled(False)
            return mine.clone(memory_format=torch.contiguous_format)

    def owns(self, tensor: torch.Tensor) -> bool:  # any shape
        """Return whether `tensor` shares memory with one of the block's private copies."""
        if tensor.layout is not torch.strided:  # Sparse tensors have no storage of their own.
            return False
        storage = tensor.untyped_storage().data_ptr()
        mine = self.given()
        return any(one.untyped_storage().data_ptr() == storage for one in mine)

    def given(self) -> list[torch.Tensor]:  # [rows, ...]
        """Return the tensors that the block has of this location."""
        return [leaf.private for leaf in self._leaves] + [derived.value for _, derived in self._derived]

    def changes(self) -> dict[int, torch.Tensor]:  # [rows, ...] each
        """Return the tensors that the block has changed in place, by their index in `given`.

        The tensors are on the CPU. The call raises what `put_back` raises.
        """
        self.put_back()
        for leaf in self._leaves:
            leaf.look()
        return {index: leaf.private for index, leaf in enumerate(self._leaves) if leaf.change is Change.MADE}

    def refuse(self, why: Refusal) -> None:
        """Have `settle` raise an error, because a change of the block's does not fit."""
        self._refused = why

    def derive(
        self,
        key: object,
        sources: list[torch.Tensor],
        compute: Callable[[], torch.Tensor],
        put: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> torch.Tensor:  # [rows, ...]
        """Return a value that is computed from tensors of this location.

        It is the same object until one of the tensors changes.

        Args:
            key: names the value.
            sources: what it is computed from.
            compute: computes it.
            put: given the value as it was and as the block left it, writes the change into the sources.
        """
        held = next((derived for one, derived in reversed(self._derived) if one is key), None)
        if held is None or held.stale(sources):
            with torch.inference_mode(False), torch.no_grad():
                value = compute()
            held = Derived(value, value._version, [(one, one._version) for one in sources], compute, put)
            self._derived.append((key, held))
        return held.value

    def put_back(self) -> None:
        """Write changes of derived values into the tensors from which they were computed.

        Raises:
            Refusal: the block changed both a derived value and a tensor from which it was computed.
        """
        for _, held in self._derived:
            sources = [one for one, _ in held.sources]
            if held.value._version == held.version and (held.stale(sources) or held.same()):
                continue
            if held.stale(sources):
                raise Refusal(
                    pb.ERROR_CODE_INVALID_ARGUMENT,
                    f"the residual stream at {self.location} and the tensors that it is the sum of were both changed; "
                    "change one of them",
                    location=self.location,
                )
            with torch.inference_mode(False), torch.no_grad():
                held.put(held.compute(), held.value)
            held.version = held.value._version
            held.sources = [(one, one._version) for one in sources]

    def assign(self, value: Any) -> None:
        """Replace the whole value by `value`, checked against what the model expects there.

        Raises:
            Refusal: the shape, length or type does not fit.
        """
        check(self.value, value, self.location)
        if value is not self.value:
            self._spot.over = (
                f"{self.location} was replaced as a whole, so the model would not see it; assign in the new value: "
                f"{self.location}[0] = …"
            )
            self._spot = Spot(self.location)
            self.value = as_served(self.value, value, self._spot)

    def settle(self, current: Any) -> Any:
        """Write the block's changes back; return the value with which the model goes on.

        That is `current` itself if the block changed nothing. Runs in the engine's inference mode. In-place changes go into
        the engine's own memory, replacements into a copy.

        Args:
            current: what the model would go on with: the value that was served, or what others made of it since.
        """
        if self._refused is not None:
            raise self._refused
        self.put_back()
        for leaf in self._leaves:  # all before a write: the engine's tensors may share memory
            leaf.look(self.counted)
        return self._settle(self._original, current, self.value)

    def _settle(self, original: Any, current: Any, now: Any) -> Any:
        if isinstance(original, torch.Tensor):
            return self._settle_tensor(original, current, now)
        if isinstance(original, tuple | list):
            items = [self._settle(*three) for three in zip(original, current, now, strict=True)]
            if all(new is old for new, old in zip(items, current, strict=True)):
                return current
            if hasattr(original, "_fields"):
                return type(original)(*items)
            return type(original)(items)
        if isinstance(original, dict):
            settled = {name: self._settle(one, current[name], now[name]) for name, one in original.items()}
            return current if all(settled[name] is current[name] for name in original) else settled
        return current

    def _settle_tensor(
        self, original: torch.Tensor, current: torch.Tensor, now: Any
    ) -> torch.Tensor:  # [batch rows, ...]
        if isinstance(now, Opaque):
            return current
        leaf = next(leaf for leaf in self._leaves if leaf.original is original)
        if now is leaf.private:
            if leaf.change is not Change.NONE:
                mine = leaf.layout.scatter(self._own_rows(now))
                if mine.shape != leaf.part:
                    raise ValueError(f"its shape became {list(mine.shape)}, and the model needs {list(leaf.part)}")
                self._rows.write(original, mine)
                if current is not original:  # The model goes on with another request's replacement.
                    self._rows.write(current, mine)
                self.put.append((now, leaf.differs))
                self.written = self.written or leaf.change is Change.MADE
                if leaf.differs is not None:
                    self.differs.append(leaf.differs)
            return current
        replaced = current.clone()
        now = now.detach().to(original.device, original.dtype)
        self.put.append((now, None))
        self._rows.write(replaced, leaf.layout.scatter(self._own_rows(now)))
        self.written = True
        return replaced


class Fixed(Served):
    """A value that was computed for the block and that the model never holds; read only.

    Args:
        location: the location's name.
        value: the value, the block's own.
    """

    def __init__(self, location: str, value: torch.Tensor) -> None:
        super().__init__(location, value, Rows(0, value.shape[0], value.shape[0], value.shape[0]), lambda path: WHOLE)
        [leaf] = self._leaves
        self._leaf = leaf

    def assign(self, value: Any) -> NoReturn:
        raise self._refusal()

    def settle(self, current: Any) -> Any:
        self._leaf.look()
        if self._leaf.change is Change.MADE:
            raise self._refusal()
        return current

    def _refusal(self) -> Refusal:
        instead = next((COMPUTED[kind] for kind in COMPUTED if f".{kind}" in self.location), COMPUTED[Kind.PATTERN])
        return Refusal(
            pb.ERROR_CODE_INVALID_ARGUMENT,
            f"{self.location} is computed for the block and the model never holds it, so a change would reach nothing; change "
            f"{instead}, or clone it to work on it",
            location=self.location,
        )
