"""Admission: everything that comes in is refused with a reason, or within bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interpose.contract.errors import ServiceFailure
from interpose.contract.version import PROTOCOL
from interpose.v1 import model_pb2, service_pb2, value_pb2
from interpose.v1 import trace_pb2 as pb
from serve_app.settings import ANONYMOUS, Limits, ModelSettings, Tenant, settings_from
from serve_app.tenants import admission

MODEL = ModelSettings(model="tiny", limits=Limits(max_invokes=3, max_program_bytes=1024))
DESCRIPTION = model_pb2.ModelDescription(
    max_model_len=16, vocab_size=100, sampling_parameters=["max_tokens", "temperature", "top_k"]
)
DIGEST = "sha256:" + "0" * 64


def trace(**fields: object) -> pb.Trace:
    invoke = pb.Invoke(prompt=pb.Prompt(text="hello"), program=pb.Program(source="x = 1\n"))
    return pb.Trace(**{"id": "t-1", "invokes": [invoke], **fields})


def refusal(message: pb.Trace, tenant: Tenant = ANONYMOUS, model: ModelSettings = MODEL) -> pb.Failure:
    with pytest.raises(ServiceFailure) as caught:
        admission.check_trace(message, model, tenant, DESCRIPTION)
    return caught.value.failure


def test_a_plain_trace_is_taken() -> None:
    admission.check_trace(trace(), MODEL, ANONYMOUS, DESCRIPTION)


@pytest.mark.parametrize("trace_id", ["", " ", "a/b", "x" * 101, "-x", "ä"])
def test_trace_ids(trace_id: str) -> None:
    assert "id" in refusal(trace(id=trace_id)).message


@pytest.mark.parametrize("count", [0, 4])
def test_number_of_invokes(count: int) -> None:
    assert "invoke" in refusal(trace(invokes=[trace().invokes[0]] * count)).message


def test_invokes_that_wait_for_each_other() -> None:
    message = trace(invokes=[trace().invokes[0]] * 3)
    message.invokes[1].after.append(0)
    message.invokes[2].after.append(1)
    admission.check_trace(message, MODEL, ANONYMOUS, DESCRIPTION)
    message.invokes[0].gang = message.invokes[2].gang = True
    assert "start together" in refusal(message).message
    message = trace(exchanged=["a b"])
    assert "names" in refusal(message).message


def test_an_unknown_sampling_parameter_names_the_near_misses() -> None:
    message = trace()
    message.invokes[0].sampling.add(name="max_token", value=value_pb2.Value(integer=3))
    failure = refusal(message)
    assert failure.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert failure.invoke == 0
    assert "max_tokens" in failure.suggestions
    assert failure.trace_id == "t-1"


def test_a_default_for_all_invokes_is_checked_too() -> None:
    message = trace(sampling=[value_pb2.Binding(name="nonsense")])
    assert refusal(message).invoke == -1


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (pb.Prompt(), "without a prompt"),
        (pb.Prompt(token_ids=pb.TokenIds()), "no tokens"),
        (pb.Prompt(token_ids=pb.TokenIds(ids=[1] * 16)), "at most 15"),
        (pb.Prompt(token_ids=pb.TokenIds(ids=[100])), "vocabulary"),
        (pb.Prompt(chat=pb.Chat()), "chat"),
    ],
)
def test_prompts(prompt: pb.Prompt, words: str) -> None:
    message = trace()
    message.invokes[0].prompt.CopyFrom(prompt)
    assert words in refusal(message).message


def test_a_long_program() -> None:
    message = trace()
    message.invokes[0].program.source = "x = 1\n" * 1000
    assert "limit is 1024" in refusal(message).message


def test_a_mebibyte_of_source_is_refused_with_default_settings() -> None:
    message = trace()
    message.invokes[0].program.source = "x=1\n" * 260_000
    model = ModelSettings(model="tiny")
    with pytest.raises(ServiceFailure) as error:
        admission.check_trace(message, model, ANONYMOUS, DESCRIPTION)
    assert error.value.failure.code == pb.ERROR_CODE_INVALID_ARGUMENT
    assert "the limit is 65536: keep large constants in variables" in error.value.failure.message


def test_the_sources_of_a_trace_together() -> None:
    limits = Limits(max_program_bytes=1024, max_trace_program_bytes=1500)
    message = trace()
    texts = [f"def f(): return {str(number) * 800!r}" for number in range(2)]
    functions = [value_pb2.Value(function=value_pb2.Function(name="f", source=text)) for text in texts]
    message.scope.values.extend([functions[0], functions[0]])
    model = ModelSettings(model="tiny", limits=limits)
    admission.check_trace(message, model, ANONYMOUS, DESCRIPTION)
    message.scope.values.append(functions[1])
    with pytest.raises(ServiceFailure, match="the limit is 1500: trace fewer different blocks"):
        admission.check_trace(message, model, ANONYMOUS, DESCRIPTION)
    edit = pb.Edit(name="e", scope=message.scope)
    with pytest.raises(ServiceFailure, match="the edit's block, functions and classes have"):
        admission.check_edit(edit, model, ANONYMOUS)


@pytest.mark.parametrize("place", [{"first_line": 1 << 31}, {"indent": 1 << 31}, {"filename": "x" * 5000}])
def test_a_program_stands_where_a_file_has_lines(place: dict[str, object]) -> None:
    """Compilers count lines and columns in 32 bits, and every line of a traceback repeats the name."""
    message = trace()
    message.invokes[0].program.MergeFrom(pb.Program(**place))
    assert "the limits are" in refusal(message).message
    function = value_pb2.Value(function=value_pb2.Function(name="f", source="def f(): pass", **place))
    assert "'f' is said to begin" in refusal(trace(scope=value_pb2.Objects(values=[function]))).message


def test_absurdly_long_names_are_refused_as_others_are() -> None:
    """Near misses of a name are looked for in its beginning only: looking takes time and memory."""
    long = "x" * 5_000_000
    settings = settings_from({"models": [{"model": "tiny-llama"}, {"model": "tiny-gpt2"}]})
    with pytest.raises(ServiceFailure, match="there is no model") as caught:
        admission.model_for(settings, long)
    failures = [
        caught.value.failure,
        refusal(trace(sampling=[value_pb2.Binding(name=long)])),
        refusal(trace(lora=long)),
    ]
    assert all(len(failure.message) < 500 for failure in failures)


def test_names_are_names() -> None:
    message = trace()
    message.invokes[0].program.writes.append("not a name")
    assert "is not a name" in refusal(message).message


def test_an_invoke_waits_for_earlier_ones_only() -> None:
    message = trace()
    message.invokes[0].after.append(0)
    assert "earlier" in refusal(message).message


def pickled() -> pb.Trace:
    inner = value_pb2.Value(list=value_pb2.Items(items=[value_pb2.Value(pickled=b"x")]))
    keys = value_pb2.Mapping(keys=[value_pb2.Value(text="k")], values=[inner])
    return trace(scope=value_pb2.Objects(values=[value_pb2.Value(dict=keys)]))


def test_pickles_need_trust_and_a_server_that_allows_them() -> None:
    allowing = ModelSettings(model="tiny", limits=Limits(pickled=True))
    trusted = Tenant(name="t", trust="full")
    assert refusal(pickled(), ANONYMOUS, allowing).code == pb.ERROR_CODE_PERMISSION_DENIED
    assert refusal(pickled(), trusted, MODEL).code == pb.ERROR_CODE_PERMISSION_DENIED
    admission.check_trace(pickled(), allowing, trusted, DESCRIPTION)


@pytest.mark.parametrize("place", ["entry", "item", "key", "name"])
@pytest.mark.parametrize(
    "value",
    [
        value_pb2.Value(stack=value_pb2.Stack(dtype=value_pb2.DTYPE_BOOL, count=1, shape=[1], data=b"1")),
        value_pb2.Value(stacked=value_pb2.StackSlice(stack=0, first=0, count=(1 << 32) - 1)),
    ],
    ids=["stack", "slice"],
)
def test_a_client_sends_no_stacks(value: value_pb2.Value, place: str) -> None:
    items = value_pb2.Value(tuple=value_pb2.Items(items=[value]))
    keys = value_pb2.Value(dict=value_pb2.Mapping(keys=[value], values=[value_pb2.Value(none=True)]))
    message = trace(
        scope=value_pb2.Objects(values=[{"entry": value, "item": items, "key": keys, "name": items}[place]])
    )
    if place == "name":
        message = trace()
        message.invokes[0].program.reads.add(name="x", value=value)
    assert "a stack of tensors" in refusal(message).message


def test_too_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_VALUES", 10)
    items = value_pb2.Value(list=value_pb2.Items(items=[value_pb2.Value(integer=i) for i in range(11)]))
    assert "tensor" in refusal(trace(scope=value_pb2.Objects(values=[items]))).message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_refusal(data: bytes) -> None:
    with pytest.raises(ServiceFailure) as caught:
        request = admission.parse(service_pb2.SubmitRequest, data, 100)
        assert len(data) <= 100
        # The bytes may be any message, but it has no invoke with a prompt.
        admission.check_trace(request.trace, MODEL, ANONYMOUS, DESCRIPTION)
    assert caught.value.failure.code == pb.ERROR_CODE_INVALID_ARGUMENT


def field(number: int, data: bytes) -> bytes:
    """One length-delimited field, as protobuf writes it."""
    size, length = len(data), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def test_a_deeply_nested_message_is_refused() -> None:
    value = value_pb2.Value(integer=1).SerializeToString()
    for _ in range(5000):
        value = field(10, field(1, value))  # Value.list.items
    data = field(3, field(3, field(1, value)))  # SubmitRequest.trace.scope.values
    with pytest.raises(ServiceFailure, match="not a valid"):
        admission.parse(service_pb2.SubmitRequest, data, 1 << 20)


@pytest.mark.parametrize(
    ("protocol", "side"), [(PROTOCOL + 1, "on the server"), (0, "on the client"), (1 << 31, "on the server")]
)
def test_protocols(protocol: int, side: str) -> None:
    admission.check_protocol(PROTOCOL)
    with pytest.raises(ServiceFailure, match=side):
        admission.check_protocol(protocol)


def test_an_unknown_model_names_the_near_misses() -> None:
    settings = settings_from({"models": [{"model": "tiny-llama"}, {"model": "tiny-gpt2"}]})
    assert admission.model_for(settings, "tiny-gpt2").name == "tiny-gpt2"
    with pytest.raises(ServiceFailure) as caught:
        admission.model_for(settings, "tiny-lama")
    assert caught.value.failure.code == pb.ERROR_CODE_NOT_FOUND
    assert list(caught.value.failure.suggestions) == ["tiny-llama"]
    with pytest.raises(ServiceFailure, match="say which model"):
        admission.model_for(settings, "")


@pytest.mark.parametrize(
    "fields",
    [
        {"digest": "md5:0"},
        {"digest": "sha256:" + "G" * 64},
        {"digest": DIGEST, "size": 1 << 62},
        {"digest": DIGEST, "size": 4, "offset": 2, "data": b"abc"},
        {"digest": DIGEST, "size": 1 << 30, "data": b"x" * ((1 << 20) + 1)},
    ],
)
def test_uploads(fields: dict[str, object]) -> None:
    with pytest.raises(ServiceFailure):
        admission.check_upload(service_pb2.UploadRequest(**fields), Limits())


def test_values_of_earlier_traces_are_named_and_their_indices_checked() -> None:
    message = trace()
    view = value_pb2.TensorView(dtype=value_pb2.DTYPE_FLOAT32, shape=[4, 2])
    for blob_id in ("b", "a", "b"):
        message.scope.values.add().remote.CopyFrom(value_pb2.RemoteTensor(blob_id=blob_id, view=view))
    assert admission.check_trace(message, MODEL, ANONYMOUS, DESCRIPTION) == {"": ("a", "b")}
    message.scope.values[0].remote.view.indices.add().items.add(at=9)
    assert "out of bounds" in refusal(message).message
    message.scope.values[0].remote.view.shape[0] = -1
    assert "negative" in refusal(message).message


def test_edits_are_named_once_each_and_brought_by_nobody() -> None:
    admission.check_trace(trace(edits=["a", "b"]), MODEL, ANONYMOUS, DESCRIPTION)
    assert "each once" in refusal(trace(edits=["a", "a"])).message
    assert "up to 16" in refusal(trace(edits=[str(number) for number in range(17)])).message
    assert "does not bring" in refusal(trace(applied=[pb.Edit(name="a")])).message


def test_a_view_that_does_not_fit_the_bytes() -> None:
    data = np.arange(8, dtype=np.uint8)
    view = value_pb2.TensorView(dtype=value_pb2.DTYPE_UINT8, shape=[2, 4])
    view.indices.add().items.add(at=1)
    assert admission.selected(data, view).tolist() == [4, 5, 6, 7]
    view.shape[1] = 5
    with pytest.raises(ServiceFailure, match="8 bytes are not a uint8 array") as caught:
        admission.selected(data, view)
    assert caught.value.failure.code == pb.ERROR_CODE_INVALID_ARGUMENT


VARIABLE = pb.SessionVariable(id="v", entry=0, canonical=True)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ([pb.SessionVariable(id="", entry=0, canonical=True)], "letters"),
        ([pb.SessionVariable(id="a/b", entry=0, canonical=True)], "letters"),
        ([pb.SessionVariable(id="v", entry=9, canonical=True)], "entry 9"),
        ([pb.SessionVariable(id="v", entry=1, canonical=True)], "entry 1"),
        ([pb.SessionVariable(id="v", entry=0)], "entry 0"),
        ([VARIABLE, pb.SessionVariable(id="v", entry=2)], "one id"),
        ([VARIABLE, pb.SessionVariable(id="w", entry=0, canonical=True)], "one entry"),
        ([pb.SessionVariable(id=str(i), entry=i) for i in range(admission.MAX_VARIABLES + 1)], "up to 256"),
    ],
)
def test_what_traces_of_a_session_cannot_share(variables: list[pb.SessionVariable], words: str) -> None:
    message = trace(variables=variables)
    message.scope.values.extend([value_pb2.Value(none=True), value_pb2.Value(integer=3), value_pb2.Value(list={})])
    assert words in refusal(message).message


def test_what_they_share() -> None:
    message = trace(variables=[VARIABLE, pb.SessionVariable(id="w", entry=1)])
    message.scope.values.extend([value_pb2.Value(none=True), value_pb2.Value(list={})])
    admission.check_trace(message, MODEL, ANONYMOUS, DESCRIPTION)


def test_values_of_other_sessions() -> None:
    message = trace()
    view = value_pb2.TensorView(dtype=value_pb2.DTYPE_FLOAT32, shape=[2])
    for session in ("", "s", "s", *map(str, range(admission.MAX_SESSIONS - 2))):
        message.scope.values.add().remote.CopyFrom(
            value_pb2.RemoteTensor(blob_id=f"{session}/b", view=view, session_id=session)
        )
    found = admission.check_trace(message, MODEL, ANONYMOUS, DESCRIPTION)
    assert found[""] == ("/b",) and found["s"] == ("s/b",) and len(found) == admission.MAX_SESSIONS
    message.scope.values.add().remote.CopyFrom(value_pb2.RemoteTensor(blob_id="b", view=view, session_id="one more"))
    assert "more than 16 sessions" in refusal(message).message


def test_an_adapter_that_is_not_served_names_the_near_misses() -> None:
    served = model_pb2.ModelDescription()
    served.CopyFrom(DESCRIPTION)
    served.adapters.extend(["calm", "formal"])
    message = trace(lora="calm")
    message.invokes[0].lora = "formal"
    admission.check_trace(message, MODEL, ANONYMOUS, served)
    message.invokes[0].lora = "formel"
    with pytest.raises(ServiceFailure, match="no LoRA adapter 'formel'") as caught:
        admission.check_trace(message, MODEL, ANONYMOUS, served)
    assert caught.value.failure.suggestions == ["formal"] and caught.value.failure.invoke == 0
    assert "it has none" in refusal(trace(lora="calm")).message
