from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_BOOL: _ClassVar[DType]
    DTYPE_UINT8: _ClassVar[DType]
    DTYPE_INT8: _ClassVar[DType]
    DTYPE_INT16: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]
    DTYPE_UINT16: _ClassVar[DType]
    DTYPE_UINT32: _ClassVar[DType]
    DTYPE_UINT64: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT64: _ClassVar[DType]
    DTYPE_COMPLEX64: _ClassVar[DType]
    DTYPE_COMPLEX128: _ClassVar[DType]
    DTYPE_FLOAT8_E4M3FN: _ClassVar[DType]
    DTYPE_FLOAT8_E5M2: _ClassVar[DType]

class ArrayLibrary(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ARRAY_LIBRARY_UNSPECIFIED: _ClassVar[ArrayLibrary]
    ARRAY_LIBRARY_TORCH: _ClassVar[ArrayLibrary]
    ARRAY_LIBRARY_NUMPY: _ClassVar[ArrayLibrary]
DTYPE_UNSPECIFIED: DType
DTYPE_BOOL: DType
DTYPE_UINT8: DType
DTYPE_INT8: DType
DTYPE_INT16: DType
DTYPE_INT32: DType
DTYPE_INT64: DType
DTYPE_UINT16: DType
DTYPE_UINT32: DType
DTYPE_UINT64: DType
DTYPE_FLOAT16: DType
DTYPE_BFLOAT16: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT64: DType
DTYPE_COMPLEX64: DType
DTYPE_COMPLEX128: DType
DTYPE_FLOAT8_E4M3FN: DType
DTYPE_FLOAT8_E5M2: DType
ARRAY_LIBRARY_UNSPECIFIED: ArrayLibrary
ARRAY_LIBRARY_TORCH: ArrayLibrary
ARRAY_LIBRARY_NUMPY: ArrayLibrary

class Blob(_message.Message):
    __slots__ = ("id", "size")
    ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    id: str
    size: int
    def __init__(self, id: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "library", "data", "blob", "requires_grad", "parameter", "shape_only")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_GRAD_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    SHAPE_ONLY_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    library: ArrayLibrary
    data: bytes
    blob: Blob
    requires_grad: bool
    parameter: bool
    shape_only: bool
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., library: _Optional[_Union[ArrayLibrary, str]] = ..., data: _Optional[bytes] = ..., blob: _Optional[_Union[Blob, _Mapping]] = ..., requires_grad: bool = ..., parameter: bool = ..., shape_only: bool = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("none", "boolean", "integer", "big_integer", "real", "complex_number", "text", "data", "tensor", "list", "tuple", "set", "frozen_set", "dict", "slice", "ellipsis", "range", "dtype", "device", "module", "tracer", "python_module", "symbol", "function", "ref", "pickled", "size", "not_implemented", "record", "class_source", "instance", "attribute", "namespace", "call", "captured", "remote", "barrier", "stack", "stacked")
    NONE_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    BIG_INTEGER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    COMPLEX_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    FROZEN_SET_FIELD_NUMBER: _ClassVar[int]
    DICT_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    ELLIPSIS_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    TRACER_FIELD_NUMBER: _ClassVar[int]
    PYTHON_MODULE_FIELD_NUMBER: _ClassVar[int]
    SYMBOL_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    PICKLED_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NOT_IMPLEMENTED_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    CLASS_SOURCE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    CAPTURED_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    STACKED_FIELD_NUMBER: _ClassVar[int]
    none: bool
    boolean: bool
    integer: int
    big_integer: str
    real: float
    complex_number: ComplexNumber
    text: str
    data: bytes
    tensor: Tensor
    list: Items
    tuple: Items
    set: Items
    frozen_set: Items
    dict: Mapping
    slice: SliceValue
    ellipsis: bool
    range: RangeValue
    dtype: DType
    device: str
    module: str
    tracer: bool
    python_module: str
    symbol: Symbol
    function: Function
    ref: int
    pickled: bytes
    size: Items
    not_implemented: bool
    record: Record
    class_source: Class
    instance: Instance
    attribute: Attribute
    namespace: Namespace
    call: Call
    captured: int
    remote: RemoteTensor
    barrier: Barrier
    stack: Stack
    stacked: StackSlice
    def __init__(self, none: bool = ..., boolean: bool = ..., integer: _Optional[int] = ..., big_integer: _Optional[str] = ..., real: _Optional[float] = ..., complex_number: _Optional[_Union[ComplexNumber, _Mapping]] = ..., text: _Optional[str] = ..., data: _Optional[bytes] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ..., list: _Optional[_Union[Items, _Mapping]] = ..., tuple: _Optional[_Union[Items, _Mapping]] = ..., set: _Optional[_Union[Items, _Mapping]] = ..., frozen_set: _Optional[_Union[Items, _Mapping]] = ..., dict: _Optional[_Union[Mapping, _Mapping]] = ..., slice: _Optional[_Union[SliceValue, _Mapping]] = ..., ellipsis: bool = ..., range: _Optional[_Union[RangeValue, _Mapping]] = ..., dtype: _Optional[_Union[DType, str]] = ..., device: _Optional[str] = ..., module: _Optional[str] = ..., tracer: bool = ..., python_module: _Optional[str] = ..., symbol: _Optional[_Union[Symbol, _Mapping]] = ..., function: _Optional[_Union[Function, _Mapping]] = ..., ref: _Optional[int] = ..., pickled: _Optional[bytes] = ..., size: _Optional[_Union[Items, _Mapping]] = ..., not_implemented: bool = ..., record: _Optional[_Union[Record, _Mapping]] = ..., class_source: _Optional[_Union[Class, _Mapping]] = ..., instance: _Optional[_Union[Instance, _Mapping]] = ..., attribute: _Optional[_Union[Attribute, _Mapping]] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., call: _Optional[_Union[Call, _Mapping]] = ..., captured: _Optional[int] = ..., remote: _Optional[_Union[RemoteTensor, _Mapping]] = ..., barrier: _Optional[_Union[Barrier, _Mapping]] = ..., stack: _Optional[_Union[Stack, _Mapping]] = ..., stacked: _Optional[_Union[StackSlice, _Mapping]] = ...) -> None: ...

class Stack(_message.Message):
    __slots__ = ("dtype", "library", "count", "shape", "rows", "data", "blob", "small")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    SMALL_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    library: ArrayLibrary
    count: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    blob: Blob
    small: bool
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., library: _Optional[_Union[ArrayLibrary, str]] = ..., count: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., blob: _Optional[_Union[Blob, _Mapping]] = ..., small: bool = ...) -> None: ...

