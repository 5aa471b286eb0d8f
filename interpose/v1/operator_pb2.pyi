from interpose.v1 import service_pb2 as _service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListTracesRequest(_message.Message):
    __slots__ = ("tenant", "model", "most")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    most: int
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., most: _Optional[int] = ...) -> None: ...

class TraceRow(_message.Message):
    __slots__ = ("key", "tenant", "method", "status", "followed")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_FIELD_NUMBER: _ClassVar[int]
    key: str
    tenant: str
    method: str
    status: _service_pb2.JobStatus
    followed: bool
    def __init__(self, key: _Optional[str] = ..., tenant: _Optional[str] = ..., method: _Optional[str] = ..., status: _Optional[_Union[_service_pb2.JobStatus, _Mapping]] = ..., followed: bool = ...) -> None: ...

class ListTracesReply(_message.Message):
    __slots__ = ("traces", "total")
    TRACES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    traces: _containers.RepeatedCompositeFieldContainer[TraceRow]
    total: int
    def __init__(self, traces: _Optional[_Iterable[_Union[TraceRow, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class CancelTraceRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class CancelTraceReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("model", "replica", "end")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    model: str
    replica: str
    end: bool
    def __init__(self, model: _Optional[str] = ..., replica: _Optional[str] = ..., end: bool = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("draining", "running")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    draining: _containers.RepeatedScalarFieldContainer[str]
    running: int
    def __init__(self, draining: _Optional[_Iterable[str]] = ..., running: _Optional[int] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TenantRow(_message.Message):
    __slots__ = ("use", "trust", "operator", "keys")
    USE_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    use: _service_pb2.TenantStatus
    trust: str
    operator: bool
    keys: int
    def __init__(self, use: _Optional[_Union[_service_pb2.TenantStatus, _Mapping]] = ..., trust: _Optional[str] = ..., operator: bool = ..., keys: _Optional[int] = ...) -> None: ...

class ListTenantsReply(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantRow]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantRow, _Mapping]]] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class UsageRow(_message.Message):
    __slots__ = ("tenant", "model", "traces", "failed", "cancelled", "invokes", "prompt_tokens", "generated_tokens", "saved_bytes", "queue_seconds", "running_seconds", "block_seconds", "steps")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    INVOKES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    traces: int
    failed: int
    cancelled: int
    invokes: int
    prompt_tokens: int
    generated_tokens: int
    saved_bytes: int
    queue_seconds: float
    running_seconds: float
    block_seconds: float
    steps: int
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., traces: _Optional[int] = ..., failed: _Optional[int] = ..., cancelled: _Optional[int] = ..., invokes: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., saved_bytes: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., running_seconds: _Optional[float] = ..., block_seconds: _Optional[float] = ..., steps: _Optional[int] = ...) -> None: ...

class RefusalRow(_message.Message):
    __slots__ = ("tenant", "method", "code", "limit", "count")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    method: str
    code: str
    limit: str
    count: int
    def __init__(self, tenant: _Optional[str] = ..., method: _Optional[str] = ..., code: _Optional[str] = ..., limit: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class GetUsageReply(_message.Message):
    __slots__ = ("seconds", "rows", "refusals")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    rows: _containers.RepeatedCompositeFieldContainer[UsageRow]
    refusals: _containers.RepeatedCompositeFieldContainer[RefusalRow]
    def __init__(self, seconds: _Optional[float] = ..., rows: _Optional[_Iterable[_Union[UsageRow, _Mapping]]] = ..., refusals: _Optional[_Iterable[_Union[RefusalRow, _Mapping]]] = ...) -> None: ...
