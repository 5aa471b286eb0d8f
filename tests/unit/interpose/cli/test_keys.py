"""`interpose keys`: a key and its hash belong together."""

from __future__ import annotations

import io

import pytest
import yaml

from interpose.cli import main
from serve_app.settings import Tenant
from serve_app.tenants.keys import KeyTable


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_new_key_fits_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    keys = []
    for arguments in (["--id", "laptop", "--days", "30"], ["--id", "cluster"], []):
        assert main(["keys", "new", *arguments]) == 0
        key, settings = printed(capsys)
        keys.append((key, yaml.safe_load(settings)))
    tenant = Tenant.model_validate({"name": "red", "api_keys": [given for _, given in keys]})
    table = KeyTable([tenant])
    for key, given in keys:
        known = table.find(key)
        assert known is not None and known.key is not None and known.key.id == given.get("id", "")
        assert len(key) >= 46 and table.find(key[:-1]) is None
    assert [key.expires is not None for key in tenant.api_keys] == [True, False, False]


def test_a_key_that_there_is_already_is_hashed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("ip_laptop_0123456789", "a-key-of-before"):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{key}\n"))
        assert main(["keys", "hash"]) == 0
        [settings] = printed(capsys)
        assert key not in settings
        tenant = Tenant.model_validate({"name": "red", "api_keys": [yaml.safe_load(settings)]})
        assert KeyTable([tenant]).find(key) is not None


@pytest.mark.parametrize("arguments", [["new", "--id", "a_b"], ["new", "--days", "0"], ["hash"]])
def test_what_makes_no_key(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))
    assert main(["keys", *arguments]) == 2
    assert capsys.readouterr().err.startswith("interpose keys: ")


def test_a_service_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "list", "--address", "127.0.0.1:1"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
