"""Messages that no client makes: each answer is a reply or a failure with a type, and another tenant does not notice."""

from __future__ import annotations

import pytest

from benchmarks.fuzz import METHODS, SEED, Fuzz
from tests.e2e.conftest import TENANTS
from tests.e2e.service import RunningService, wait_for

pytestmark = pytest.mark.timeout(300)

MESSAGES = 500
SECONDS = 20.0


def test_each_message_gets_a_reply_or_a_failure_with_a_type(second: RunningService) -> None:
    """A short run of `python -m benchmarks fuzz`, whose messages are the same each time."""
    stranger, neighbour = (str(one["api_key"]) for one in TENANTS)
    fuzz = Fuzz(second.address, stranger, neighbour, "tiny", SEED)
    tally = fuzz.run(MESSAGES, SECONDS)
    sent = sum(tally.answers.values())
    calls = {name for name, _ in tally.answers}
    assert sent >= 100 and tally.canaries, tally.answers
    if sent >= MESSAGES:
        assert calls == set(METHODS)
    for name in ("ListTraces", "CancelTrace", "Drain", "ListTenants", "GetUsage"):
        assert not tally.answers[name, "OK"], "the stranger is no operator"
    assert any(outcome == "OK" for _, outcome in tally.answers), "only garbage was sent"
    assert any(outcome == "ERROR_CODE_INVALID_ARGUMENT" for _, outcome in tally.answers), "nothing was refused"
    wait_for(lambda: not any(fuzz.left().values()), 60)
