"""A field of a configuration about attention that nothing accounts for refuses the pattern, and names the field."""

from __future__ import annotations

import pytest

from executor.views.tripwire import unaccounted, why_no_pattern
from interpose.cli.demo_model import ARCHITECTURES, Shape

SHAPE = Shape(layers=2, hidden=128, context=256)


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_what_architectures_here_say_is_accounted_for(arch: str) -> None:
    assert unaccounted(ARCHITECTURES[arch](SHAPE).to_dict()) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_chunk_size", 8192),
        ("attn_temperature_tuning", True),
        ("attention_sink_size", 4),
        ("relative_attention_num_buckets", 32),
        ("attn_entropy_cap", 0.5),
        ("differential_attention", {"lambda": 0.8}),
        ("sparse_attention_blocks", [1, 2]),
        ("qk_bias_table", "learned"),
    ],
)
def test_a_field_that_nothing_accounts_for_is_named(field: str, value: object) -> None:
    config = ARCHITECTURES["llama"](SHAPE).to_dict() | {field: value}
    assert unaccounted(config) == [field]
    assert field in why_no_pattern(config) and "attn.rot_q" in why_no_pattern(config)


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}, "none"])
def test_a_field_that_is_off_changes_nothing(value: object) -> None:
    config = ARCHITECTURES["llama"](SHAPE).to_dict() | {"attention_chunk_size": value}
    assert why_no_pattern(config) == ""


def test_a_long_value_and_many_fields_stay_short() -> None:
    config: dict[str, object] = {f"attention_rule_{i}": "x" * 1000 for i in range(100)}
    assert len(why_no_pattern(config)) < 600