class StackSlice(_message.Message):
    __slots__ = ("stack", "first", "count")
    STACK_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    stack: int
    first: int
    count: int
    def __init__(self, stack: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Barrier(_message.Message):
    __slots__ = ("number", "count")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    number: int
    count: int
    def __init__(self, number: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class TensorView(_message.Message):
    __slots__ = ("dtype", "shape", "indices")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedCompositeFieldContainer[Index]
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[_Union[Index, _Mapping]]] = ...) -> None: ...

class Index(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[IndexItem]
    def __init__(self, items: _Optional[_Iterable[_Union[IndexItem, _Mapping]]] = ...) -> None: ...

class IndexItem(_message.Message):
    __slots__ = ("at", "slice", "ellipsis", "new_axis", "positions")
    AT_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    ELLIPSIS_FIELD_NUMBER: _ClassVar[int]
    NEW_AXIS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    at: int
    slice: IndexSlice
    ellipsis: bool
    new_axis: bool
    positions: Positions
    def __init__(self, at: _Optional[int] = ..., slice: _Optional[_Union[IndexSlice, _Mapping]] = ..., ellipsis: bool = ..., new_axis: bool = ..., positions: _Optional[_Union[Positions, _Mapping]] = ...) -> None: ...

class IndexSlice(_message.Message):
    __slots__ = ("start", "stop", "step")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    step: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Positions(_message.Message):
    __slots__ = ("at",)
    AT_FIELD_NUMBER: _ClassVar[int]
    at: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, at: _Optional[_Iterable[int]] = ...) -> None: ...

class RemoteTensor(_message.Message):
    __slots__ = ("blob_id", "view", "library", "session_id")
    BLOB_ID_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    blob_id: str
    view: TensorView
    library: ArrayLibrary
    session_id: str
    def __init__(self, blob_id: _Optional[str] = ..., view: _Optional[_Union[TensorView, _Mapping]] = ..., library: _Optional[_Union[ArrayLibrary, str]] = ..., session_id: _Optional[str] = ...) -> None: ...

