"""Measures in bfloat16 how far each location is from the float32 truth, beside how far transformers' own bfloat16 is.

`python -m tests.fidelity.half RESULT FOLDER LAYOUT COLUMN…` measures what `tests.fidelity.measure` does, under the same
conditions and in the same layout, and writes both distances to RESULT as JSON. Rounding has no tolerance that holds for every
model: a location is right if it is not much further off than the same location in transformers, on the same device, fed with the
same tokens.

Where the numbers choose experts, rounding makes other choices between those that are nearly as good: such a prompt counts with
its choices up to the first other one, by how much worse they are, and not with what other experts then made of it.
"""

from __future__ import annotations

import gc
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.layouts import Layout
from tests.engine.harness import Block
from tests.fidelity import changes
from tests.fidelity.architectures import ALL
from tests.fidelity.changes import changeable, ramp
from tests.fidelity.measure import (
    CHANGED,
    PHASES,
    PROMPTS,
    SCHEDULINGS,
    START,
    STEPS,
    Known,
    Measurement,
    NotStarted,
    Scheduling,
    as_file,
    meet,
    prepare_rank,
    write_result,
)
from tests.fidelity.places import Place, Truth
from tests.oracle import Edit, Oracle
from tests.oracle.experts import SETS, sorted_experts

# How much further off than transformers' bfloat16 a location may be: each rounds where its kernels do.
TIMES = 2.0
LOGITS, SOON = "model.logits.output", "model.blocks[3].resid_post"
EXPERTS = "].mlp.experts"
_Found = dict[str, dict[str, "Compared | str"]]
# row → condition → (how far off it is, how far transformers' bfloat16 is), or the message of a refusal
Halves = dict[str, dict[str, tuple[float, float] | str]]


@dataclass
class Distance:
    """‖a - b‖ / ‖b‖ over everything that is added, for each tensor of a value by itself.

    Attributes:
        by_row: whether each row counts alike: first both are divided by the row's own ‖b‖. Trained models have rows that are a
            hundred times as long as the others, and would hide them.
        squares: ‖a - b‖² and ‖b‖² of each tensor.
    """

    by_row: bool = False
    squares: list[tuple[float, float]] = field(default_factory=list)

    def add(self, found: Any, expected: Any) -> None:
        """Add a value."""
        pairs = list(_squares(found, expected, self.by_row))
        before = self.squares or [(0.0, 0.0)] * len(pairs)
        self.squares = [(a + c, b + d) for (a, b), (c, d) in zip(before, pairs, strict=True)]

    def __float__(self) -> float:
        """Of the tensor that is furthest off; where it is to be 0, its length."""
        return max((math.sqrt(off / length) if length else math.sqrt(off) for off, length in self.squares), default=0.0)


def _squares(found: Any, expected: Any, by_row: bool) -> Iterator[tuple[float, float]]:
    """Yield ‖a - b‖² and ‖b‖² of each tensor of a value; see `Distance`."""
    if isinstance(expected, tuple | list):
        for one, other in zip(found, expected, strict=True):
            yield from _squares(one, other, by_row)
    elif expected is None:
        assert found is None
    else:
        assert found.shape == expected.shape
        a, b = found.cpu().double(), expected.cpu().double()
        if by_row and b.dim() > 1 and b.numel():
            lengths = b.flatten(1).norm(dim=1).reshape(-1, *[1] * (b.dim() - 1))
            a, b = a / lengths.where(lengths > 0, 1.0), b / lengths.where(lengths > 0, 1.0)
        yield float(((a - b) ** 2).sum()), float((b**2).sum())


@dataclass
class Compared:
    """How far off the engine is at a location, and transformers' bfloat16."""

    mine: Distance = field(default_factory=Distance)
    theirs: Distance = field(default_factory=Distance)

    @classmethod
    def by_row(cls) -> Compared:
        """Return a comparison in which each row counts alike."""
        return cls(Distance(by_row=True), Distance(by_row=True))

    def add(self, value: Any, rounded: Any, exact: Any) -> None:
        """Add a value as the engine has it, as transformers has it in bfloat16, and as it is."""
        self.mine.add(value, exact)
        self.theirs.add(rounded, exact)

    def pair(self) -> tuple[float, float]:
        """Both distances."""
        return float(self.mine), float(self.theirs)


