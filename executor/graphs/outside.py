"""The part of a program after the model's pass: at the logits and at the samples.

The engine computes logits and samples outside of its graphs, a row for each request of the batch. There the rest of each program
runs once for all of its requests in the step, and for no other row. A step whose loops are at the logits and samples alone is the
engine's own step, compiled and in its own graphs.

What the part within the pass leaves for this part, it leaves by slots, as it leaves what the next step needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from executor.graphs.emitted import packed
from executor.graphs.passes import Program, checked
from executor.graphs.ring import Ring
from executor.graphs.tables import Tables
from executor.plan.program import ProgramRun
from executor.plan.run import replaced
from executor.views.view import tensor_at


class Outside:
    """The rest of one program, for the requests of a step in which it is open.

    Args:
        program: the program.
        tables: of the step.
        ring: where the step's values are, when the model has run.
        rows: where the requests are in the batch.
        slots: their slots.
    """

    def __init__(self, program: Program, tables: Tables, ring: Ring, rows: Sequence[int], slots: Sequence[int]) -> None:
        self._program = program
        self._ring = ring
        self._count = len(rows)
        self._rows, self._slots, self._offsets = tables.put([rows, slots, tables.begins_of(slots)]).unbind(0)
        self._run: ProgramRun | None = None

    def visit(self, path: str, value: torch.Tensor) -> torch.Tensor:  # [requests of the batch, ...]
        """Run on from a location; return the value that the engine goes on with.

        Raises:
            CannotRun: the value has another form than the program was made for.
        """
        hoisted = self._program.hoisted
        reads = hoisted.plan.reads
        number = next((i for i in range(hoisted.inside, len(reads)) if reads[i].path == path), -1)
        if number < 0:
            return value
        given = {}
        for (leaf, at), index in zip(reads[number].form.leaves(), hoisted.reads[number], strict=True):
            tensor = checked(tensor_at(value, at), (len(value), *leaf.shape), leaf.dtype, path)
            given[index] = tensor.index_select(0, self._rows).unsqueeze(1)
        with torch.inference_mode(False), torch.no_grad():
            run = self._begun() if number == hoisted.inside else self._run
            assert run is not None
            run.serve(number, given)
            self._emit(run, number)
        for write in (one for one in hoisted.plan.writes if one.read == number):
            now = tensor_at(value, write.at)
            now = now if write.mutated else now.clone()
            value = replaced(
                value, write.at, now.index_copy_(0, self._rows, self._result(run, write.output).squeeze(1))
            )
        if number + 1 == len(reads):
            with torch.inference_mode(False), torch.no_grad():
                for one in hoisted.changed:
                    self._program.states[one.name].index_copy_(0, self._slots, self._result(run, one.output))
            self._run = None
        return value

    def _begun(self) -> ProgramRun:
        """Begin a step with what the requests have, what they carry, and what the pass left."""
        program = self._program
        hoisted = program.hoisted
        inputs = {index: tensor.index_select(0, self._slots) for index, tensor in program.stacked.items()}
        inputs |= program.shared
        inputs |= {hoisted.states[name]: state.index_select(0, self._slots) for name, state in program.states.items()}
        self._run = run = ProgramRun(hoisted.parts, inputs, frozenset(program.shared), self._count)
        run.give({node: left.index_select(0, self._slots) for node, left in program.crossing.items()})
        return run

    def _result(self, run: ProgramRun, output: int) -> torch.Tensor:  # [requests, ...]
        return run.result(self._program.hoisted.results[output])

    def _emit(self, run: ProgramRun, number: int) -> None:
        """Write what the block keeps into the ring, where the step has been appended already."""
        memory = self._ring.memory
        wanted = [(output, begin, width) for output, (at, begin, width) in self._program.at.items() if at == number]
        ranges = self._offsets + self._ring.last if any(width for *_, width in wanted) else self._offsets
        for output, begin, width in wanted:
            if width:
                # Each row of this view begins one element after the row before, as of `Pass`.
                lines = memory.as_strided((len(memory) - begin - width + 1, width), (1, 1), begin)
                lines.index_copy_(0, ranges, packed(self._result(run, output), memory.dtype))