class ComplexNumber(_message.Message):
    __slots__ = ("real", "imaginary")
    REAL_FIELD_NUMBER: _ClassVar[int]
    IMAGINARY_FIELD_NUMBER: _ClassVar[int]
    real: float
    imaginary: float
    def __init__(self, real: _Optional[float] = ..., imaginary: _Optional[float] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("type", "fields")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    type: str
    fields: Mapping
    def __init__(self, type: _Optional[str] = ..., fields: _Optional[_Union[Mapping, _Mapping]] = ...) -> None: ...

class Items(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, items: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Mapping(_message.Message):
    __slots__ = ("keys", "values")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[Value]
    values: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, keys: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class SliceValue(_message.Message):
    __slots__ = ("start", "stop", "step")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    start: Value
    stop: Value
    step: Value
    def __init__(self, start: _Optional[_Union[Value, _Mapping]] = ..., stop: _Optional[_Union[Value, _Mapping]] = ..., step: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class RangeValue(_message.Message):
    __slots__ = ("start", "stop", "step")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    step: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Symbol(_message.Message):
    __slots__ = ("module", "name")
    MODULE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    module: str
    name: str
    def __init__(self, module: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Binding(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: Value
    def __init__(self, name: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class Function(_message.Message):
    __slots__ = ("name", "source", "filename", "first_line", "reads", "indent")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FILENAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_LINE_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    INDENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    filename: str
    first_line: int
    reads: _containers.RepeatedCompositeFieldContainer[Binding]
    indent: int
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., filename: _Optional[str] = ..., first_line: _Optional[int] = ..., reads: _Optional[_Iterable[_Union[Binding, _Mapping]]] = ..., indent: _Optional[int] = ...) -> None: ...

class Class(_message.Message):
    __slots__ = ("name", "source", "filename", "first_line", "indent", "needs", "reads", "attributes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FILENAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_LINE_FIELD_NUMBER: _ClassVar[int]
    INDENT_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    filename: str
    first_line: int
    indent: int
    needs: _containers.RepeatedCompositeFieldContainer[Binding]
    reads: _containers.RepeatedCompositeFieldContainer[Binding]
    attributes: _containers.RepeatedCompositeFieldContainer[Binding]
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., filename: _Optional[str] = ..., first_line: _Optional[int] = ..., indent: _Optional[int] = ..., needs: _Optional[_Iterable[_Union[Binding, _Mapping]]] = ..., reads: _Optional[_Iterable[_Union[Binding, _Mapping]]] = ..., attributes: _Optional[_Iterable[_Union[Binding, _Mapping]]] = ...) -> None: ...

class Instance(_message.Message):
    __slots__ = ("type", "contents", "attributes")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CONTENTS_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    type: Value
    contents: Value
    attributes: _containers.RepeatedCompositeFieldContainer[Binding]
    def __init__(self, type: _Optional[_Union[Value, _Mapping]] = ..., contents: _Optional[_Union[Value, _Mapping]] = ..., attributes: _Optional[_Iterable[_Union[Binding, _Mapping]]] = ...) -> None: ...

class Attribute(_message.Message):
    __slots__ = ("object", "name")
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    object: Value
    name: str
    def __init__(self, object: _Optional[_Union[Value, _Mapping]] = ..., name: _Optional[str] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("name", "attributes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    attributes: _containers.RepeatedCompositeFieldContainer[Binding]
    def __init__(self, name: _Optional[str] = ..., attributes: _Optional[_Iterable[_Union[Binding, _Mapping]]] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("function", "args", "keywords")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    KEYWORDS_FIELD_NUMBER: _ClassVar[int]
    function: Symbol
    args: _containers.RepeatedCompositeFieldContainer[Value]
    keywords: _containers.RepeatedCompositeFieldContainer[Binding]
    def __init__(self, function: _Optional[_Union[Symbol, _Mapping]] = ..., args: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., keywords: _Optional[_Iterable[_Union[Binding, _Mapping]]] = ...) -> None: ...

class Objects(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...
