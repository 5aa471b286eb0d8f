"""docs/faults.md has what the tests see, each fault once, and rewriting it changes the table only."""

from __future__ import annotations

from interpose.contract.errors import ConnectionLost, InvalidArgument, QuotaExceeded, Unavailable
from tests.cluster.matrix import FAULTS, PAGE, Seen, render, rows, shown, stable


def test_the_page_has_every_fault_once() -> None:
    assert [stable(row)[0] for row in rows(PAGE.read_text())] == list(FAULTS)


def test_nothing_leaks_and_no_result_is_lost() -> None:
    assert all((lost, leaks) == ("0", "0") for _, _, lost, leaks in map(stable, rows(PAGE.read_text())))


def test_rows_that_were_seen_again_are_replaced() -> None:
    page = PAGE.read_text()
    seen = Seen(FAULTS[2], "nothing", 0.4, 12.6, 0, 0)
    rewritten = render(page, [seen])
    assert rows(rewritten)[2] == seen.row == f"| {FAULTS[2]} | nothing | < 1 | 13 | 0 | 0 |"
    assert [row for row in rows(rewritten) if row != seen.row] == rows(page)[:2] + rows(page)[3:]
    assert render(page, []) == page
    assert stable(seen.row) == (FAULTS[2], "nothing", "0", "0")


def test_what_a_client_sees() -> None:
    assert shown(None) == "nothing: its trace went on"
    assert shown(Unavailable("x", retry_after=5.0)) == "`Unavailable`, retryable"
    assert shown(QuotaExceeded("x")) == "`QuotaExceeded`, retryable"
    assert shown(InvalidArgument("x")) == "`InvalidArgument`"
    assert shown(ConnectionLost("x")) == "`ConnectionLost`, retryable"
