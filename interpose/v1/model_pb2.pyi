from interpose.v1 import value_pb2 as _value_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Parameter(_message.Message):
    __slots__ = ("name", "shape", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: _value_pb2.DType
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Union[_value_pb2.DType, str]] = ...) -> None: ...

class Module(_message.Message):
    __slots__ = ("path", "class_name", "parameters", "detail", "not_applied", "output_refused", "input_refused")
    PATH_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NOT_APPLIED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_REFUSED_FIELD_NUMBER: _ClassVar[int]
    INPUT_REFUSED_FIELD_NUMBER: _ClassVar[int]
    path: str
    class_name: str
    parameters: _containers.RepeatedCompositeFieldContainer[Parameter]
    detail: str
    not_applied: str
    output_refused: str
    input_refused: str
    def __init__(self, path: _Optional[str] = ..., class_name: _Optional[str] = ..., parameters: _Optional[_Iterable[_Union[Parameter, _Mapping]]] = ..., detail: _Optional[str] = ..., not_applied: _Optional[str] = ..., output_refused: _Optional[str] = ..., input_refused: _Optional[str] = ...) -> None: ...

class CanonicalValue(_message.Message):
    __slots__ = ("name", "shape", "refusal")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: str
    refusal: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[str] = ..., refusal: _Optional[str] = ...) -> None: ...

class CanonicalNode(_message.Message):
    __slots__ = ("path", "title", "values", "not_applied")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    NOT_APPLIED_FIELD_NUMBER: _ClassVar[int]
    path: str
    title: str
    values: _containers.RepeatedCompositeFieldContainer[CanonicalValue]
    not_applied: str
    def __init__(self, path: _Optional[str] = ..., title: _Optional[str] = ..., values: _Optional[_Iterable[_Union[CanonicalValue, _Mapping]]] = ..., not_applied: _Optional[str] = ...) -> None: ...

class ModelDescription(_message.Message):
    __slots__ = ("name", "class_name", "modules", "generation_config_json", "config_json", "max_model_len", "dtype", "tensor_parallel_size", "pipeline_parallel_size", "vocab_size", "engine_version", "execution_order", "sampling_parameters", "layers", "aliases", "digest", "max_prompt_tokens", "canonical", "adapters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_ORDER_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CANONICAL_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    class_name: str
    modules: _containers.RepeatedCompositeFieldContainer[Module]
    generation_config_json: str
    config_json: str
    max_model_len: int
    dtype: _value_pb2.DType
    tensor_parallel_size: int
    pipeline_parallel_size: int
    vocab_size: int
    engine_version: str
    execution_order: _containers.RepeatedScalarFieldContainer[str]
    sampling_parameters: _containers.RepeatedScalarFieldContainer[str]
    layers: int
    aliases: _containers.RepeatedScalarFieldContainer[str]
    digest: str
    max_prompt_tokens: int
    canonical: _containers.RepeatedCompositeFieldContainer[CanonicalNode]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., class_name: _Optional[str] = ..., modules: _Optional[_Iterable[_Union[Module, _Mapping]]] = ..., generation_config_json: _Optional[str] = ..., config_json: _Optional[str] = ..., max_model_len: _Optional[int] = ..., dtype: _Optional[_Union[_value_pb2.DType, str]] = ..., tensor_parallel_size: _Optional[int] = ..., pipeline_parallel_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., engine_version: _Optional[str] = ..., execution_order: _Optional[_Iterable[str]] = ..., sampling_parameters: _Optional[_Iterable[str]] = ..., layers: _Optional[int] = ..., aliases: _Optional[_Iterable[str]] = ..., digest: _Optional[str] = ..., max_prompt_tokens: _Optional[int] = ..., canonical: _Optional[_Iterable[_Union[CanonicalNode, _Mapping]]] = ..., adapters: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenizerFile(_message.Message):
    __slots__ = ("name", "size", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    digest: str
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...
