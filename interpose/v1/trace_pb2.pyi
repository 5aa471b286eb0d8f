from interpose.v1 import value_pb2 as _value_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INTERVENTION: _ClassVar[ErrorCode]
    ERROR_CODE_UNKNOWN_LOCATION: _ClassVar[ErrorCode]
    ERROR_CODE_OUT_OF_ORDER: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_ARGUMENT: _ClassVar[ErrorCode]
    ERROR_CODE_UNAUTHENTICATED: _ClassVar[ErrorCode]
    ERROR_CODE_PERMISSION_DENIED: _ClassVar[ErrorCode]
    ERROR_CODE_QUOTA_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_CODE_CANCELLED: _ClassVar[ErrorCode]
    ERROR_CODE_DEADLINE_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_CODE_UNAVAILABLE: _ClassVar[ErrorCode]
    ERROR_CODE_ENGINE: _ClassVar[ErrorCode]
    ERROR_CODE_NOT_FOUND: _ClassVar[ErrorCode]
    ERROR_CODE_VERSION: _ClassVar[ErrorCode]
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INTERVENTION: ErrorCode
ERROR_CODE_UNKNOWN_LOCATION: ErrorCode
ERROR_CODE_OUT_OF_ORDER: ErrorCode
ERROR_CODE_INVALID_ARGUMENT: ErrorCode
ERROR_CODE_UNAUTHENTICATED: ErrorCode
ERROR_CODE_PERMISSION_DENIED: ErrorCode
ERROR_CODE_QUOTA_EXCEEDED: ErrorCode
ERROR_CODE_CANCELLED: ErrorCode
ERROR_CODE_DEADLINE_EXCEEDED: ErrorCode
ERROR_CODE_UNAVAILABLE: ErrorCode
ERROR_CODE_ENGINE: ErrorCode
ERROR_CODE_NOT_FOUND: ErrorCode
ERROR_CODE_VERSION: ErrorCode

class Program(_message.Message):
    __slots__ = ("source", "filename", "first_line", "indent", "reads", "writes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FILENAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_LINE_FIELD_NUMBER: _ClassVar[int]
    INDENT_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    source: str
    filename: str
    first_line: int
    indent: int
    reads: _containers.RepeatedCompositeFieldContainer[_value_pb2.Binding]
    writes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, source: _Optional[str] = ..., filename: _Optional[str] = ..., first_line: _Optional[int] = ..., indent: _Optional[int] = ..., reads: _Optional[_Iterable[_Union[_value_pb2.Binding, _Mapping]]] = ..., writes: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("text", "token_ids", "chat")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    chat: Chat
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ...) -> None: ...

class Invoke(_message.Message):
    __slots__ = ("prompt", "sampling", "program", "after", "gang", "joint", "lora")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    GANG_FIELD_NUMBER: _ClassVar[int]
    JOINT_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    prompt: Prompt
    sampling: _containers.RepeatedCompositeFieldContainer[_value_pb2.Binding]
    program: Program
    after: _containers.RepeatedScalarFieldContainer[int]
    gang: bool
    joint: bool
    lora: str
    def __init__(self, prompt: _Optional[_Union[Prompt, _Mapping]] = ..., sampling: _Optional[_Iterable[_Union[_value_pb2.Binding, _Mapping]]] = ..., program: _Optional[_Union[Program, _Mapping]] = ..., after: _Optional[_Iterable[int]] = ..., gang: bool = ..., joint: bool = ..., lora: _Optional[str] = ...) -> None: ...

class Trace(_message.Message):
    __slots__ = ("id", "model", "scope", "invokes", "shared", "sampling", "stream", "edits", "applied", "remote", "exchanged", "scan", "explain", "variables", "lora", "stacks", "openai")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    INVOKES_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    EDITS_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    EXCHANGED_FIELD_NUMBER: _ClassVar[int]
    SCAN_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    OPENAI_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    scope: _value_pb2.Objects
    invokes: _containers.RepeatedCompositeFieldContainer[Invoke]
    shared: _containers.RepeatedCompositeFieldContainer[_value_pb2.Binding]
    sampling: _containers.RepeatedCompositeFieldContainer[_value_pb2.Binding]
    stream: bool
    edits: _containers.RepeatedScalarFieldContainer[str]
    applied: _containers.RepeatedCompositeFieldContainer[Edit]
    remote: bool
    exchanged: _containers.RepeatedScalarFieldContainer[str]
    scan: bool
    explain: bool
    variables: _containers.RepeatedCompositeFieldContainer[SessionVariable]
    lora: str
    stacks: bool
    openai: OpenAIRequest
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ..., scope: _Optional[_Union[_value_pb2.Objects, _Mapping]] = ..., invokes: _Optional[_Iterable[_Union[Invoke, _Mapping]]] = ..., shared: _Optional[_Iterable[_Union[_value_pb2.Binding, _Mapping]]] = ..., sampling: _Optional[_Iterable[_Union[_value_pb2.Binding, _Mapping]]] = ..., stream: bool = ..., edits: _Optional[_Iterable[str]] = ..., applied: _Optional[_Iterable[_Union[Edit, _Mapping]]] = ..., remote: bool = ..., exchanged: _Optional[_Iterable[str]] = ..., scan: bool = ..., explain: bool = ..., variables: _Optional[_Iterable[_Union[SessionVariable, _Mapping]]] = ..., lora: _Optional[str] = ..., stacks: bool = ..., openai: _Optional[_Union[OpenAIRequest, _Mapping]] = ...) -> None: ...