class HalfMeasurement(Measurement):
    """One architecture's engine in bfloat16, and transformers in both precisions.

    Args:
        known: the model.
        layout: of the engine.
        reports: whether this process is told the values; one rank is.
        compared: makes the comparison of a location under a condition.
        modules: whether the engine's modules are measured, beside canonical values.
    """

    def __init__(
        self,
        known: Known,
        layout: Layout,
        reports: bool,
        compared: Callable[[], Compared] = Compared,
        modules: bool = True,
    ) -> None:
        super().__init__(known, layout, reports, "bfloat16", modules)
        self._compared = compared
        self._reports = reports
        if not reports:
            return
        exact = Oracle(known.checkpoint)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        rounded = Oracle(known.checkpoint, dtype=torch.bfloat16, device=device)
        self._oracles = exact, rounded

        # A token that is chosen otherwise, as the largest logits are rounded, is no error; both are fed with the engine's.
        @cache
        def truths(prompt: int, tokens: tuple[int, ...]) -> tuple[Truth, Truth]:
            exactly, roundly = (Truth.of(oracle, PROMPTS[prompt], STEPS, force=tokens) for oracle in (exact, rounded))
            return exactly, roundly

        self._truths = truths

    def halves(self, schedulings: Sequence[Scheduling] = SCHEDULINGS, only: frozenset[str] = frozenset()) -> Halves:
        """Return how far off each row is under each condition, or the message it was refused with.

        Args:
            schedulings: those to measure under.
            only: the rows to measure; empty for all.
        """
        all_of_them = self.places
        self.places = [place for place in all_of_them if not only or CHANGED + place.row in only]
        halves = self._changes_of_all()
        self.places = [place for place in all_of_them if not only or place.row in only]
        for condition, prompt, ran in self._ran(schedulings):
            if self._reports:
                self._note_half(halves, condition, prompt, ran.saved, tuple(ran.token_ids))
        return {
            row: {name: found if isinstance(found, str) else found.pair() for name, found in under.items()}
            for row, under in halves.items()
        }

    def _read(self, prompt: int) -> list[int]:
        """Return what is read with a prompt: as in the other measurement, and of every prompt which experts are chosen."""
        chosen = (i for i, place in enumerate(self.places) if place.row.endswith(EXPERTS))
        return sorted({*super()._read(prompt), *chosen})

    def _note_half(
        self, halves: _Found, condition: str, prompt: int, saved: dict[str, Any], tokens: tuple[int, ...]
    ) -> None:
        exact, rounded = self._truths(prompt, tokens)
        alike, otherwise = self._choices(prompt, exact, rounded, saved)
        for i in self._read(prompt):
            place = self.places[i]
            if otherwise and not place.row.endswith(EXPERTS) and (i, 0) in saved["values"]:
                continue
            row = halves.setdefault(place.row, {})
            for step in range(STEPS):
                name = f"{PHASES[step]}, {condition}"
                refused = saved["refused"].get((i, step))
                if refused is not None:
                    refusal = place.generally(refused)
                    assert row.setdefault(name, refusal) == refusal, f"{place.source}: {row[name]!r} and {refusal!r}"
                    continue
                if place.row.endswith(EXPERTS) and (i, step) not in alike:
                    continue
                compared = row.setdefault(name, self._compared())
                assert isinstance(compared, Compared), f"{place.source} is given, and refused: {compared}"
                compared.add(*triple(place, exact, rounded, step, saved["values"][i, step]))

    def _choices(
        self, prompt: int, exact: Truth, rounded: Truth, saved: dict[str, Any]
    ) -> tuple[set[tuple[int, int]], bool]:
        """Return which choices of experts follow from the same experts before, as place and step; and whether one differs.

        Once the engine or transformers has chosen otherwise, what the layers behind are given is another value.
        """
        alike = set()
        for step in range(STEPS):
            for i in self._read(prompt):
                place = self.places[i]
                if not place.row.endswith(EXPERTS) or (i, step) not in saved["values"]:
                    continue
                alike.add((i, step))
                both = saved["values"][i, step], place.expected(rounded, step)
                if any(_chooses_otherwise(place, exact, step, one) for one in both):
                    return alike, True
        return alike, False

    def _changes_of_all(self) -> _Found:
        """Return how far off the logits are after each change."""
        places = changeable(self.places)
        sampling = {"max_tokens": STEPS, "ignore_eos": True}
        looked = [self._after(place) for place in places]
        sources = [
            changes.SOURCE.replace(LOGITS, at).format(at=place.source) for place, at in zip(places, looked, strict=True)
        ]
        blocks = [[Block(changes.PROMPT, source, sampling)] for source in sources]
        rans = self.engine.run_traces(blocks, plain=tuple(changes.BESIDE))
        found: _Found = {}
        if not self._reports:
            return found
        for place, at, ran in zip(places, looked, rans, strict=False):
            row = CHANGED + place.row
            if ran.failure is not None:
                found[row] = dict.fromkeys(PHASES, place.generally(ran.failure.message))
                continue
            edits = [Edit(place.path, "output", ramp)]
            exact, rounded = (
                oracle.run(changes.PROMPT, STEPS, edits, force=ran.token_ids, canonical=True)
                for oracle in self._oracles
            )
            found[row] = {}
            for step, phase in enumerate(PHASES):
                compared = found[row][phase] = self._compared()
                truths = (
                    one.logits[step] if at == LOGITS else one.value("blocks.3.resid_post", step=step)
                    for one in (rounded, exact)
                )
                compared.add(ran.saved["logits"][step], *truths)
        return found

    def _after(self, place: Place) -> str:
        """Return where the effect of a change is looked at.

        In trained models of many layers rounding grows from layer to layer, and the logits of two runs in bfloat16 differ
        widely. There a change is looked at two layers on.
        """
        early = place.source.startswith(("model.blocks[1].", "model.embed."))
        deep = self.engine.llm.llm_engine.model_config.hf_text_config.num_hidden_layers > 4
        return SOON if early and deep and self._compared().mine.by_row else LOGITS


