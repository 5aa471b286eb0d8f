from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListKeysRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeyRow(_message.Message):
    __slots__ = ("tenant", "label", "expires", "last_used", "revoked")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    label: str
    expires: float
    last_used: float
    revoked: float
    def __init__(self, tenant: _Optional[str] = ..., label: _Optional[str] = ..., expires: _Optional[float] = ..., last_used: _Optional[float] = ..., revoked: _Optional[float] = ...) -> None: ...

class ListKeysReply(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[KeyRow]
    def __init__(self, keys: _Optional[_Iterable[_Union[KeyRow, _Mapping]]] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("tenant", "label")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    label: str
    def __init__(self, tenant: _Optional[str] = ..., label: _Optional[str] = ...) -> None: ...

class RevokeKeyReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
