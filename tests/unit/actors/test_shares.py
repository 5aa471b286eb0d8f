"""Turns of several parties: what each has had decides, and nobody has a claim on the time before it came."""

from __future__ import annotations

from actors.shares import Shares


def test_a_party_that_comes_later_begins_with_what_the_others_had() -> None:
    shares = Shares()
    shares.enter("a")
    for _ in range(5):
        shares.start("a", 10)
        shares.end("a", 10, 10)
    shares.start("a", 10)
    shares.enter("b")
    assert shares.had("b") == 50 and shares.had("a") == 60, "the trace that runs now is the newcomer's to catch up with"


def test_what_a_trace_did_not_use_comes_back() -> None:
    shares = Shares()
    shares.enter("a")
    shares.start("a", 100)
    shares.end("a", 100, 7)
    assert shares.had("a") == 7


def test_a_party_gains_nothing_by_leaving_for_a_moment() -> None:
    shares = Shares()
    for name in "ab":
        shares.enter(name)
    shares.start("a", 100)
    shares.end("a", 100, 100)
    shares.leave("a")
    shares.enter("a")
    assert shares.had("a") == 100 and shares.had("b") == 0


def test_nobody_is_remembered_for_ever() -> None:
    shares = Shares()
    shares.enter("stays")
    for number in range(5000):
        name = f"s{number}"
        shares.enter(name)
        shares.start(name, 1)
        shares.end(name, 1, 1)
        shares.leave(name)
        shares.start("stays", 1)
        shares.end("stays", 1, 1)
    assert len(shares._had) < 1200
    shares.leave("stays")
    shares.enter("new")
    assert list(shares._had) == ["new"] and not shares._open
