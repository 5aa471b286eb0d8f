"""The tier of each part of a block, and what to write for a better tier: `model.explain`."""

from __future__ import annotations

import html
from dataclasses import dataclass

from interpose.v1.trace_pb2 import ExplainedPart as PartMessage
from interpose.v1.trace_pb2 import Explanation as ExplanationMessage

_SHOWN = 4  # locations that a text names


@dataclass(frozen=True)
class ExplainedPart:
    """How one part of a block runs.

    Attributes:
        line, text: the line of the notebook where the part begins.
        tier: "graph", "plan" or "block", as in `Accounting.tiers`.
        best: the best tier that the part can have as it is written; the model's settings may allow less.
        reads, writes: locations of a part that is a plan, e.g. "model.layers.2.output".
        why: why the part has no better tier; "" if there is none.
        at, at_text: the line that keeps the part from a better tier; 0 and "" if no line does.
        instead: what to write instead; "" if nothing helps.
    """

    line: int
    text: str
    tier: str
    best: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    why: str = ""
    at: int = 0
    at_text: str = ""
    instead: str = ""

    @classmethod
    def of(cls, message: PartMessage) -> ExplainedPart:
        """Return the part of a message."""
        return cls(
            message.line,
            message.text,
            message.tier,
            message.best,
            tuple(message.reads),
            tuple(message.writes),
            message.why,
            message.at,
            message.at_text,
            message.instead,
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return the part as a table of titles and texts."""
        can = f" ({self.best} with other settings of the model)" if self.best != self.tier else ""
        found = [("tier", f"{self.tier}{can}")]
        if self.reads:
            found.append(("reads", _some(self.reads)))
        if self.writes:
            found.append(("writes", _some(self.writes)))
        if self.at and self.at != self.line:
            found.append((f"line {self.at}", self.at_text))
        if self.why:
            found.append(("why", self.why))
        if self.instead:
            found.append(("instead", self.instead))
        return found


@dataclass(frozen=True)
class Explanation:
    """The tiers of a block; it prints as a text, and shows as a table in a notebook.

    Attributes:
        parts: the parts of the block, in the order of their lines.
        notes: what holds for all parts, e.g. a setting of the model.
    """

    parts: tuple[ExplainedPart, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, message: ExplanationMessage) -> Explanation:
        """Return the explanation of a message."""
        return cls(tuple(map(ExplainedPart.of, message.parts)), tuple(message.notes))

    def __str__(self) -> str:
        lines = list(self.notes)
        for part in self.parts:
            lines.append(f"line {part.line}: {part.text}")
            lines += [f"    {title}: {text}" for title, text in part.rows()]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        made = [f"<p>{html.escape(note)}</p>" for note in self.notes]
        made.append("<table>")
        for part in self.parts:
            head = f"line {part.line}: <code>{html.escape(part.text)}</code>"
            made.append(f'<tr><th colspan="2" style="text-align: left">{head}</th></tr>')
            made += [
                f'<tr><td>{html.escape(title)}</td><td style="text-align: left">{html.escape(text)}</td></tr>'
                for title, text in part.rows()
            ]
        return "".join([*made, "</table>"])


def _some(locations: tuple[str, ...]) -> str:
    rest = f" and {len(locations) - _SHOWN} more" if len(locations) > _SHOWN else ""
    return ", ".join(locations[:_SHOWN]) + rest
