from interpose.v1 import keys_pb2 as _keys_pb2
from interpose.v1 import model_pb2 as _model_pb2
from interpose.v1 import trace_pb2 as _trace_pb2
from interpose.v1 import value_pb2 as _value_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_QUEUED: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_DONE: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_QUEUED: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_DONE: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_CANCELLED: JobState

class HelloRequest(_message.Message):
    __slots__ = ("protocol", "client_version", "python_version")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    client_version: str
    python_version: str
    def __init__(self, protocol: _Optional[int] = ..., client_version: _Optional[str] = ..., python_version: _Optional[str] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol", "oldest_protocol", "server_version", "python_version", "models", "limits", "tenant")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    oldest_protocol: int
    server_version: str
    python_version: str
    models: _containers.RepeatedScalarFieldContainer[str]
    limits: Limits
    tenant: str
    def __init__(self, protocol: _Optional[int] = ..., oldest_protocol: _Optional[int] = ..., server_version: _Optional[str] = ..., python_version: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., tenant: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_message_bytes", "max_upload_bytes", "max_saved_bytes", "max_invokes", "chunk_bytes", "inline_bytes", "max_program_bytes", "step_seconds", "pickled", "max_program_nodes", "max_trace_program_bytes")
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_UPLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_INVOKES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PROGRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PICKLED_FIELD_NUMBER: _ClassVar[int]
    MAX_PROGRAM_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_TRACE_PROGRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_message_bytes: int
    max_upload_bytes: int
    max_saved_bytes: int
    max_invokes: int
    chunk_bytes: int
    inline_bytes: int
    max_program_bytes: int
    step_seconds: float
    pickled: bool
    max_program_nodes: int
    max_trace_program_bytes: int
    def __init__(self, max_message_bytes: _Optional[int] = ..., max_upload_bytes: _Optional[int] = ..., max_saved_bytes: _Optional[int] = ..., max_invokes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., inline_bytes: _Optional[int] = ..., max_program_bytes: _Optional[int] = ..., step_seconds: _Optional[float] = ..., pickled: bool = ..., max_program_nodes: _Optional[int] = ..., max_trace_program_bytes: _Optional[int] = ...) -> None: ...

class DescribeModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class TokenizerChunk(_message.Message):
    __slots__ = ("name", "size", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    data: bytes
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("kept",)
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept: bool
    def __init__(self, kept: bool = ...) -> None: ...

class OpenSessionReply(_message.Message):
    __slots__ = ("session_id", "idle_seconds", "retention_seconds")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    idle_seconds: float
    retention_seconds: float
    def __init__(self, session_id: _Optional[str] = ..., idle_seconds: _Optional[float] = ..., retention_seconds: _Optional[float] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id", "keep_jobs")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_JOBS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    keep_jobs: bool
    def __init__(self, session_id: _Optional[str] = ..., keep_jobs: bool = ...) -> None: ...

class CloseSessionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UploadRequest(_message.Message):
    __slots__ = ("session_id", "digest", "size", "offset", "data")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    digest: str
    size: int
    offset: int
    data: bytes
    def __init__(self, session_id: _Optional[str] = ..., digest: _Optional[str] = ..., size: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("received",)
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    received: int
    def __init__(self, received: _Optional[int] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("protocol", "session_id", "trace", "job", "bundles")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    session_id: str
    trace: _trace_pb2.Trace
    job: bool
    bundles: bool
    def __init__(self, protocol: _Optional[int] = ..., session_id: _Optional[str] = ..., trace: _Optional[_Union[_trace_pb2.Trace, _Mapping]] = ..., job: bool = ..., bundles: bool = ...) -> None: ...

class UnparsedSubmit(_message.Message):
    __slots__ = ("protocol", "session_id", "trace", "job", "bundles")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    session_id: str
    trace: bytes
    job: bool
    bundles: bool
    def __init__(self, protocol: _Optional[int] = ..., session_id: _Optional[str] = ..., trace: _Optional[bytes] = ..., job: bool = ..., bundles: bool = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("session_id", "trace_id", "seen", "bundles")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    trace_id: str
    seen: int
    bundles: bool
    def __init__(self, session_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., seen: _Optional[int] = ..., bundles: bool = ...) -> None: ...

class DescribeJobRequest(_message.Message):
    __slots__ = ("session_id", "trace_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    trace_id: str
    def __init__(self, session_id: _Optional[str] = ..., trace_id: _Optional[str] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("session_id", "trace_id", "model", "state", "invokes", "finished_invokes", "prompt_tokens", "generated_tokens", "stored_bytes", "seconds_since_submitted", "seconds_since_started", "seconds_since_ended", "seconds_left", "failure")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INVOKES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_INVOKES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_STARTED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_ENDED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    trace_id: str
    model: str
    state: JobState
    invokes: int
    finished_invokes: int
    prompt_tokens: int
    generated_tokens: int
    stored_bytes: int
    seconds_since_submitted: float
    seconds_since_started: float
    seconds_since_ended: float
    seconds_left: float
    failure: _trace_pb2.Failure
    def __init__(self, session_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[_Union[JobState, str]] = ..., invokes: _Optional[int] = ..., finished_invokes: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., seconds_since_submitted: _Optional[float] = ..., seconds_since_started: _Optional[float] = ..., seconds_since_ended: _Optional[float] = ..., seconds_left: _Optional[float] = ..., failure: _Optional[_Union[_trace_pb2.Failure, _Mapping]] = ...) -> None: ...

class DescribeSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class SessionDescription(_message.Message):
    __slots__ = ("session_id", "traces", "stored_bytes", "max_stored_bytes", "idle_seconds")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    traces: _containers.RepeatedCompositeFieldContainer[JobStatus]
    stored_bytes: int
    max_stored_bytes: int
    idle_seconds: float
    def __init__(self, session_id: _Optional[str] = ..., traces: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ..., stored_bytes: _Optional[int] = ..., max_stored_bytes: _Optional[int] = ..., idle_seconds: _Optional[float] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("session_id", "blob_id", "offset", "length", "view", "at_most")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BLOB_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    AT_MOST_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    blob_id: str
    offset: int
    length: int
    view: _value_pb2.TensorView
    at_most: int
    def __init__(self, session_id: _Optional[str] = ..., blob_id: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., view: _Optional[_Union[_value_pb2.TensorView, _Mapping]] = ..., at_most: _Optional[int] = ...) -> None: ...

class FetchChunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("session_id", "trace_id", "forget")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    trace_id: str
    forget: bool
    def __init__(self, session_id: _Optional[str] = ..., trace_id: _Optional[str] = ..., forget: bool = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class StoreEditRequest(_message.Message):
    __slots__ = ("protocol", "model", "edit")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EDIT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    model: str
    edit: _trace_pb2.Edit
    def __init__(self, protocol: _Optional[int] = ..., model: _Optional[str] = ..., edit: _Optional[_Union[_trace_pb2.Edit, _Mapping]] = ...) -> None: ...

class StoreEditReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListEditsRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class StoredEdit(_message.Message):
    __slots__ = ("name", "bytes", "age_seconds", "source")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    age_seconds: float
    source: str
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ..., age_seconds: _Optional[float] = ..., source: _Optional[str] = ...) -> None: ...

class ListEditsReply(_message.Message):
    __slots__ = ("edits", "max_edits", "max_bytes")
    EDITS_FIELD_NUMBER: _ClassVar[int]
    MAX_EDITS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    edits: _containers.RepeatedCompositeFieldContainer[StoredEdit]
    max_edits: int
    max_bytes: int
    def __init__(self, edits: _Optional[_Iterable[_Union[StoredEdit, _Mapping]]] = ..., max_edits: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class ClearEditsRequest(_message.Message):
    __slots__ = ("model", "name")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    model: str
    name: str
    def __init__(self, model: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ClearEditsReply(_message.Message):
    __slots__ = ("cleared",)
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    cleared: int
    def __init__(self, cleared: _Optional[int] = ...) -> None: ...

class ListPackagesRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class Package(_message.Message):
    __slots__ = ("name", "version", "modules")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    modules: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., modules: _Optional[_Iterable[str]] = ...) -> None: ...

class ListPackagesReply(_message.Message):
    __slots__ = ("packages", "python_version", "sandboxed")
    PACKAGES_FIELD_NUMBER: _ClassVar[int]
    PYTHON_VERSION_FIELD_NUMBER: _ClassVar[int]
    SANDBOXED_FIELD_NUMBER: _ClassVar[int]
    packages: _containers.RepeatedCompositeFieldContainer[Package]
    python_version: str
    sandboxed: bool
    def __init__(self, packages: _Optional[_Iterable[_Union[Package, _Mapping]]] = ..., python_version: _Optional[str] = ..., sandboxed: bool = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("name", "state", "replicas", "running", "waiting", "adapters", "each", "layers", "views", "refused")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    EACH_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    VIEWS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    replicas: int
    running: int
    waiting: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    each: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    layers: int
    views: _containers.RepeatedScalarFieldContainer[str]
    refused: _containers.RepeatedCompositeFieldContainer[RefusedView]
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., replicas: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ..., each: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., layers: _Optional[int] = ..., views: _Optional[_Iterable[str]] = ..., refused: _Optional[_Iterable[_Union[RefusedView, _Mapping]]] = ...) -> None: ...

class RefusedView(_message.Message):
    __slots__ = ("name", "reason", "layers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    layers: int
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ..., layers: _Optional[int] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("name", "stage", "seconds", "running", "waiting", "sessions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    stage: str
    seconds: float
    running: int
    waiting: int
    sessions: int
    def __init__(self, name: _Optional[str] = ..., stage: _Optional[str] = ..., seconds: _Optional[float] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., sessions: _Optional[int] = ...) -> None: ...

class TenantStatus(_message.Message):
    __slots__ = ("name", "sessions", "traces_running", "traces_done", "stored_bytes", "traces_waiting", "tokens", "saved_bytes", "weight", "quotas")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TRACES_RUNNING_FIELD_NUMBER: _ClassVar[int]
    TRACES_DONE_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRACES_WAITING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    name: str
    sessions: int
    traces_running: int
    traces_done: int
    stored_bytes: int
    traces_waiting: int
    tokens: int
    saved_bytes: int
    weight: float
    quotas: _containers.RepeatedCompositeFieldContainer[_trace_pb2.QuotaUse]
    def __init__(self, name: _Optional[str] = ..., sessions: _Optional[int] = ..., traces_running: _Optional[int] = ..., traces_done: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., traces_waiting: _Optional[int] = ..., tokens: _Optional[int] = ..., saved_bytes: _Optional[int] = ..., weight: _Optional[float] = ..., quotas: _Optional[_Iterable[_Union[_trace_pb2.QuotaUse, _Mapping]]] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("models", "tenants", "sessions", "warm_sessions", "uptime_seconds", "server_version")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WARM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStatus]
    sessions: int
    warm_sessions: int
    uptime_seconds: float
    server_version: str
    def __init__(self, models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantStatus, _Mapping]]] = ..., sessions: _Optional[int] = ..., warm_sessions: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., server_version: _Optional[str] = ...) -> None: ...
