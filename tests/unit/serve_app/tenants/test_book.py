"""The book of keys: its file, revoked keys, and processes that follow it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.key_store import KeyStore
from interpose.contract.errors import ServiceFailure
from serve_app import builder
from serve_app.key_hashes import hashed
from serve_app.settings import ANONYMOUS, Tenant, settings_from
from serve_app.tenants import book as books
from serve_app.tenants.book import KeyBook, Keyring, book_of


def tenant(name: str, *keys: str) -> Tenant:
    return Tenant.model_validate({"name": name, "api_keys": [str(hashed(key)) for key in keys]})


def write(file: Path, **keys: str) -> None:
    """Write a file of tenants, whose stamp differs from the last one's."""
    lines = [f"- name: {name}\n  api_keys: ['{hashed(key)}']" for name, key in keys.items()]
    file.write_text("tenants:\n" + "\n".join(lines))
    write.count = getattr(write, "count", 0) + 1  # type: ignore[attr-defined]
    os.utime(file, (0, write.count))  # type: ignore[attr-defined]


def name_of(book: KeyBook, key: str | None) -> str | None:
    known = book.table.find(key)
    return known.tenant.name if known is not None else None


def test_who_needs_no_key() -> None:
    assert book_of((), "").keyless is ANONYMOUS
    alone = Tenant(name="alone")
    assert book_of((alone,), "").keyless is alone
    book = book_of((tenant("red", "red-key-1"),), "")
    [key] = book.tenants[0].api_keys
    # The last key of the only tenant is revoked: that opens the service to nobody.
    revoked = book.revoke("red", key.label)
    assert revoked.keyless is None and name_of(revoked, "red-key-1") is None and name_of(revoked, None) is None


def test_a_revoked_key_stays_revoked() -> None:
    built = book_of((tenant("red", "red-key-1", "red-key-2"), tenant("blue", "blue-key")), "")
    first, second = built.tenants[0].api_keys
    revoked = built.revoke("red", first.label)
    assert [name_of(revoked, key) for key in ("red-key-1", "red-key-2", "blue-key")] == [None, "red", "blue"]
    with pytest.raises(LookupError):
        revoked.revoke("red", first.label)
    with pytest.raises(LookupError):
        revoked.revoke("blue", second.label)
    # Also in a book that is made later of the same settings, in either order of comparison.
    later = KeyBook(built.tenants, made=built.made + 1)
    for merged in (later.newest(revoked), revoked.newest(later)):
        assert merged.made == later.made and name_of(merged, "red-key-1") is None


def test_the_file_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    write(file, red="red-key-1", blue="blue-key")
    book = book_of((tenant("green", "green-key"),), str(file))
    assert [name_of(book, key) for key in ("red-key-1", "blue-key", "green-key")] == ["red", "blue", "green"]
    assert book.reread() is book
    write(file, red="red-key-2")
    changed = book.newest(book.reread())
    assert [name_of(changed, key) for key in ("red-key-1", "red-key-2", "blue-key")] == [None, "red", None]
    assert changed.newest(book) == changed == book.newest(changed)
    # What is wrong leaves the tenants as they are.
    for text in ("tenants: [", "tenants: [{name: red, api_keys: [a-clear-key]}]", "tenants: [{name: green}]", "a: 1"):
        file.write_text(text)
        wrong = changed.reread()
        assert wrong.listed == changed.listed and wrong.reread() is wrong, "it is said once"
    write(file, green="another-key")
    assert changed.reread().listed == changed.listed, "the settings have a tenant of that name"
    file.unlink()
    assert changed.reread().listed == changed.listed
    # An empty list lets nobody in but the tenants of the settings.
    file.write_text("tenants: []")
    assert name_of(changed.reread(), "red-key-2") is None and name_of(changed.reread(), None) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tenants: []", "lists no tenant"),
        ("tenants: [{name: red}]", "has no key"),
        ("tenants: [{name: red, api_keys: [a-clear-key]}]", "write its hash"),
        ("tenants: [{name: red, api_keys: ['$scrypt$x']}]", "tenants.yaml:1: .*has the form"),
        ("tenants: [{nam: red}]", "did you mean name"),
        ("tenants: 3\n", "tenants.yaml:1: tenants"),
        ("x", "name: value"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        book_of((), str(file))
    assert "a-clear-key" not in str(caught.value)
    with pytest.raises(ValueError, match="no configuration file"):
        book_of((), str(tmp_path / "nowhere.yaml"))


def test_the_application_is_built_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    write(file, red="red-key-1")
    application = builder.build(settings_from({"model": "x", "tenants_file": str(file)}))
    settings, _, book = application._bound_deployment.init_args
    assert [one.name for one in settings.tenants] == ["red"] and name_of(book, "red-key-1") == "red"


class Directory:
    """A directory with its key store alone, in this process, called as an actor is."""

    def __init__(self) -> None:
        self.store = KeyStore()
        self.keys = SimpleNamespace(remote=self.store.exchange)


async def test_processes_follow_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "FOLLOW_SECONDS", 0.02)
    monkeypatch.setattr("actors.key_store._LOOK_SECONDS", 0.0)
    file = tmp_path / "tenants.yaml"
    write(file, red="red-key-1", blue="blue-key")
    directories = [Directory()]
    ingress, proxy = Keyring(book_of((), str(file))), Keyring()
    tasks = [asyncio.create_task(one.follow(lambda: directories[-1])) for one in (ingress, proxy)]
    try:
        assert await proxy.until_known(5.0)
        assert proxy.find("red-key-1") is not None and proxy.find("red-key-2") is None
        # A key that is used is known to be used.
        await until(lambda: bool(directories[0].store.uses()))
        [(used, when)] = directories[0].store.uses().items()
        assert used == proxy.find("red-key-1").key.hash and abs(when - time.time()) < 60  # type: ignore[union-attr]
        # The file changes.
        write(file, red="red-key-2", blue="blue-key")
        await until(lambda: proxy.find("red-key-2") is not None and ingress.find("red-key-1") is None)
        # An operator revokes.
        [key] = [key for one in directories[0].store.book.all if one.name == "blue" for key in one.api_keys]
        directories[0].store.revoke("blue", key.label)
        await until(lambda: proxy.find("blue-key") is None and ingress.find("blue-key") is None)
        # The directory dies: the next learns from the others what was revoked.
        for one in (ingress, proxy):
            assert one.find("red-key-2") is not None
        tasks.append(asyncio.create_task(Keyring(book_of((), str(file))).follow(lambda: directories[-1])))
        directories.append(Directory())
        for task in tasks[:2]:
            task.cancel()
        tasks += [asyncio.create_task(one.follow(lambda: directories[-1])) for one in (ingress, proxy)]
        await until(lambda: directories[-1].store.book is not None and bool(directories[-1].store.book.revoked))
        assert name_of(directories[-1].store.book, "blue-key") is None
    finally:
        for task in tasks:
            task.cancel()


def test_what_cannot_be_revoked() -> None:
    store = KeyStore()
    assert store.uses() == {}
    with pytest.raises(ServiceFailure, match="no keys are known"):
        store.revoke("red", "x")


async def until(condition: Any) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
