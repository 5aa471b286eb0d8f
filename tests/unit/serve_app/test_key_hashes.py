"""Keys and their hashes: the format, and what is no hash."""

from __future__ import annotations

import pytest

from serve_app.key_hashes import KeyHash, NoHash, digest_of, hashed, id_in, new_key


def test_a_hash_is_written_as_passlib_writes_it() -> None:
    """The hash is of passlib's documentation."""
    rounds, salt, hash_ = "29000", "N2YMIWQsBWBMae09x1jrPQ", "1t8iyB2A.WF/Z5JZv.lfCIhXXN33N23OSgQYThBYRfk"
    made = hashed("toomanysecrets", KeyHash.parse(f"$pbkdf2-sha256$1${salt}${hash_}").salt, int(rounds))
    assert str(made) == f"$pbkdf2-sha256${rounds}${salt}${hash_}"


def test_a_hash_is_salted_and_read_back() -> None:
    first, second = hashed("a-key-of-a-tenant"), hashed("a-key-of-a-tenant")
    assert first.digest != second.digest and "a-key" not in str(first)
    assert KeyHash.parse(str(first)) == first
    assert digest_of("a-key-of-a-tenant", first.salt, first.rounds) == first.digest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a-key",
        "$pbkdf2-sha256$1$c2FsdHNhbHQ",
        "$pbkdf2-sha256$1$c2FsdHNhbHQ$c2hvcnQ",
        "$pbkdf2-sha256$x$c2FsdHNhbHQ$" + "A" * 43,
        "$pbkdf2-sha256$0$c2FsdHNhbHQ$" + "A" * 43,
        "$pbkdf2-sha256$29000$c2FsdHNhbHQ$" + "A" * 43,
        "$pbkdf2-sha256$1$YQ$" + "A" * 43,
        "$pbkdf2-sha256$1$c2FsdHN(bHQ$" + "A" * 43,
        "$scrypt$1$c2FsdHNhbHQ$" + "A" * 43,
        "$pbkdf2-sha256$1$" + "A" * 400 + "$" + "A" * 43,
    ],
)
def test_what_is_no_hash(text: str) -> None:
    with pytest.raises(NoHash):
        KeyHash.parse(text)


def test_keys_are_long_and_name_themselves() -> None:
    keys = {new_key("laptop") for _ in range(20)} | {new_key() for _ in range(20)}
    assert len(keys) == 40 and all(len(key) >= 43 for key in keys)
    assert id_in(new_key("my.laptop-2")) == "my.laptop-2"
    for other in ("", "ip_", "ip_a", "xx_a_b", "ip_a b_c", "ip__b", "a-key-of-a-tenant"):
        assert id_in(other) == ""
    with pytest.raises(ValueError, match="an id"):
        new_key("a_b")
