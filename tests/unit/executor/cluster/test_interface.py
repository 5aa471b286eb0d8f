"""Which interface of its node a worker uses."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from executor.cluster.network import use_interface_of

ADDRESS, INTERFACE = "VLLM_HOST_IP", "GLOO_SOCKET_IFNAME"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ADDRESS, INTERFACE):
        monkeypatch.setenv(name, "")  # so that what is set is taken back
        monkeypatch.delenv(name)


def chosen() -> tuple[str | None, str | None]:
    return os.environ.get(ADDRESS), os.environ.get(INTERFACE)


def addresses() -> list[tuple[str, str]]:
    """The interfaces of this machine and their addresses; psutil adds the interface's name to a link-local address."""
    return [
        (name, one.address.partition("%")[0])
        for name, them in psutil.net_if_addrs().items()
        for one in them
        if one.family in (socket.AF_INET, socket.AF_INET6)
    ]


def test_the_one_with_the_address_that_the_cluster_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name, address in addresses():
        for variable in (ADDRESS, INTERFACE):
            monkeypatch.delenv(variable, raising=False)
        use_interface_of(address)
        found[name, address] = chosen()
    there = set(addresses())  # those of containers come and go
    assert ("lo", "127.0.0.1") in there & found.keys()
    assert {key: said for key, said in found.items() if key in there} == {
        (name, address): (address, name) for name, address in there & found.keys()
    }


def test_what_the_node_says_itself_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS, "10.0.0.7")
    monkeypatch.setenv(INTERFACE, "eth7")
    use_interface_of("127.0.0.1")
    assert chosen() == ("10.0.0.7", "eth7")


def test_one_of_both_that_the_node_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE, "eth7")
    use_interface_of("127.0.0.1")
    assert chosen() == ("127.0.0.1", "eth7")


def test_an_address_of_no_interface_names_none() -> None:
    """That of a node behind a translation of addresses."""
    use_interface_of("203.0.113.77")
    assert chosen() == ("203.0.113.77", None)
