"""The text in `serveConfigV2`: Serve's schema, our settings, and names that can be imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import yaml
from pydantic import ValidationError
from ray._common.utils import import_attr
from ray.serve.schema import ServeDeploySchema

from serve_app.builder import autoscaling
from serve_app.settings import PREFIX, ModelSettings, model_settings_from, settings_from
from serve_app.settings_errors import SettingsError
from tools.k8s.problems import Document, Problem, at

IMPORT_PATH = "serve_app.app:build"
MODEL_IMPORT_PATH = "serve_app.app:build_model"
INGRESS = "ingress"


def config_of(service: Document) -> Any:
    """Return what a RayService's `serveConfigV2` says."""
    return yaml.safe_load(service["spec"].get("serveConfigV2") or "")


def is_model(application: Document) -> bool:
    """Whether an application is one model beside a service, not a service."""
    return bool(application["import_path"] == MODEL_IMPORT_PATH)


def models_of(application: Document) -> tuple[ModelSettings, ...]:
    """Return the models that an application's `args` make, whatever the environment here.

    Raises:
        ValueError: they make none.
    """
    arguments = application.get("args") or {}
    if is_model(application):
        return (model_settings_from(arguments),)
    with _no_variables():
        return settings_from(arguments).models


def problems(service: Document) -> list[Problem]:
    """Return what Serve or the application refuses of a `serveConfigV2`, or ignores silently."""
    path = ["spec", "serveConfigV2"]
    try:
        config = config_of(service)
        schema = ServeDeploySchema.model_validate(config)
    except yaml.YAMLError as error:
        return [at(service, path, f"no YAML: {error}")]
    except ValidationError as error:
        return [at(service, [*path, *one["loc"]], one["msg"]) for one in error.errors()]
    found = [at(service, [*path, *where], "Serve knows no such option") for where in _unknown(config, _given(schema))]
    for index, name in enumerate(config.get("grpc_options", {}).get("grpc_servicer_functions", [])):
        found += _importable(service, [*path, "grpc_options", "grpc_servicer_functions", index], name)
    for index, application in enumerate(config.get("applications", [])):
        found += _application_problems(service, [*path, "applications", index], application)
    return found


def _application_problems(service: Document, path: list[str | int], application: Document) -> list[Problem]:
    found = _importable(service, [*path, "import_path"], application["import_path"])
    if application["import_path"] not in (IMPORT_PATH, MODEL_IMPORT_PATH):
        return found or [at(service, [*path, "import_path"], f"is neither {IMPORT_PATH} nor {MODEL_IMPORT_PATH}")]
    if is_model(application) and application.get("route_prefix", "/") is not None:
        found.append(at(service, [*path, "route_prefix"], "is not null, and calls would go to this application too"))
    try:
        models = models_of(application)
        for model in models:
            autoscaling(model, alone=is_model(application))
    except SettingsError as error:
        return [*found, *(at(service, [*path, "args", *keys], what) for keys, what in error.problems)]
    except ValueError as error:
        return [*found, at(service, [*path, "args"], str(error))]
    deployments = {model.deployment for model in models} | (set() if is_model(application) else {INGRESS})
    for index, deployment in enumerate(application.get("deployments", [])):
        if deployment["name"] not in deployments:
            message = f"there is no deployment {deployment['name']!r}, only {', '.join(sorted(deployments))}"
            found.append(at(service, [*path, "deployments", index, "name"], message))
    return found


def _importable(service: Document, path: list[str | int], name: str) -> list[Problem]:
    try:
        import_attr(name)
    except (ImportError, AttributeError, ValueError) as error:
        return [at(service, path, f"cannot be imported: {error}")]
    return []


def _given(schema: ServeDeploySchema) -> Any:
    return schema.model_dump(exclude_unset=True)


def _unknown(given: Any, known: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Serve's schema takes what it does not know, for later versions' sake, and forgets it."""
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            if key not in known:
                yield (*path, key)
            else:
                yield from _unknown(value, known[key], (*path, key))
    elif isinstance(given, list) and isinstance(known, list):
        for index, (one, other) in enumerate(zip(given, known, strict=True)):
            yield from _unknown(one, other, (*path, index))


@contextmanager
def _no_variables() -> Iterator[None]:
    others = {name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)}
    with mock.patch.dict(os.environ, others, clear=True):
        yield
