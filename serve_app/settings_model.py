"""The settings of one served model: its weights, its engine, and the limits of its traces."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from executor.core import engine_names

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

# Engine arguments that the service sets itself.
_OURS = frozenset(
    {
        *("model", "tensor_parallel_size", "pipeline_parallel_size", "distributed_executor_backend"),
        *("worker_cls", "scheduler_cls", "additional_config"),
    }
)

# Options of vLLM's API server that change neither where it listens nor what it trusts.
OPENAI_OPTIONS = frozenset(
    {
        *("chat_template", "chat_template_content_format", "response_role", "default_chat_template_kwargs"),
        *("enable_auto_tool_choice", "tool_call_parser", "exclude_tools_when_tool_choice_none", "reasoning_parser"),
        *("return_tokens_as_token_ids", "enable_prompt_tokens_details", "enable_force_include_usage"),
    }
)

MIB = 1 << 20
GIB = 1 << 30


class Part(BaseModel):
    """A part of the settings, immutable once built.

    Unknown keys are errors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Limits(Part):
    """Limits of one trace; the client learns them when it connects, and refuses early."""

    max_message_bytes: int = Field(32 * MIB, ge=64 * 1024, le=GIB, description="bytes of one Submit message")
    max_upload_bytes: int = Field(2 * GIB, ge=0, description="bytes of one uploaded blob")
    max_saved_bytes: int = Field(8 * GIB, ge=0, description="bytes of all values that one trace saves")
    max_invokes: int = Field(512, ge=1)
    chunk_bytes: int = Field(MIB, ge=4096, le=32 * MIB, description="bytes of one message of Upload and Fetch")
    inline_bytes: int = Field(16 * 1024, ge=0, description="larger tensors travel as blobs")
    max_program_bytes: int = Field(
        64 * 1024, ge=1024, description="bytes of the source of one block, function or class"
    )
    max_program_nodes: int = Field(
        20_000, ge=100, description="nodes of the syntax tree of one block, function or class"
    )
    max_trace_program_bytes: int = Field(256 * 1024, ge=1024, description="bytes of all different sources of one trace")
    step_seconds: float = Field(10.0, gt=0, description="wall time a block may take in one step")
    block_memory_bytes: int = Field(4 * GIB, ge=MIB, description="memory that a block may allocate in one step")
    pickled: bool = Field(False, description="whether values may be pickled; also needs a tenant of full trust")


