"""What docs/kubernetes.md, the image and docker-compose.yml say fits together, as far as that shows without a cluster.

What needs kubectl to be seen is in tests/k8s.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from serve_app.builder import autoscaling
from serve_app.key_hashes import hashed
from serve_app.settings import settings_from
from tools.k8s import render, serve_config
from tools.k8s.serve_config import models_of

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "kubernetes.md").read_text()
SERVING = (ROOT / "docs" / "serving.md").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OVERLAY = yaml.safe_load((ROOT / "k8s" / "overlays" / "cpu-dev" / "serve.yaml").read_text())

Document = dict[str, Any]


# docs/kubernetes.md


def test_the_documents_other_commands() -> None:
    inline = re.findall(r"`((?:kubectl|docker) [^`]+)`", DOCUMENT + SERVING)
    assert inline
    services = {"interpose-serve-svc"}  # KubeRay's name for the Service of the RayService `interpose`
    for command in map(shlex.split, inline):
        if command[:2] == ["docker", "build"]:
            assert f" AS {command[command.index('--target') + 1]}\n" in DOCKERFILE
        elif command[:2] == ["docker", "compose"]:
            profiles = [command[i + 1] for i, word in enumerate(command) if word == "--profile"]
            assert set(profiles) <= {"cpu", "gpu"} and {"up", "down", "restart"} & set(command)
        elif command[0] == "docker":
            assert command[1:] in (["kill"], ["stop"])
        elif "port-forward" in command:
            assert command[-2] in {f"service/{name}" for name in services} and command[-1] == "9000:9000"
        else:
            assert command[:3] == ["kubectl", "apply", "-k"], command


# docs/serving.md


def serving_examples() -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```$", SERVING, flags=re.DOTALL | re.MULTILINE)


def example(words: str) -> str:
    """The first example with these words."""
    return next(text for text in serving_examples() if words in text)


def test_the_document_and_the_overlay_show_one_configuration() -> None:
    """So that what starts the one proves the other: tests/cluster/test_joined_cluster.py and test_partition.py."""
    text = serving_examples()[0]
    document, overlay = yaml.safe_load(text), yaml.safe_load(OVERLAY["spec"]["serveConfigV2"])
    # On a cluster every pod has a proxy, which others reach; on one machine nobody else may.
    assert (document.pop("proxy_location"), overlay.pop("proxy_location")) == ("HeadOnly", "EveryNode")
    assert (document["http_options"].pop("host"), overlay["http_options"].pop("host")) == ("127.0.0.1", "0.0.0.0")
    assert overlay["applications"][0].pop("deployments")[0]["name"] == "ingress"
    models = [one["applications"][0]["args"]["models"][0] for one in (document, overlay)]
    assert [model.pop("model") for model in models] == [".demo/tiny-llama", "/models/tiny-llama"]
    assert document == overlay


def test_the_documents_further_models_can_be_deployed() -> None:
    """What is shown as added to the file is taken by Serve and by the settings, and changes nothing of what was there."""
    service, replicas, more = map(yaml.safe_load, map(example, ("grpc_options:", "autoscaling_config:", "build_model")))
    (model,) = settings_from({"models": [service["applications"][0]["args"]["models"][0] | replicas]}).models
    assert autoscaling(model) is not None and model.most_replicas > 1
    service["applications"] += more["applications"]
    ServeDeploySchema.model_validate(service)
    names = [model.name for application in service["applications"] for model in models_of(application)]
    assert len(set(names)) == len(names) == 2
    document = {"kind": "RayService", "metadata": {"name": "x"}, "spec": {"serveConfigV2": yaml.safe_dump(service)}}
    assert serve_config.problems(document) == []


def test_the_documents_tenants_and_certificates_are_settings() -> None:
    tenants, tls = example("tenants_file:"), example("tls:")
    tenants = re.sub(r"\$pbkdf2-sha256\$1\$…\$…", lambda _: str(hashed("a key")), tenants)
    settings = settings_from({"model": "x", **yaml.safe_load(tenants), **yaml.safe_load(tls)})
    assert [len(tenant.api_keys) for tenant in settings.tenants] == [2, 1] and settings.tenants[1].operator
    assert settings.tenants[0].api_keys[0].expires is not None
    assert not settings.warning  # blocks of tenants run in sandboxes, and the keys are hashes
    assert settings.grpc.tls is not None and settings.grpc.tls.client_ca


# Dockerfile


def instructions(name: str) -> list[str]:
    joined = re.sub(r"\\\n(\s*#.*\n)*", "", DOCKERFILE)
    return re.findall(rf"^{name} (.*)$", joined, re.MULTILINE)


def test_the_image_is_made_in_stages_and_nobody_special_runs_it() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    names = [name for _, name in stages]
    assert {"cpu", "gpu"} <= set(names)
    for position, (origin, _) in enumerate(stages):
        assert origin in names[:position] or origin.startswith("python:")
    for target in ("cpu", "gpu"):
        body = DOCKERFILE.split(f" AS {target}\n")[1].split("\nFROM ")[0]
        assert re.search(r"^USER 1000:1000$", body, re.MULTILINE)
        assert not re.search(r"^RUN ", body, re.MULTILINE)
        assert set(re.findall(r"--from=(\S+)", body)) == {f"build-{target}"}


def test_the_image_for_cpus_compiles_nothing_and_its_model_can_be_read() -> None:
    """No compiler is there, so torch's is off; and weights are written for their owner alone, who is root in a build."""
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)$(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL))
    assert re.search(r"^ENV TORCH_COMPILE_DISABLE=1$", stages["cpu"], re.MULTILINE)
    assert "g++" in stages["compiling"] and "g++" not in stages["runtime"] + stages["cpu"]
    assert "demo-model /models/tiny-llama && chmod -R a+rX /models" in stages["build-cpu"]


