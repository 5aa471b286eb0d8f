"""Messages that no client makes, for some seconds; `python -m benchmarks fuzz` sends 100,000."""

from __future__ import annotations

import pytest

from benchmarks.fuzz import Fuzz
from tests.e2e.service import RunningService, wait_for


@pytest.mark.timeout(300)
def test_messages_that_no_client_makes(service: RunningService) -> None:
    engines = {process.pid for process in service.processes("LazyWorkerActor")}
    fuzz = Fuzz(service.address, "", "", "llama", seed=20)
    tally = fuzz.run(4000, seconds=12)
    assert tally.canaries > 2, "a neighbour was served all the time"
    outcomes = {outcome for _, outcome in tally.answers}
    assert sum(tally.answers.values()) > 200 and {"OK", "ERROR_CODE_INVALID_ARGUMENT"} <= outcomes, tally.answers
    wait_for(lambda: not any(fuzz.left().values()), 60)
    assert {process.pid for process in service.processes("LazyWorkerActor")} == engines
