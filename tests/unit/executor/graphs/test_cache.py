"""Which graphs are kept."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from executor.graphs.cache import GraphCache, Key


@dataclass
class Replay:
    """A ticket of the test."""

    over: bool = False

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True


def key(size: int, *sites: int, plans: tuple[str, ...] = ()) -> Key:
    return Key(size, frozenset(sites), frozenset(plans))


def test_a_graph_serves_steps_with_fewer_sites() -> None:
    cache = GraphCache(8, 100)
    small, large = cache.add(key(1, 1, 2), "small", 1), cache.add(key(1, 1, 2, 3, 4), "large", 1)
    assert cache.find(key(1, 1)) is small
    assert cache.find(key(1, 1, 2)) is small
    assert cache.find(key(1, 3)) is large
    assert cache.find(key(1, 5)) is None
    assert cache.find(key(2, 1)) is None
    assert cache.find(key(1, 1, plans=("p",))) is None


@pytest.mark.parametrize(("most", "most_bytes", "kept"), [(2, 100, [3, 4]), (9, 25, [3, 4]), (9, 100, [1, 2, 3, 4])])
def test_the_graph_that_was_used_longest_ago_goes_first(most: int, most_bytes: int, kept: list[int]) -> None:
    cache = GraphCache(most, most_bytes)
    for size in (1, 2, 3, 4):
        cache.add(key(size), f"graph {size}", 10)
    assert [size for size in (1, 2, 3, 4) if cache.find(key(size))] == kept
    assert cache.evicted == 4 - len(kept)


def test_a_find_counts_as_a_use() -> None:
    cache = GraphCache(2, 100)
    cache.add(key(1), "one", 1)
    cache.add(key(2), "two", 1)
    cache.find(key(1))
    cache.add(key(3), "three", 1)
    assert cache.find(key(1)) and not cache.find(key(2))


def test_a_graph_is_freed_when_its_last_replay_is_over() -> None:
    replay = Replay()
    cache = GraphCache(1, 100, lambda: replay)
    cache.add(key(1), "one", 10)
    cache.add(key(2), "two", 10)
    cache.reap()
    assert cache.size == 20 and len(cache) == 1
    replay.over = True
    cache.reap()
    assert cache.size == 10


def test_a_graph_beyond_all_memory_is_not_kept() -> None:
    cache = GraphCache(4, 100)
    cache.add(key(1), "one", 90)
    assert cache.add(key(2), "two", 101) is None
    assert cache.find(key(1)) and not cache.find(key(2))
    assert GraphCache(0, 100).add(key(1), "one", 1) is None


def test_all_graphs_go_when_memory_is_allocated_anew() -> None:
    cache = GraphCache(4, 100)
    for size in (1, 2):
        cache.add(key(size), size, 1)
    cache.clear()
    cache.reap()
    assert len(cache) == 0 and cache.size == 0 and cache.evicted == 0


def test_the_graphs_of_a_program_go_with_the_program() -> None:
    cache = GraphCache(8, 100)
    for plans in (("a",), ("a", "b"), ("b",), ()):
        cache.add(key(1, plans=plans), None, 1)
    cache.forget("a")
    assert cache.find(key(1, plans=("a",))) is None and cache.find(key(1, plans=("a", "b"))) is None
    assert cache.find(key(1, plans=("b",))) is not None and cache.find(key(1)) is not None