def is_sent(path: str) -> bool:
    """Whether Docker sends a file to the build: the last pattern that matches it, or a folder it is in, decides."""
    sent = True
    parts = Path(path).parts
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        names = parts if pattern.startswith("**/") else ["/".join(parts[: i + 1]) for i in range(len(parts))]
        if not line.startswith("#") and any(fnmatch(name, pattern.removeprefix("**/")) for name in names):
            sent = line.startswith("!")
    return sent


def test_the_image_has_what_its_commands_need() -> None:
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {extra for line in instructions("RUN") for extra in re.findall(r"'\.\[(\w+)\]'", line)} == {"cpu", "gpu"}
    assert {"cpu", "gpu"} <= set(extras)
    python = re.findall(r"^ARG PYTHON=(\S+)$", DOCKERFILE, re.MULTILINE)[0]
    assert f"Python :: {python}" in (ROOT / "pyproject.toml").read_text()
    (check,) = instructions("HEALTHCHECK")
    assert "wget" in check and "wget" in instructions("RUN")[0] and "52365" in check
    # What is copied is not ignored: what runs, and what it is installed from.
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    sent = {path for path in tracked if is_sent(path)}
    assert not is_sent("interpose/__pycache__/model.pyc")
    packages = {"actors", "examples", "executor", "interpose", "serve_app"}
    assert {path.split("/")[0] for path in sent} == packages | {"pyproject.toml", "README.md", "LICENSE"}
    assert {path for path in tracked if path.split("/")[0] in packages} <= sent
    assert not {".env", "docker-compose.yml", "Dockerfile"} & sent


def test_nothing_secret_is_in_the_image_or_the_files() -> None:
    assert not re.search(r"(?i)^(ARG|ENV).*(token|secret|password|api_key)", DOCKERFILE, re.MULTILINE)
    for service in COMPOSE["services"].values():
        for name, value in service.get("environment", {}).items():
            assert not re.search("TOKEN$|PASSWORD|SECRET|TENANTS|KEY", name) or value is None, name
    assert (ROOT / ".env").read_text().splitlines()[1:] == ["COMPOSE_PROFILES=cpu"]


# docker-compose.yml


def services(profile: str) -> dict[str, Document]:
    return {name: service for name, service in COMPOSE["services"].items() if profile in service["profiles"]}


