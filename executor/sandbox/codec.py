"""Values as typed bytes, between a worker and a sandboxed process.

A message is a tree of plain values. The small ones lie in the message itself. Tensors and long bytes lie in memory that both
processes share (`Region`), and the message says where. The reader trusts nothing: each length, offset, dtype and depth is checked
before it is used. The elements are copied out of the shared memory before anybody looks at them, because the other process could
still write there.

The answers of a loop are the same bytes in each step, but for the elements of their tensors. So a reader may keep what it has
read of short messages (`Known`): the same bytes mean the same.

Size: reader and writer are one format, and stand beside each other.
"""

from __future__ import annotations

import functools
import marshal
import struct
from collections.abc import Callable
from typing import Any

import numpy
import torch

from executor.core.errors import Refusal
from executor.model.meta_tensors import is_fake
from interpose.v1 import trace_pb2 as pb

_ALIGNED = 64  # bytes
_LONG = 4096  # bytes from which on text and bytes lie in the shared memory
_DEPTH = 64
_DIMENSIONS = 64
_KNOWN, _KNOWN_BYTES = 32, 1024  # messages that a reader keeps, and the bytes of the longest
_WORD, _WORDS = 100, 1000  # characters from which on a text is none, and the words whose bytes a writer keeps
_VIEWS = 64  # of a region, that it keeps
_DTYPES = tuple(
    getattr(torch, name)
    for name in (
        "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 uint16 uint32 uint64 "
        "float8_e4m3fn float8_e5m2"
    ).split()
)
_NUMBER_OF = {dtype: number for number, dtype in enumerate(_DTYPES)}
_TURN = b"!"  # begins a message that `encode_turn` has written; no other begins so
_COUNT, _INTEGER, _FLOAT, _COMPLEX, _EXTENT = (struct.Struct(form) for form in ("<I", "<q", "<d", "<dd", "<QQ"))


class Malformed(ValueError):
    """Bytes that are no message."""


