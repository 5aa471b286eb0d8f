"""Remote values: saved tensors that stay on the server, with their shape and dtype here.

An index of a remote value gives another remote value and sends nothing. `fetch()` sends only the elements that the indices
select. In a block of a later trace, a remote value is the tensor itself: the session sends it to the workers, and the notebook
is not involved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from interpose.contract.display import facts, size
from interpose.contract.errors import NotFound
from interpose.contract.shown import shown
from interpose.rpc.session import Session
from interpose.rpc.threads import in_thread
from interpose.v1.value_pb2 import ARRAY_LIBRARY_NUMPY, Blob, RemoteTensor, Stack, Tensor, TensorView, Value
from interpose.wire import arrays, stacks
from interpose.wire import views as indexing
from interpose.wire.decoder import Decoder


class RemoteValue:
    """A tensor on the server, saved by a trace with `fetch=False`.

    Attributes:
        shape: the shape of the tensor (`torch.Size` where torch is installed).
        dtype: the dtype of the tensor.
        nbytes: the bytes that `fetch()` would transfer.
    """

    def __init__(self, session: Session, session_id: str, blob_id: str, view: TensorView, library: int) -> None:
        self._session = session
        self._session_id = session_id
        self._blob_id = blob_id
        self._view = view
        self._library = library
        shape = indexing.check(view)
        torch = arrays.installed_torch() if self._is_torch else None
        self.shape: Any = shape if torch is None else torch.Size(shape)
        self.dtype: Any = arrays.numpy_dtype(view.dtype) if torch is None else arrays.torch_dtype(view.dtype)
        self.nbytes = arrays.ITEM_BYTES[view.dtype]
        for length in shape:
            self.nbytes *= length

    @property
    def _is_torch(self) -> bool:
        return self._library != ARRAY_LIBRARY_NUMPY

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def session_id(self) -> str:
        """The id of the session that holds the tensor."""
        return self._session_id

    def __getitem__(self, subscript: object) -> RemoteValue:
        """Return the part of the tensor at an index, still on the server.

        Args:
            subscript: integers, slices with a positive step, `...`, None, and at most one list of positions or booleans.

        Raises:
            IndexError: the index does not fit the shape, or is of another kind.
        """
        view = TensorView()
        view.CopyFrom(self._view)
        view.indices.append(indexing.index_of(subscript, self.shape))
        return RemoteValue(self._session, self._session_id, self._blob_id, view, self._library)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return int(self.shape[0])

    def fetch(self) -> Any:
        """Return the tensor; the server sends only the bytes of this tensor.

        With a client for asyncio, write `await value.fetch()`.

        Raises:
            NotFound: the server has dropped the tensor.
            Unavailable: the server cannot be reached.
        """
        return in_thread(self.fetch_here) if self._session.awaited else self.fetch_here()

    def fetch_here(self) -> Any:
        """Do the same as `fetch`, and block also with a client for asyncio."""
        blob = Blob(id=self._blob_id, size=self.nbytes)
        try:
            data = self._session.fetch_view(self._session_id, blob, self._view)
        except NotFound as error:
            message = (
                f"this value {list(self.shape)} is not on the server any more: {error.message}; run the trace again, and "
                "fetch() sooner or use it within client.session()"
            )
            raise NotFound(message, trace_id=error.trace_id) from None
        return arrays.from_bytes(self._view.dtype, tuple(self.shape), data, torch_wanted=self._is_torch)

    def to_value(self, session_id: str) -> Value:
        """Return the wire value for a trace of the same tenant.

        Args:
            session_id: the id of the trace's session; "": the session is not open yet.
        """
        owner = "" if session_id == self._session_id else self._session_id
        remote = RemoteTensor(blob_id=self._blob_id, view=self._view, library=self._library, session_id=owner)  # type: ignore[arg-type]
        return Value(remote=remote)

    def __iter__(self) -> NoReturn:
        raise TypeError("a value on the server is not iterated over; fetch() it first")

    def __bool__(self) -> NoReturn:
        raise TypeError("a value on the server is neither true nor false; fetch() it first")

    if not TYPE_CHECKING:  # a type checker knows the names that there are

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"this value is on the server, where {name!r} is not computed: write x.fetch(), or compute it in a trace's block"
            )

    def __dir__(self) -> list[str]:
        return shown(self, ("fetch_here", "to_value"))

    def _repr_html_(self) -> str:
        rows = {"on the server": f"{arrays.dtype_name(self._view.dtype)} {list(self.shape)}", "size": size(self.nbytes)}
        return facts({**rows, "to get it here": "x.fetch(), or x[index].fetch() for a part"})

    def __repr__(self) -> str:
        return f"<value on the server: {arrays.dtype_name(self._view.dtype)} {list(self.shape)}, {self.nbytes} bytes>"


class RemoteDecoder(Decoder):
    """A decoder that leaves tensors on the server, but for small tensors."""

    session: Session
    session_id: str

    def _tensor(self, tensor: Tensor) -> Any:  # any shape
        if tensor.WhichOneof("payload") != "blob":
            return super()._tensor(tensor)
        arrays.check_layout(tensor.dtype, tensor.shape, tensor.blob.size)
        view = TensorView(dtype=tensor.dtype, shape=tensor.shape)
        return RemoteValue(self.session, self.session_id, tensor.blob.id, view, tensor.library)

    def _apart(self, stack: Stack) -> list[Any]:
        if stack.WhichOneof("payload") != "blob" or stack.small:
            return super()._apart(stack)
        stacks.check(stack, stack.blob.size)
        blob_id, library = stack.blob.id, stack.library
        return [RemoteValue(self.session, self.session_id, blob_id, view, library) for view in stacks.views(stack)]


class Fetching:
    """Replaces remote values in lists, dicts and tuples by their tensors.

    Lists and dicts are changed in place, tuples are replaced by new tuples. A remote value that occurs twice is fetched once
    and becomes a single tensor.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}

    def value(self, value: Any) -> Any:
        """Return a value in which all remote values are replaced by their tensors."""
        if isinstance(value, RemoteValue):
            if id(value) not in self._seen:
                self._seen[id(value)] = (value, value.fetch_here())
            return self._seen[id(value)][1]
        if type(value) in (list, dict):
            if id(value) not in self._seen:
                self._seen[id(value)] = (value, value)
                for key, item in list(value.items() if type(value) is dict else enumerate(value)):
                    value[key] = self.value(item)
            return value
        if type(value) is tuple:
            items = tuple(self.value(item) for item in value)
            return value if all(new is old for new, old in zip(items, value, strict=True)) else items
        return value
