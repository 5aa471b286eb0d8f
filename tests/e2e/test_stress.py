"""A crowd of traces on the shared service, for some seconds; `python -m benchmarks.stress` does it for minutes."""

from __future__ import annotations

from benchmarks.stress import KINDS, stress
from tests.e2e.service import RunningService


def test_a_crowd_gets_what_each_gets_alone(service: RunningService) -> None:
    report = stress(service.address, seconds=8, traces=24, clients=4, count=2 * len(KINDS), name="llama")
    assert not report.wrong, report.wrong[:5]
    assert report.endings["cancelled"], report.endings
    assert report.traces >= 24
    assert len(report.endings) > 2, report.endings