class ModelSettings(Part):
    """One served model: its weights, its number of workers, its engine arguments.

    Size: one field for each setting.
    """

    name: str = Field("", description="the model's name for clients; by default the last part of `model`")
    model: str = Field(min_length=1, description="a path or a Hugging Face id")
    tensor_parallel_size: int = Field(1, ge=1, description="ranks that share each layer")
    pipeline_parallel_size: int = Field(1, ge=1, description="stages that share the layers")
    device: Literal["auto", "cpu", "gpu"] = "auto"
    engine: dict[str, Any] = Field(default_factory=dict, description="further arguments of the engine, by vLLM's names")
    lora_modules: dict[str, str] = Field(
        default_factory=dict, description="LoRA adapters: each one's folder by the name that requests use"
    )
    openai: dict[str, Any] = Field(
        default_factory=dict,
        description="options of the OpenAI-compatible endpoint, by vLLM's names, e.g. `tool_call_parser`",
    )
    replicas: int = Field(1, ge=1, description="engines of this model, each with all its workers")
    autoscaling_config: dict[str, Any] | None = Field(
        None,
        description="Ray Serve's settings, by Serve's names, in place of `replicas`; a trace is one ongoing request",
    )
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK",
        description="where workers of a replica go: PACK on few nodes, SPREAD on many; STRICT_: on one node, or each on its own",
    )
    plans: bool = Field(
        True, description="whether the steps of a block's loop run as tensor programs where they can be such"
    )
    graphs: bool = Field(
        True,
        description="whether, on GPUs, these programs run inside captured CUDA graphs where they can; needs `plans`",
    )
    sandbox: Literal["auto", "on", "off"] = Field(
        "auto",
        description="whether blocks of tenants with trust `none` run in sandboxed processes, not in the workers; auto: if there "
        "are several tenants",
    )
    sandbox_plans: bool = Field(
        False,
        description="whether the loops of sandboxed blocks run in the workers as tensor programs, which the workers check; needs "
        "`plans`",
    )
    accepts: Literal["all", "sandboxed", "trusted"] = Field(
        "all",
        description="whose traces run: sandboxed: those of tenants with trust `none`; trusted: those of other tenants",
    )
    drain_seconds: float = Field(
        300.0, ge=0, description="a replica that is removed finishes its traces for this long, and takes no new ones"
    )
    max_running_traces: int = Field(256, ge=1, description="traces that run on one replica at a time")
    max_waiting_traces: int = Field(1024, ge=1, description="traces of one tenant that wait on one replica")
    limits: Limits = Limits()

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and not values.get("name") and isinstance(values.get("model"), str):
            return {**values, "name": values["model"].rstrip("/").rsplit("/", 1)[-1]}
        return values

    @field_validator("sandbox", mode="before")
    @classmethod
    def _as_yaml_writes_it(cls, sandbox: Any) -> Any:
        """Accept what YAML makes of `on` and `off`."""
        return {True: "on", False: "off"}.get(sandbox, sandbox) if isinstance(sandbox, bool) else sandbox

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"a model's name consists of letters, digits, '.', '_' and '-': {name!r} does not")
        return name

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _as_vllm_writes_them(cls, modules: Any) -> Any:
        """Accept an adapter as vLLM's options write it.

        An adapter is `name=path` or `{"name": …, "path": …}`, also as JSON, alone or in a list.
        """
        if isinstance(modules, str) or (isinstance(modules, Mapping) and modules.keys() >= {"name", "path"}):
            modules = [modules]
        if not isinstance(modules, list | tuple):
            return modules
        found: dict[str, Any] = {}
        for one in modules:
            if isinstance(one, str) and one.lstrip().startswith("{"):
                one = json.loads(one)
            if isinstance(one, str):
                name, equals, path = one.partition("=")
                one = {"name": name, "path": path if equals else None}
            if not isinstance(one, Mapping) or not (
                isinstance(one.get("name"), str) and isinstance(one.get("path"), str)
            ):
                raise ValueError(f"an adapter is given as name=path, not {one!r}")
            if one["name"] in found:
                raise ValueError(f"two adapters with the name {one['name']!r}")
            found[one["name"]] = one["path"]
        return found

    @field_validator("lora_modules")
    @classmethod
    def _plain_names(cls, modules: dict[str, str]) -> dict[str, str]:
        for name in modules:
            if not _NAME.fullmatch(name):
                raise ValueError(f"an adapter's name consists of letters, digits, '.', '_' and '-': {name!r} does not")
        return modules

    @field_validator("engine")
    @classmethod
    def _not_ours(cls, engine: dict[str, Any]) -> dict[str, Any]:
        known = engine_names.arguments()
        for name in engine:
            if name in _OURS:
                raise PydanticCustomError(
                    "engine_argument", "{name} is set by the service itself: leave it out here", {"name": name}
                )
            if known and name not in known:
                hint = engine_names.near(str(name), known)
                raise PydanticCustomError(
                    "engine_argument", "the engine has no such argument{hint}", {"name": name, "hint": hint}
                )
        guessing = engine.get("speculative_config")
        if guessing is not None and not (isinstance(guessing, dict) and guessing.keys() & {"method", "model"}):
            raise PydanticCustomError(
                "engine_argument",
                'speculative_config names a method; traces run beside the method "ngram"',
                {"name": "speculative_config"},
            )
        return engine

    @field_validator("openai")
    @classmethod
    def _known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(options.keys() - OPENAI_OPTIONS)
        if unknown:
            raise ValueError(f"the endpoint has no {', '.join(unknown)}; it has {', '.join(sorted(OPENAI_OPTIONS))}")
        return options

    @model_validator(mode="after")
    def _one_count(self) -> ModelSettings:
        if self.autoscaling_config is None:
            return self
        if "replicas" in self.model_fields_set:
            raise ValueError("give either `replicas` or `autoscaling_config`")
        return self

    @property
    def most_replicas(self) -> int:
        """The largest number of replicas at a time."""
        if self.autoscaling_config is None:
            return self.replicas
        return int(self.autoscaling_config.get("max_replicas", 1))

    @property
    def scales_to_zero(self) -> bool:
        """Whether the model has no engine while nobody uses it."""
        return self.autoscaling_config is not None and int(self.autoscaling_config.get("min_replicas", 1)) == 0

    @property
    def world_size(self) -> int:
        """Number of workers of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def deployment(self) -> str:
        """Name of the Serve deployment that holds the engine."""
        return f"engine-{self.name}"
