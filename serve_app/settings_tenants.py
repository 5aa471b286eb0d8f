"""The file of tenants, which the running service reads again when it changes."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from serve_app.settings import Tenant
from serve_app.settings_errors import explain
from serve_app.settings_file import SettingsFile
from serve_app.settings_model import Part

MOST_BYTES = 16 << 20


class _Listed(Part):
    tenants: tuple[Tenant, ...] = ()


def read_tenants(path: Path) -> tuple[Tenant, ...]:
    """Return the tenants of a YAML file, `tenants: [{name: …, api_keys: [{id: …, hash: …}]}]`.

    Raises:
        ValueError: the file cannot be read, is not such a file, or has a key itself instead of its hash.
    """
    if path.is_file() and path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES} bytes")
    file = SettingsFile(path)
    try:
        listed = _Listed(**file.values)
    except ValidationError as error:
        raise explain(error, _Listed, {}, file) from None
    for tenant in listed.tenants:
        if not tenant.api_keys:
            raise ValueError(f"{path}: tenant {tenant.name!r} has no key")
        if any(key.clear for key in tenant.api_keys):
            raise ValueError(
                f"{path}: tenant {tenant.name!r} has a key itself: write its hash, as `interpose keys new` and "
                "`interpose keys hash` print it"
            )
    return listed.tenants