class Region:
    """A part of the shared memory, which one process writes and the other reads.

    Args:
        memory: uint8 [bytes], the part.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._used = 0
        self._views: dict[tuple[int, torch.dtype, tuple[int, ...]], torch.Tensor] = {}

    def begin(self) -> None:
        """Begin a new message: what the message before put here is forgotten."""
        self._used = 0

    @property
    def size(self) -> int:
        """The bytes that fit."""
        return self._memory.numel()

    def put(self, data: torch.Tensor) -> tuple[int, int]:  # any shape, on any device
        """Copy a tensor here; return the offset and the number of bytes.

        Raises:
            Refusal: QUOTA_EXCEEDED, there is no room.
        """
        size = data.numel() * data.element_size()
        start = self._room(size)
        if size:
            self._view(start, size, data.dtype, data.shape).copy_(data)
        return start, size

    def read(self, start: int, size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:  # any shape
        """Return a copy of a tensor that the worker has put here."""
        return self._view(start, size, dtype, shape).clone()

    def _view(self, start: int, size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:  # any shape
        key = (start, dtype, shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            view = self._views[key] = self.at(start, size).view(dtype).view(shape)
        return view

    def put_bytes(self, data: bytes | bytearray | memoryview) -> tuple[int, int]:
        """Copy bytes here; return the offset and their number. It raises what `put` raises."""
        source = numpy.frombuffer(data, dtype=numpy.uint8)
        start = self._room(source.size)
        self._memory.numpy()[start : start + source.size] = source
        return start, source.size

    def _room(self, size: int) -> int:
        """Take so many bytes; return their offset."""
        start = -(-self._used // _ALIGNED) * _ALIGNED
        if start + size > self._memory.numel():
            raise Refusal(
                pb.ERROR_CODE_QUOTA_EXCEEDED,
                f"the values that pass to or from a sandboxed block at a time take more than {self._memory.numel() >> 20} MiB; "
                "read a location with fewer tokens, or save values one by one",
            )
        self._used = start + size
        return start

    def take(self, start: int, size: int) -> torch.Tensor:  # -> uint8 [bytes]
        """Return a copy of some bytes.

        Raises:
            Malformed: they do not lie here.
        """
        return self.at(start, size).clone()

    def at(self, start: int, size: int) -> torch.Tensor:  # -> uint8 [bytes]
        """Return some bytes as they lie here, where the other process may still change them.

        Raises:
            Malformed: they do not lie here.
        """
        if start % _ALIGNED or start + size > self._memory.numel():
            raise Malformed(f"{size} bytes at {start}")
        return self._memory[start : start + size]


def encode_turn(told: dict[str, Any], region: Region) -> bytes | None:
    """Return the message of a turn, from the worker; None: it is to be written by `encode`.

    The process believes the worker. So a turn is written by the interpreter's own functions, in a tenth of the time. These take
    some objects for bytes that `encode` refuses, so only plain values go this way.

    Args:
        told: the turn; its `tensors` are a list of tensors, and no other of its values has one.
        region: as of `encode`.

    Raises:
        Refusal: as of `encode`.
    """
    if told["result"] is not None or not (_plain(told.get("value")) and _plain(told.get("error"))):
        return None
    region.begin()
    lie: list[tuple[int, tuple[int, ...], int, int]] = []
    with torch._C._InferenceMode(False):
        torch._C._set_grad_enabled(False)  # leaving the mode brings back the mode of gradients too
        for tensor in told.get("tensors", ()):
            number = _NUMBER_OF.get(tensor.dtype)
            if (
                type(tensor) is not torch.Tensor
                or number is None
                or tensor.layout is not torch.strided
                or tensor.is_meta
            ):
                return None
            lie.append((number, tuple(tensor.shape), *region.put(tensor.detach())))
    return _TURN + marshal.dumps({**told, "tensors": lie})


def _plain(value: Any) -> bool:
    """Return whether a value consists of lists, tuples, texts, integers and None."""
    kind = type(value)
    if kind in (list, tuple):
        return all(map(_plain, value))
    return value is None or kind in (str, int, bool)


def decode_turn(data: bytes, region: Region) -> dict[str, Any]:
    """Return the turn of a message that the worker has written, by `encode_turn` or by `encode`."""
    if data[:1] != _TURN:
        found: dict[str, Any] = decode(data, region)
        return found
    told: dict[str, Any] = marshal.loads(memoryview(data)[1:])
    with torch._C._InferenceMode(False):
        torch._C._set_grad_enabled(False)  # leaving the mode brings back the mode of gradients too
        told["tensors"] = [
            region.read(start, size, _DTYPES[number], shape) for number, shape, start, size in told["tensors"]
        ]
    return told


def encode(value: Any, region: Region) -> bytes:
    """Return the message of a value.

    Args:
        value: of None, bool, int, float, complex, str, bytes, list, tuple, dict and tensors. A scan's tensors travel as shapes.
        region: takes tensors and long bytes; the message before is forgotten.

    Raises:
        Refusal: there is no room, or a tensor's dtype or layout, or a type, does not travel.
    """
    region.begin()
    out = bytearray()
    with torch._C._InferenceMode(False):
        torch._C._set_grad_enabled(False)  # leaving the mode brings back the mode of gradients too
        _encode(value, region, out, 0)
    return bytes(out)


def _encode(value: Any, region: Region, out: bytearray, depth: int) -> None:
    if depth > _DEPTH:
        raise Refusal(pb.ERROR_CODE_INVALID_ARGUMENT, f"a value is nested more than {_DEPTH} deep")
    kind = type(value)
    if value is None or kind is bool:
        out += b"N" if value is None else b"T" if value else b"F"
    elif kind is int:
        if -(1 << 63) <= value < 1 << 63:
            out += b"i" + _INTEGER.pack(value)
        else:
            out += b"h"
            _put_bytes(hex(value).encode(), region, out)
    elif kind is float:
        out += b"f" + _FLOAT.pack(value)
    elif kind is complex:
        out += b"c" + _COMPLEX.pack(value.real, value.imag)
    elif kind is str:
        if len(value) < _WORD:
            out += _word(value)
        else:
            out += b"s"
            _put_bytes(value.encode("utf-8", "surrogatepass"), region, out)
    elif kind in (bytes, bytearray, memoryview):
        out += b"b"
        _put_bytes(value, region, out)
    elif kind in (list, tuple):
        out += (b"l" if kind is list else b"t") + _COUNT.pack(len(value))
        for item in value:
            _encode(item, region, out, depth + 1)
    elif kind is dict:
        out += b"d" + _COUNT.pack(len(value))
        for key, item in value.items():
            _encode(key, region, out, depth + 1)
            _encode(item, region, out, depth + 1)
    elif kind in (torch.Tensor, torch.nn.Parameter):
        _encode_tensor(value, region, out)
    elif is_fake(value):
        out += b"m" + _layout(value)
    else:
        raise Refusal(
            pb.ERROR_CODE_INVALID_ARGUMENT, f"a {kind.__name__} does not pass between a block and its sandbox"
        )


@functools.lru_cache(_WORDS)
def _word(value: str) -> bytes:
    """Return a short text as bytes."""
    data = value.encode("utf-8", "surrogatepass")
    return b"s-" + _COUNT.pack(len(data)) + data


def _layout(value: torch.Tensor) -> bytes:  # any shape
    """Return a tensor's dtype and shape as bytes.

    Raises:
        Refusal: a tensor of that dtype does not travel.
    """
    number = _NUMBER_OF.get(value.dtype)
    if number is None or value.layout is not torch.strided or value.device.type == "meta":
        raise Refusal(
            pb.ERROR_CODE_INVALID_ARGUMENT,
            f"a tensor of dtype {value.dtype} and layout {value.layout} does not pass out of a sandbox; make it dense",
        )
    return bytes((number, value.dim())) + b"".join(map(_INTEGER.pack, value.shape))


def _encode_tensor(value: torch.Tensor, region: Region, out: bytearray) -> None:  # any shape
    layout = _layout(value)
    start, size = region.put(value.detach())
    out += b"x" + layout + _EXTENT.pack(start, size)


def _put_bytes(data: bytes | bytearray | memoryview, region: Region, out: bytearray) -> None:
    size = memoryview(data).nbytes
    if size < _LONG:
        out += b"-" + _COUNT.pack(size) + data
        return
    start, _ = region.put_bytes(data)
    out += b"+" + _EXTENT.pack(start, size)


class Known:
    """Short messages that came before.

    Their bytes are all that they mean, but for the elements of tensors: those are read anew.
    """

    def __init__(self) -> None:
        self._makes: dict[bytes, Callable[[], Any]] = {}

    def find(self, data: bytes) -> Callable[[], Any] | None:
        """Return what makes the value of a message, if the message is known."""
        return self._makes.get(data)

    def keep(self, data: bytes, make: Callable[[], Any]) -> None:
        """Keep what makes the value of a message."""
        if len(self._makes) >= _KNOWN:
            del self._makes[next(iter(self._makes))]
        self._makes[data] = make


class _Elements:
    """A tensor of a message: where its elements lie.

    Args:
        source: the elements as they lie in the shared memory, [...]; a bool's are bytes.
        flags: whether it is a tensor of bools, whose bytes may be neither 0 nor 1.
    """

    def __init__(self, source: torch.Tensor, flags: bool) -> None:
        self._source = source
        self._flags = flags

    def read(self) -> torch.Tensor:  # any shape
        """Return a copy of the elements as they are now."""
        return self._source.clone().ne(0) if self._flags else self._source.clone()


def _again(value: Any) -> Callable[[], Any] | None:
    """Return what makes a value anew, with tensors in the place of `_Elements`.

    For a value that nobody can change, the call returns None.
    """
    kind = type(value)
    if kind is _Elements:
        read: Callable[[], Any] = value.read
        return read
    if kind is dict:
        pairs = [(key, item, _again(item)) for key, item in value.items()]
        return lambda: {key: item if make is None else make() for key, item, make in pairs}
    if kind in (list, tuple):
        items = [(item, _again(item)) for item in value]
        if kind is tuple and all(make is None for _, make in items):
            return None
        return lambda: kind([item if make is None else make() for item, make in items])
    return None


def decode(data: bytes, region: Region, known: Known | None = None) -> Any:
    """Return the value of a message.

    Tensors are copies, on the CPU, without gradients.

    Args:
        data: the message.
        region: where its tensors and long bytes lie.
        known: messages that came before in the same region; this one may be one of them.

    Raises:
        Malformed: the bytes are no message.
    """
    with torch._C._InferenceMode(False):
        torch._C._set_grad_enabled(False)  # leaving the mode brings back the mode of gradients too
        try:
            make = None if known is None else known.find(data)
            if make is None:
                make = _made(data, region, known)
            return make()
        except (struct.error, ValueError, IndexError, TypeError, OverflowError, RuntimeError) as error:
            raise Malformed(str(error)) from None


def _made(data: bytes, region: Region, known: Known | None) -> Callable[[], Any]:
    """Read a message; return what makes its value."""
    reader = _Reader(data, region)
    value = reader.value(0)
    if reader.at != len(data):
        raise Malformed(f"{len(data) - reader.at} bytes after its end")
    make = _again(value) or (lambda: value)
    if known is not None and reader.lasting and len(data) <= _KNOWN_BYTES:
        known.keep(data, make)
    return make


class _Reader:
    """Reads one message; its tensors become `_Elements`.

    Attributes:
        at: the bytes that have been read.
        lasting: whether the bytes of the message are all that it means, but for the elements of tensors.
    """

    def __init__(self, data: bytes, region: Region) -> None:
        self.at = 0
        self.lasting = True
        self._data = data
        self._region = region

    def _unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        found = form.unpack_from(self._data, self.at)
        self.at += form.size
        return found

    def _tag(self) -> bytes:
        tag = self._data[self.at : self.at + 1]
        self.at += 1
        return tag

    def value(self, depth: int) -> Any:
        """Return the next value."""
        if depth > _DEPTH:
            raise Malformed("nested too deeply")
        tag = self._tag()
        if tag in (b"N", b"T", b"F"):
            return None if tag == b"N" else tag == b"T"
        if tag == b"i":
            return self._unpack(_INTEGER)[0]
        if tag == b"h":
            return int(self._bytes(1 << 16).decode("ascii"), 16)
        if tag == b"f":
            return self._unpack(_FLOAT)[0]
        if tag == b"c":
            return complex(*self._unpack(_COMPLEX))
        if tag == b"s":
            return self._bytes().decode("utf-8", "surrogatepass")
        if tag == b"b":
            return self._bytes()
        if tag in (b"x", b"m"):
            return self._tensor(tag == b"x")
        if tag in (b"l", b"t", b"d"):
            return self._items(tag, depth + 1)
        raise Malformed(f"the tag {tag!r}")

    def _items(self, tag: bytes, depth: int) -> Any:
        (count,) = self._unpack(_COUNT)
        if count > len(self._data) - self.at:  # each takes a byte at least
            raise Malformed(f"{count} items in {len(self._data) - self.at} bytes")
        if tag == b"d":
            return {self._key(depth): self.value(depth) for _ in range(count)}
        items = [self.value(depth) for _ in range(count)]
        return items if tag == b"l" else tuple(items)

    def _key(self, depth: int) -> Any:
        key = self.value(depth)
        if key is not None and not isinstance(key, bool | int | float | str | bytes):
            raise Malformed(f"a {type(key).__name__} as a key")
        return key

    def _bytes(self, most: int | None = None) -> bytes:
        if self._tag() == b"-":
            (size,) = self._unpack(_COUNT)
            if size > len(self._data) - self.at or size > (size if most is None else most):
                raise Malformed(f"{size} bytes")
            self.at += size
            return self._data[self.at - size : self.at]
        start, size = self._unpack(_EXTENT)
        if most is not None and size > most:
            raise Malformed(f"{size} bytes")
        self.lasting = False
        return self._region.take(start, size).numpy().tobytes()

    def _tensor(self, full: bool) -> torch.Tensor | _Elements:  # any shape
        """Return where a tensor lies; one without elements is all zeros, and takes no memory."""
        number, dimensions = self._data[self.at], self._data[self.at + 1]
        self.at += 2
        if number >= len(_DTYPES) or dimensions > _DIMENSIONS:
            raise Malformed(f"dtype {number}, {dimensions} dimensions")
        dtype = _DTYPES[number]
        shape = [self._unpack(_INTEGER)[0] for _ in range(dimensions)]
        elements = 1
        for length in shape:
            if length < 0:
                raise Malformed(f"the shape {shape}")
            elements *= length
        if not full:
            if elements * dtype.itemsize > self._region.size:
                raise Malformed(f"the shape {shape} of {dtype}")
            self.lasting = False
            return torch.zeros((), dtype=dtype).expand(shape)
        start, size = self._unpack(_EXTENT)
        if elements * dtype.itemsize != size or any(length > 1 << 48 for length in shape):
            raise Malformed(f"the shape {shape} of {dtype} in {size} bytes")
        data, flags = self._region.at(start, size), dtype is torch.bool
        return _Elements((data if flags else data.view(dtype)).view(shape), flags)