class OpenAIRequest(_message.Message):
    __slots__ = ("path", "body", "traced", "model", "tokens")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    TRACED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    path: str
    body: bytes
    traced: bool
    model: str
    tokens: int
    def __init__(self, path: _Optional[str] = ..., body: _Optional[bytes] = ..., traced: bool = ..., model: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class SessionVariable(_message.Message):
    __slots__ = ("id", "entry", "version", "canonical")
    ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CANONICAL_FIELD_NUMBER: _ClassVar[int]
    id: str
    entry: int
    version: int
    canonical: bool
    def __init__(self, id: _Optional[str] = ..., entry: _Optional[int] = ..., version: _Optional[int] = ..., canonical: bool = ...) -> None: ...

class Edit(_message.Message):
    __slots__ = ("name", "scope", "program")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    name: str
    scope: _value_pb2.Objects
    program: Program
    def __init__(self, name: _Optional[str] = ..., scope: _Optional[_Union[_value_pb2.Objects, _Mapping]] = ..., program: _Optional[_Union[Program, _Mapping]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("filename", "line", "end_line", "column", "end_column", "function", "text")
    FILENAME_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    END_LINE_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    END_COLUMN_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    filename: str
    line: int
    end_line: int
    column: int
    end_column: int
    function: str
    text: str
    def __init__(self, filename: _Optional[str] = ..., line: _Optional[int] = ..., end_line: _Optional[int] = ..., column: _Optional[int] = ..., end_column: _Optional[int] = ..., function: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message", "exception_type", "exception_message", "frames", "trace_id", "invoke", "location", "suggestions", "retry_after", "quota")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_TYPE_FIELD_NUMBER: _ClassVar[int]
    EXCEPTION_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INVOKE_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    SUGGESTIONS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    exception_type: str
    exception_message: str
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    trace_id: str
    invoke: int
    location: str
    suggestions: _containers.RepeatedScalarFieldContainer[str]
    retry_after: float
    quota: QuotaUse
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., exception_type: _Optional[str] = ..., exception_message: _Optional[str] = ..., frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ..., trace_id: _Optional[str] = ..., invoke: _Optional[int] = ..., location: _Optional[str] = ..., suggestions: _Optional[_Iterable[str]] = ..., retry_after: _Optional[float] = ..., quota: _Optional[_Union[QuotaUse, _Mapping]] = ...) -> None: ...

class QuotaUse(_message.Message):
    __slots__ = ("name", "limit", "used", "refused")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    limit: float
    used: float
    refused: int
    def __init__(self, name: _Optional[str] = ..., limit: _Optional[float] = ..., used: _Optional[float] = ..., refused: _Optional[int] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("trace_id", "session_id", "model", "captured", "invokes")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CAPTURED_FIELD_NUMBER: _ClassVar[int]
    INVOKES_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    session_id: str
    model: str
    captured: _containers.RepeatedCompositeFieldContainer[CapturedName]
    invokes: int
    def __init__(self, trace_id: _Optional[str] = ..., session_id: _Optional[str] = ..., model: _Optional[str] = ..., captured: _Optional[_Iterable[_Union[CapturedName, _Mapping]]] = ..., invokes: _Optional[int] = ...) -> None: ...

class CapturedName(_message.Message):
    __slots__ = ("name", "index")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    name: str
    index: int
    def __init__(self, name: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs", "ranks", "texts")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("invoke", "text", "token_ids", "finished", "finish_reason", "prompt_token_ids", "logprobs", "prompt_logprobs", "logs")
    INVOKE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGS_FIELD_NUMBER: _ClassVar[int]
    invoke: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: bool
    finish_reason: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    logs: int
    def __init__(self, invoke: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: bool = ..., finish_reason: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., logs: _Optional[int] = ...) -> None: ...

class Log(_message.Message):
    __slots__ = ("invoke", "text")
    INVOKE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    invoke: int
    text: str
    def __init__(self, invoke: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Update(_message.Message):
    __slots__ = ("index", "value")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    index: int
    value: _value_pb2.Value
    def __init__(self, index: _Optional[int] = ..., value: _Optional[_Union[_value_pb2.Value, _Mapping]] = ...) -> None: ...

class Saves(_message.Message):
    __slots__ = ("invoke", "objects", "names", "updates", "variables")
    INVOKE_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    invoke: int
    objects: _value_pb2.Objects
    names: _containers.RepeatedCompositeFieldContainer[_value_pb2.Binding]
    updates: _containers.RepeatedCompositeFieldContainer[Update]
    variables: _containers.RepeatedCompositeFieldContainer[SessionVariable]
    def __init__(self, invoke: _Optional[int] = ..., objects: _Optional[_Union[_value_pb2.Objects, _Mapping]] = ..., names: _Optional[_Iterable[_Union[_value_pb2.Binding, _Mapping]]] = ..., updates: _Optional[_Iterable[_Union[Update, _Mapping]]] = ..., variables: _Optional[_Iterable[_Union[SessionVariable, _Mapping]]] = ...) -> None: ...

class Patch(_message.Message):
    __slots__ = ("index", "list", "set", "dict", "tensor", "at")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    DICT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    index: int
    list: ListPatch
    set: SetPatch
    dict: DictPatch
    tensor: _value_pb2.Tensor
    at: int
    def __init__(self, index: _Optional[int] = ..., list: _Optional[_Union[ListPatch, _Mapping]] = ..., set: _Optional[_Union[SetPatch, _Mapping]] = ..., dict: _Optional[_Union[DictPatch, _Mapping]] = ..., tensor: _Optional[_Union[_value_pb2.Tensor, _Mapping]] = ..., at: _Optional[int] = ...) -> None: ...

class ListPatch(_message.Message):
    __slots__ = ("keep", "items")
    KEEP_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    keep: int
    items: _containers.RepeatedCompositeFieldContainer[_value_pb2.Value]
    def __init__(self, keep: _Optional[int] = ..., items: _Optional[_Iterable[_Union[_value_pb2.Value, _Mapping]]] = ...) -> None: ...

class SetPatch(_message.Message):
    __slots__ = ("removed", "added")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    removed: _containers.RepeatedCompositeFieldContainer[_value_pb2.Value]
    added: _containers.RepeatedCompositeFieldContainer[_value_pb2.Value]
    def __init__(self, removed: _Optional[_Iterable[_Union[_value_pb2.Value, _Mapping]]] = ..., added: _Optional[_Iterable[_Union[_value_pb2.Value, _Mapping]]] = ...) -> None: ...

class DictPatch(_message.Message):
    __slots__ = ("removed", "changed")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    removed: _containers.RepeatedCompositeFieldContainer[_value_pb2.Value]
    changed: _value_pb2.Mapping
    def __init__(self, removed: _Optional[_Iterable[_Union[_value_pb2.Value, _Mapping]]] = ..., changed: _Optional[_Union[_value_pb2.Mapping, _Mapping]] = ...) -> None: ...

class Captured(_message.Message):
    __slots__ = ("index", "entry")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    index: int
    entry: int
    def __init__(self, index: _Optional[int] = ..., entry: _Optional[int] = ...) -> None: ...

class Increment(_message.Message):
    __slots__ = ("invoke", "sequence", "steps", "last", "first", "objects", "patches", "names", "dropped", "captured")
    INVOKE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    CAPTURED_FIELD_NUMBER: _ClassVar[int]
    invoke: int
    sequence: int
    steps: int
    last: bool
    first: int
    objects: _value_pb2.Objects
    patches: _containers.RepeatedCompositeFieldContainer[Patch]
    names: _containers.RepeatedCompositeFieldContainer[_value_pb2.Binding]
    dropped: _containers.RepeatedScalarFieldContainer[str]
    captured: _containers.RepeatedCompositeFieldContainer[Captured]
    def __init__(self, invoke: _Optional[int] = ..., sequence: _Optional[int] = ..., steps: _Optional[int] = ..., last: bool = ..., first: _Optional[int] = ..., objects: _Optional[_Union[_value_pb2.Objects, _Mapping]] = ..., patches: _Optional[_Iterable[_Union[Patch, _Mapping]]] = ..., names: _Optional[_Iterable[_Union[_value_pb2.Binding, _Mapping]]] = ..., dropped: _Optional[_Iterable[str]] = ..., captured: _Optional[_Iterable[_Union[Captured, _Mapping]]] = ...) -> None: ...

class LocationCount(_message.Message):
    __slots__ = ("location", "served", "written")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    location: str
    served: int
    written: int
    def __init__(self, location: _Optional[str] = ..., served: _Optional[int] = ..., written: _Optional[int] = ...) -> None: ...

class Accounting(_message.Message):
    __slots__ = ("invoke", "locations", "steps", "prompt_tokens", "generated_tokens", "dtype", "kv_cache_dtype", "attention", "matmul", "tiers", "block_seconds", "seconds", "cached_tokens")
    INVOKE_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    MATMUL_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    invoke: int
    locations: _containers.RepeatedCompositeFieldContainer[LocationCount]
    steps: int
    prompt_tokens: int
    generated_tokens: int
    dtype: _value_pb2.DType
    kv_cache_dtype: _value_pb2.DType
    attention: str
    matmul: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierCount]
    block_seconds: float
    seconds: float
    cached_tokens: int
    def __init__(self, invoke: _Optional[int] = ..., locations: _Optional[_Iterable[_Union[LocationCount, _Mapping]]] = ..., steps: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., dtype: _Optional[_Union[_value_pb2.DType, str]] = ..., kv_cache_dtype: _Optional[_Union[_value_pb2.DType, str]] = ..., attention: _Optional[str] = ..., matmul: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierCount, _Mapping]]] = ..., block_seconds: _Optional[float] = ..., seconds: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class TierCount(_message.Message):
    __slots__ = ("tier", "steps", "why")
    TIER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    tier: str
    steps: int
    why: str
    def __init__(self, tier: _Optional[str] = ..., steps: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class ExplainedPart(_message.Message):
    __slots__ = ("line", "text", "tier", "best", "reads", "writes", "why", "at", "at_text", "instead")
    LINE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    AT_TEXT_FIELD_NUMBER: _ClassVar[int]
    INSTEAD_FIELD_NUMBER: _ClassVar[int]
    line: int
    text: str
    tier: str
    best: str
    reads: _containers.RepeatedScalarFieldContainer[str]
    writes: _containers.RepeatedScalarFieldContainer[str]
    why: str
    at: int
    at_text: str
    instead: str
    def __init__(self, line: _Optional[int] = ..., text: _Optional[str] = ..., tier: _Optional[str] = ..., best: _Optional[str] = ..., reads: _Optional[_Iterable[str]] = ..., writes: _Optional[_Iterable[str]] = ..., why: _Optional[str] = ..., at: _Optional[int] = ..., at_text: _Optional[str] = ..., instead: _Optional[str] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("invoke", "parts", "notes")
    INVOKE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    invoke: int
    parts: _containers.RepeatedCompositeFieldContainer[ExplainedPart]
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, invoke: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[ExplainedPart, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "generated_tokens", "saved_bytes", "seconds_queued", "seconds_running")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_QUEUED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    generated_tokens: int
    saved_bytes: int
    seconds_queued: float
    seconds_running: float
    def __init__(self, prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., saved_bytes: _Optional[int] = ..., seconds_queued: _Optional[float] = ..., seconds_running: _Optional[float] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("usage",)
    USAGE_FIELD_NUMBER: _ClassVar[int]
    usage: Usage
    def __init__(self, usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("accepted", "output", "log", "saves", "failed", "done", "increment", "accounting", "explanation", "bundle", "http")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    INCREMENT_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTING_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    output: Output
    log: Log
    saves: Saves
    failed: Failure
    done: Done
    increment: Increment
    accounting: Accounting
    explanation: Explanation
    bundle: Bundle
    http: Http
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., output: _Optional[_Union[Output, _Mapping]] = ..., log: _Optional[_Union[Log, _Mapping]] = ..., saves: _Optional[_Union[Saves, _Mapping]] = ..., failed: _Optional[_Union[Failure, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., increment: _Optional[_Union[Increment, _Mapping]] = ..., accounting: _Optional[_Union[Accounting, _Mapping]] = ..., explanation: _Optional[_Union[Explanation, _Mapping]] = ..., bundle: _Optional[_Union[Bundle, _Mapping]] = ..., http: _Optional[_Union[Http, _Mapping]] = ...) -> None: ...

class Http(_message.Message):
    __slots__ = ("status", "content_type", "data")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    status: int
    content_type: str
    data: bytes
    def __init__(self, status: _Optional[int] = ..., content_type: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class Bundle(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...
