"""Which tenant a key belongs to, and until when."""

from __future__ import annotations

import datetime
import pickle

import pytest

from serve_app.key_hashes import hashed, id_in, new_key
from serve_app.settings import ANONYMOUS, Settings, Tenant, settings_from
from serve_app.tenants.book import book_of
from serve_app.tenants.keys import KeyTable, key_of

LAPTOP = new_key("laptop")
NOW = datetime.datetime.now(datetime.timezone.utc)


def name_of(table: KeyTable, key: str | None) -> str | None:
    known = table.find(key)
    return known.tenant.name if known is not None else None


def test_without_tenants_everybody_is_anonymous() -> None:
    table = book_of(settings_from({"model": "x"}).tenants, "").table
    for key in (None, "whatever"):
        known = table.find(key)
        assert known is not None and known.tenant is ANONYMOUS
    assert KeyTable(()).find("whatever") is None


def test_a_key_belongs_to_one_tenant() -> None:
    tenants = [
        {"name": "red", "api_keys": ["red-key-1", "red-key-2", {"id": "laptop", "hash": str(hashed(LAPTOP))}]},
        {"name": "blue", "api_key": "blue-key", "trust": "full", "operator": True},
        {"name": "green", "api_keys": [str(hashed("green-key"))]},
    ]
    settings = Settings(models=[{"model": "x"}], tenants=tenants)  # type: ignore[arg-type]
    table = KeyTable(settings.tenants)
    for key, name in (("red-key-2", "red"), (LAPTOP, "red"), ("green-key", "green"), ("blue-key", "blue")):
        assert name_of(table, key) == name
    blue = table.find("blue-key")
    assert blue is not None and blue.tenant.trust == "full" and blue.tenant.operator
    swapped = LAPTOP[:-1] + ("a" if LAPTOP[-1] != "a" else "b")
    for key in ("blue-kez", None, "", "x" * 5000, swapped, LAPTOP.replace("laptop", "others"), "ip_laptop_", "\udcff"):
        assert table.find(key) is None
    # No key is in what travels to other processes.
    for text in (repr(settings), pickle.dumps(settings).decode("latin1"), settings.model_dump_json()):
        assert not [key for key in ("blue-key", "red-key", LAPTOP) if key in text]


def test_a_key_that_names_itself_is_compared_with_one_hash() -> None:
    """The hash of an id is for keys that begin with the id, and for no other."""
    tenant = Tenant.model_validate({"name": "a", "api_keys": [{"id": "laptop", "hash": str(hashed("a-plain-key"))}]})
    assert KeyTable([tenant]).find("a-plain-key") is None
    assert id_in(LAPTOP) == "laptop"


@pytest.mark.parametrize(
    ("expires", "there"),
    [
        (NOW + datetime.timedelta(hours=1), True),
        (NOW - datetime.timedelta(seconds=1), False),
        ((NOW + datetime.timedelta(days=2)).date(), True),
        ("2020-01-01", False),
        ("2020-01-01T00:00:00+02:00", False),
    ],
)
def test_a_key_expires(expires: object, there: bool) -> None:
    given = {"name": "a", "api_keys": [{"hash": str(hashed("a-plain-key")), "expires": expires}]}
    assert (KeyTable([Tenant.model_validate(given)]).find("a-plain-key") is not None) == there


def test_where_a_call_has_its_key() -> None:
    assert key_of([("x-api-key", "a")]) == "a"
    assert key_of([("authorization", "Bearer b")]) == "b"
    assert key_of([("authorization", "Basic b")]) is None and key_of([]) is None
    assert key_of([("x-api-key", b"\xff")]) is None
