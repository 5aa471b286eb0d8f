"""Settings: what overrides what, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from serve_app.key_hashes import hashed
from serve_app.settings import ANONYMOUS, Quotas, Tenant, settings_from

HASH, OTHER = str(hashed("a-key-of-a-tenant")), str(hashed("another-key"))


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.upper().startswith("INTERPOSE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "service.yaml"
    path.write_text(
        """
models:
  - model: /models/tiny-llama
    tensor_parallel_size: 2
    engine: {max_model_len: 512}
grpc: {port: 9001}
sessions: {warm: 3}
"""
    )
    return path


def test_a_model_alone_is_enough() -> None:
    settings = settings_from({"model": "/models/tiny-llama/"})
    [model] = settings.models
    assert model.name == "tiny-llama"
    assert model.deployment == "engine-tiny-llama"
    assert settings.grpc.host == "127.0.0.1"


def test_the_file_is_read(file: Path) -> None:
    settings = settings_from({"config_file": str(file)})
    assert settings.models[0].engine == {"max_model_len": 512}
    assert settings.grpc.port == 9001
    assert settings.sessions.warm == 3


def test_environment_overrides_the_file_and_flags_override_both(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERPOSE_GRPC__PORT", "9002")
    monkeypatch.setenv("INTERPOSE_SESSIONS__IDLE_SECONDS", "30")
    settings = settings_from({"config_file": str(file)})
    assert settings.grpc.port == 9002
    assert settings.sessions.idle_seconds == 30
    assert settings.sessions.warm == 3
    assert settings_from({"config_file": str(file), "grpc": {"port": 9003}}).grpc.port == 9003


def test_the_environment_can_name_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERPOSE_CONFIG_FILE", str(file))
    assert settings_from({}).grpc.port == 9001


def test_a_file_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="no configuration file"):
        settings_from({"config_file": "/nowhere/service.yaml"})


@pytest.mark.parametrize(
    ("line", "where", "near"),
    [
        ("grcp: {port: 1}", "2: grcp", "grpc"),
        ("grpc: {prot: 9001}", "2: grpc.prot", "port"),
        (
            "models: [{model: x, tensor_paralel_size: 2}]",
            "1: models[0].tensor_paralel_size",
            "tensor_parallel_size or pipeline_parallel_size",
        ),
        ("models: [{model: x, limits: {max_inovkes: 2}}]", "1: models[0].limits.max_inovkes", "max_invokes"),
    ],
)
def test_unknown_keys_of_the_file_are_errors(tmp_path: Path, line: str, where: str, near: str) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(line if line.startswith("models") else f"models: [{{model: x}}]\n{line}")
    with pytest.raises(ValueError) as caught:
        settings_from({"config_file": str(path)})
    assert str(caught.value) == f"{path}:{where}: there is no such setting; did you mean {near}?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "models:\n- model: x\n  limits:\n    max_invokes: many\n",
            "4: models[0].limits.max_invokes: Input should be a",
        ),
        ("models:\n- model: x\ngrpc:\n  port: 70000\n", "4: grpc.port: Input should be less than or equal to 65535"),
        ("models:\n- model: x\n- tensor_parallel_size: 2\n", "3: models[1].model: Field required"),
        (
            "models:\n- model: x\n  engine:\n    dtype: half\n    max_modle_len: 3\n",
            "5: models[0].engine.max_modle_len: ",
        ),
        (
            "models:\n- model: x\n  engine: {worker_cls: a}\n",
            "3: models[0].engine.worker_cls: worker_cls is set by the service",
        ),
        ("models:\n- model: x\n  engine: {speculative_config: {}}\n", "3: models[0].engine.speculative_config: "),
        ("models: [{model: x}\ngrpc: 3\n", "2:1: this is no YAML: "),
        ("models:\n\t- model: x\n", "2:1: this is no YAML: found character"),
        ("- model: x\n", "1: settings have the form `name: value`"),
        ("grpc: {port: 1}\nmodels: []\ngrpc: {port: 2}\n", "3: grpc is there twice, in line 1 before"),
    ],
)
def test_what_is_wrong_in_the_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}:{message}")):
        settings_from({"config_file": str(path)})


def test_an_unknown_argument_of_the_engine_comes_with_near_misses() -> None:
    with pytest.raises(ValueError, match=r"engine\.max_modle_len: .*did you mean max_model_len\?"):
        settings_from({"model": "x", "engine": {"max_modle_len": 3}})


def test_an_error_is_told_from_where_it_was_set(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^grpc\.port: .*; it is 'no'$"):
        settings_from({"config_file": str(file), "grpc": {"port": "no"}})
    monkeypatch.setenv("INTERPOSE_GRPC__PORT", "none")
    with pytest.raises(ValueError, match=r"^INTERPOSE_GRPC__PORT: .*; it is 'none'$"):
        settings_from({"config_file": str(file)})


def test_keys_of_tenants_are_not_repeated() -> None:
    with pytest.raises(ValueError) as caught:
        settings_from({"model": "x", "tenants": [{"name": "red", "api_keys": "red-secret"}]})
    assert "tenants[0].api_keys" in str(caught.value) and "secret" not in str(caught.value)


def test_unknown_variables_are_errors_with_the_near_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERPOSE_GRCP__PORT", "1")
    with pytest.raises(ValueError, match=r"INTERPOSE_GRCP__PORT"):
        settings_from({"model": "x"})
    monkeypatch.delenv("INTERPOSE_GRCP__PORT")
    monkeypatch.setenv("INTERPOSE_SESSION", "1")
    with pytest.raises(ValueError, match=r"did you mean INTERPOSE_SESSIONS\?"):
        settings_from({"model": "x"})


def test_the_clients_variables_are_not_the_servers_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERPOSE_ADDRESS", "localhost:9000")
    monkeypatch.setenv("INTERPOSE_API_KEY", "k")
    settings_from({"model": "x"})


@pytest.mark.parametrize(
    "fields",
    [
        {"models": []},
        {"models": [{"model": "a/x"}, {"model": "b/x"}]},
        {"models": [{"model": "x", "name": "not a name"}]},
        {"models": [{"model": "x", "engine": {"worker_cls": "mine"}}]},
        {"models": [{"model": "x"}], "tenants": [{"name": "a"}, {"name": "b", "api_key": "12345678"}]},
        {"models": [{"model": "x"}], "tenants": [{"name": "a", "api_key": "short"}]},
        {
            "models": [{"model": "x"}],
            "tenants": [{"name": "a", "api_key": "12345678"}, {"name": "b", "api_key": "12345678"}],
        },
        {"model": "x", "models": [{"model": "y"}]},
        {"model": "x", "tenants": [{"name": "a", "operator": True}]},
        {"model": "x", "tenants": [{"name": "a", "api_keys": [{"id": "k"}]}]},
        {"model": "x", "tenants": [{"name": "a", "api_keys": [{"id": "k", "hash": "12345678"}]}]},
        {"model": "x", "tenants": [{"name": "a", "api_keys": [{"id": "k_", "hash": HASH}]}]},
        {"model": "x", "tenants": [{"name": "a", "api_keys": [{"hash": HASH, "clear": True}]}]},
        {"model": "x", "tenants": [{"name": "a", "api_keys": [HASH]}, {"name": "b", "api_keys": [HASH]}]},
        {"model": "x", "tenants": [{"name": "a", "api_keys": [{"id": "k", "hash": HASH}, {"id": "k", "hash": OTHER}]}]},
        {"model": "x", "tenants": [{"name": "a", "api_keys": [HASH.replace("$1$", "$1000000$")]}]},
    ],
)
def test_contradictions_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        settings_from(fields)


def test_the_only_model_needs_no_name() -> None:
    assert settings_from({"model": "x"}).model_named("").name == "x"
    two = settings_from({"models": [{"model": "x"}, {"model": "y"}]})
    assert two.model_named("") is None
    assert two.model_named("y").name == "y"
    assert two.model_named("z") is None


@pytest.mark.parametrize(
    "modules",
    [
        {"calm": "/a", "formal": "/b"},
        ["calm=/a", "formal=/b"],
        ["calm=/a", '{"name": "formal", "path": "/b", "base_model_name": "x"}'],
        [{"name": "calm", "path": "/a"}, {"name": "formal", "path": "/b"}],
    ],
)
def test_adapters_are_given_as_vllm_takes_them(modules: object) -> None:
    [model] = settings_from({"model": "m", "lora_modules": modules}).models
    assert model.lora_modules == {"calm": "/a", "formal": "/b"}


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (["calm"], "name=path"),
        (["calm=/a", "calm=/b"], "two adapters with the name"),
        (["a/b=/a"], "letters, digits"),
        ([3], "name=path"),
        ([{"name": "calm"}], "name=path"),
        (['{"name"'], "delimiter"),
    ],
)
def test_adapters_that_are_none(modules: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings_from({"model": "m", "lora_modules": modules})


def tenants(*quotas: dict[str, object], **more: object) -> dict[str, object]:
    """Arguments of a service with a tenant for each of some quotas."""
    names = "abcdefgh"
    listed = [
        {"name": name, "api_key": f"key-of-{name}", "quotas": own} for name, own in zip(names, quotas, strict=False)
    ]
    return {"model": "/models/tiny", "tenants": listed, **more}


def test_a_tenant_has_the_quotas_of_the_service_where_it_has_none_of_its_own() -> None:
    settings = settings_from(
        tenants({"tokens_per_minute": 10, "weight": 4}, {}, quotas={"tokens_per_minute": 100, "running_traces": 3})
    )
    first, second = (settings.quotas_of(tenant) for tenant in settings.tenants)
    assert (first.tokens_per_minute, first.running_traces, first.weight) == (10, 3, 4.0)
    assert (second.tokens_per_minute, second.running_traces, second.weight) == (100, 3, 1.0)
    allowances = settings.allowances
    assert allowances.of("a").weight == 4.0 and allowances.of("a").tokens_per_minute == 10
    assert allowances.of("unknown").tokens_per_minute == 100


def test_sessions_are_reserved_for_each_of_several_tenants() -> None:
    assert settings_from({"model": "/m/x"}).allowances.of("anonymous").reserved_sessions == 0
    several = settings_from(tenants({}, {"sessions": 4}, {"reserved_sessions": 0}))
    assert [several.allowances.of(name).reserved_sessions for name in "abc"] == [16, 4, 0]
    few = settings_from(tenants({}, {}, {}, sessions={"max_sessions": 12}))
    assert [few.allowances.of(name).reserved_sessions for name in "abc"] == [2, 2, 2]


def test_reserves_of_tenants_that_come_later_fit() -> None:
    settings = settings_from(tenants({"reserved_sessions": 8}, sessions={"max_sessions": 10}))
    more = tuple(Tenant(name=name, quotas=Quotas(reserved_sessions=6)) for name in ("x", "y"))
    later = settings.model_copy(update={"tenants": (*settings.tenants, *more)}).allowances.tenants
    assert {name: one.reserved_sessions for name, one in later.items()} == {"a": 4, "x": 3, "y": 3}


def test_the_share_of_an_engine() -> None:
    settings = settings_from(tenants({"kv_share": 0.5}, {}, tenant_share=0.6))
    assert [settings.share_of(tenant) for tenant in settings.tenants] == [0.5, 0.6]
    assert settings_from({"model": "/m/x"}).share_of(ANONYMOUS) == 1.0
    assert settings_from({"model": "/m/x", "quotas": {"kv_share": 0.5}}).share_of(ANONYMOUS) == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (tenants({"waiting_traces": 3}), "quotas.waiting_traces needs quotas.running_traces"),
        (tenants({"reserved_sessions": 3, "sessions": 2}), "reserved_sessions is more than"),
        (tenants({"reserved_sessions": 8}, {"reserved_sessions": 8}, sessions={"max_sessions": 15}), "16 together"),
        (tenants({"weight": 0}), "greater than 0"),
        (tenants({"tokens_per_hour": 3}), "tokens_per_hour"),
    ],
)
def test_quotas_that_cannot_be(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_from(arguments)


def test_the_example_of_the_page_is_taken() -> None:
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    example = page.split("## Quotas")[1].split("```yaml")[1].split("```")[0]
    settings = settings_from({"model": "/models/tiny", **yaml.safe_load(example)})
    course, lab = (settings.quotas_of(tenant) for tenant in settings.tenants)
    assert (course.tokens_per_minute, course.running_traces, course.waiting_traces) == (200_000, 16, 500)
    assert (lab.weight, lab.running_traces, settings.allowances.of("lab").reserved_sessions) == (4.0, 64, 32)


def test_the_page_names_every_quota() -> None:
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text().split("## Quotas")[1].split("\n## ")[0]
    assert {row.split("`")[1] for row in page.splitlines() if row.startswith("| `")} == set(Quotas.model_fields)