def _chooses_otherwise(place: Place, exact: Truth, step: int, experts: torch.Tensor) -> bool:
    mine, theirs = (one.cpu().long().sort(-1).values for one in (experts, place.expected(exact, step)))
    return not torch.equal(mine, theirs)


def triple(place: Place, exact: Truth, rounded: Truth, step: int, value: Any) -> tuple[Any, Any, Any]:
    """Return what is compared: a value as the engine has it, as transformers has it in bfloat16, and as it is."""
    expected, theirs = place.expected(exact, step), place.expected(rounded, step)
    if place.row.endswith(EXPERTS):
        # Each choice by how much the router favours what it chose, beside how far off its scores are.
        scores, near = (truth.canonical.value(_router(place), step=step).cpu().double() for truth in (exact, rounded))
        best, mine = (scores.gather(-1, one.cpu().long()).sum(-1) for one in (expected, value))
        value = scores.clone()
        value[:, 0] += best - mine
        return value, near, scores
    if place.row.endswith(SETS):
        value, expected, theirs = (sorted_experts(one.cpu()) for one in (value, expected, theirs))
    return value, theirs, expected


def _router(place: Place) -> str:
    """Return the oracle's name of the scores that a place's experts are chosen by."""
    return re.sub(r"\[(\d+)\]", r".\1", place.source.removeprefix("model.")).replace(".experts", ".router_logits")


def worst(halves: Halves) -> dict[str, tuple[float, float]]:
    """Return how far off each row is that is given, and transformers there, each under the condition where it is most."""
    found = {}
    for row, under in halves.items():
        pairs = [pair for pair in under.values() if not isinstance(pair, str)]
        if pairs:
            found[row] = max(pair[0] for pair in pairs), max(pair[1] for pair in pairs)
    return found


def ratio(halves: Halves) -> float:
    """Return how many times as far off as transformers the row is that is most."""
    return max(mine / its for mine, its in worst(halves).values() if its)


def too_far(halves: Halves) -> list[str]:
    """Return the rows that are further off than `TIMES` what transformers is."""
    return [
        f"{row}: {mine:.1e}, transformers {its:.1e}" for row, (mine, its) in worst(halves).items() if mine > TIMES * its
    ]


def measure_half(folder: Path, column: str, layout: Layout, schedulings: Sequence[Scheduling] = SCHEDULINGS) -> Halves:
    """Measure one column as one rank; empty where another one is told."""
    reports = int(os.environ.get("RANK", "0")) == layout.reporting
    try:
        measurement = HalfMeasurement(Known.read(folder, column), layout, reports, modules=column not in ALL)
    except NotStarted as refused:
        return {START: {"": str(refused)}}
    halves = measurement.halves(schedulings)
    assert measurement.engine.interleaver.idle
    measurement.engine.close()
    return halves


def main() -> None:
    """Measure as one rank; see the module's docstring."""
    result, folder, name, *columns = sys.argv[1:]
    layout = Layout.named(name)
    rank = int(os.environ["RANK"])
    prepare_rank(layout)
    measured: dict[str, Halves] = {}
    for column in columns:
        gc.freeze()
        meet(Path(folder), f"{Path(result).stem}-{as_file(column)}", rank)
        if rank == 0:
            Known.write(Path(folder), column)
        measured[column] = measure_half(Path(folder), column, layout)
        if rank == layout.reporting:
            write_result(Path(result), measured)
            print(column, too_far(measured[column]), flush=True)


if __name__ == "__main__":
    main()