def shell_lines(service: Document) -> list[list[str]]:
    """The commands of a service, one by one."""
    program, *rest = service["command"]
    if program not in ("bash", "sh"):
        return [service["command"]]
    return [shlex.split(line) for line in rest[-1].splitlines()]


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_head_and_two_workers_on_one_private_network(profile: str) -> None:
    nodes = {name: service for name, service in services(profile).items() if name != "token"}
    heads = [service for name, service in nodes.items() if name.startswith("head")]
    workers = [service for name, service in nodes.items() if name.startswith("worker")]
    assert len(heads) == 1 and len(workers) == 2 and len(nodes) == 3
    assert list(COMPOSE["networks"]) == ["ray", "monitoring"] and all(
        set(node["networks"]) == {"ray"} for node in nodes.values()
    )
    assert COMPOSE["services"]["token"]["network_mode"] == "none"
    # Clients on this machine only; nothing else is published.
    assert [port for node in nodes.values() for port in node.get("ports", [])] == ["127.0.0.1:${PORT:-9000}:9000"]
    assert "ports" in heads[0] and all("deploy" in worker for worker in workers) == (profile == "gpu")
    for node in nodes.values():
        assert node["image"] == f"interpose:{profile}" and node["build"]["target"] == profile
        assert node["read_only"] is True and "/tmp" in node["volumes"] and node["environment"]["HOME"] == "/tmp"
        assert node["cap_drop"] == ["ALL"] and node["environment"]["RAY_AUTH_MODE"] == "token"
        assert node["depends_on"] == {"token": {"condition": "service_completed_successfully"}}
        (token,) = [volume for volume in node["volumes"] if volume.startswith("token:")]
        assert node["environment"]["RAY_AUTH_TOKEN_PATH"].startswith(token.split(":")[1]) and token.endswith(":ro")


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_each_worker_takes_one_rank_and_the_head_none(profile: str) -> None:
    device = f"--num-{profile}s"
    counts = []
    for name, service in services(profile).items():
        for line in shell_lines(service):
            if line[:2] == ["ray", "start"]:
                options = dict(word.split("=") for word in line[2:] if "=" in word)
                counts.append((name.split("-")[0], options.get(device)))
                assert ("--head" in line) != (options.get("--address") == "head:6379")
    assert sorted(counts) == [("head", "0"), ("worker", "1"), ("worker", "1")]


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_what_it_serves_are_settings_for_two_workers(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (head,) = [service for name, service in services(profile).items() if name.startswith("head")]
    (line,) = [line for line in shell_lines(head) if line[:2] == ["exec", "interpose"]]
    for name, value in head["environment"].items():
        if name.startswith("INTERPOSE_") and value is not None:
            monkeypatch.setenv(name, re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value))
    from interpose.cli import serve

    parser = _serve_parser(serve)
    arguments, rest = parser.parse_known_args(line[2:])
    settings = settings_from(serve._arguments(arguments, {}))
    assert settings.grpc.host == "0.0.0.0"  # published by Docker, on the loopback interface
    (model,) = settings.models
    assert model.world_size == 2 and model.model.startswith("/models/")
    assert (model.device == "gpu") == (profile == "gpu")
    assert rest == (["--dtype", "float32", "--enforce-eager"] if profile == "cpu" else [])


def test_the_file_for_tls_adds_to_the_heads_and_to_nothing_else() -> None:
    added = yaml.safe_load((ROOT / "docker-compose.tls.yml").read_text())["services"]
    heads = [name for name, service in COMPOSE["services"].items() if "healthcheck" in service]
    assert sorted(added) == sorted(heads)
    for name, service in added.items():
        assert set(service) == {"environment", "volumes", "healthcheck"}
        assert not service["environment"].keys() & COMPOSE["services"][name]["environment"].keys()
        assert all(volume.endswith(":ro") for volume in service["volumes"])
        # What the check waits for is as without TLS.
        assert service["healthcheck"].keys() <= COMPOSE["services"][name]["healthcheck"].keys()
    assert "docker-compose.tls.yml" in SERVING


def _serve_parser(serve: Any) -> Any:
    from interpose.cli.parsing import Parser

    top = Parser()
    serve.add_parser(top.add_subparsers())
    return top


def test_ray_knows_its_options() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "start", "--help"], capture_output=True, text=True, check=True
    ).stdout
    commands = [service for service in COMPOSE["services"].values() if "command" in service]
    lines = [line for service in commands for line in shell_lines(service)]
    options = {word.split("=")[0] for line in lines if line[:2] == ["ray", "start"] for word in line[2:]}
    cluster = render.render(render.FOLDER / "overlays" / "gpu")
    (service,) = [document for document in cluster if document["kind"] == "RayService"]
    options |= {f"--{name}" for name in service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]}
    assert {"--head", "--address", "--num-gpus", "--dashboard-host"} <= options
    assert [option for option in options if not re.search(rf"{option}\b", shown)] == []


def test_the_token_is_made_once(tmp_path: Path) -> None:
    """The script of the service `token`, in a folder here and without the change of owner that only root may make."""
    script = COMPOSE["services"]["token"]["command"][-1].replace("/run/interpose", str(tmp_path))
    script = script.replace("chown 1000:1000", "true")
    tokens = set()
    for _ in range(2):
        subprocess.run(["sh", "-ec", script], check=True)
        tokens.add((tmp_path / "token").read_text())
        assert (tmp_path / "token").stat().st_mode & 0o77 == 0
    (token,) = tokens
    assert re.fullmatch("[0-9a-f]{64}", token)


def test_the_heads_check_is_python_and_asks_for_health() -> None:
    for name in ("head", "head-gpu"):
        kind, program, flag, source = COMPOSE["services"][name]["healthcheck"]["test"]
        assert (kind, program, flag) == ("CMD", "python", "-c")
        failed = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
        assert failed.returncode == 1 and "StatusCode.UNAVAILABLE" in failed.stderr  # nobody serves here
