"""The layouts that the page of fidelity has."""

from __future__ import annotations

from benchmarks.layouts import Layout

ONE_RANK = Layout(1)
LAYOUTS = [Layout(tensor, pipeline) for pipeline in (1, 2) for tensor in (1, 2, 4)]
