"""A second service on the same machine, from its start to its end: tenants, and nothing left when it is told to stop."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import grpc
import httpx
import openai
import pytest
import torch

import interpose
from benchmarks.processes import title
from executor.cluster.shared_memory import SHARED_MEMORY, mapped_by
from interpose.contract.errors import ServiceFailure, Unauthenticated, Unavailable
from interpose.v1 import service_pb2, value_pb2
from interpose.v1 import trace_pb2 as pb
from tests.e2e.conftest import RETENTION_SECONDS
from tests.e2e.service import RunningService, failure_of, wait_for
from tests.e2e.test_calls import trace
from tests.e2e.test_fidelity import (
    EDITS,
    PROMPTS,
    STEPS,
    TOLERANCE,
    Served,
    check_edit,
    check_everything,
    check_patch,
    read_everything,
)
from tests.e2e.test_large_values import Memory
from tests.engine.shipping.library import installed
from tests.oracle import Oracle, difference

pytestmark = pytest.mark.timeout(500)


def ranks_share_memory() -> bool:
    """Whether ranks exchange tensors through shared memory here.

    Of vLLM's builds for x86 processors, the build for AVX-512 does and the build for AVX2 does not. On GPUs NCCL is used.
    """
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return not torch.cuda.is_available() and hasattr(torch.ops._C, "init_shm_manager")


def test_what_a_running_engine_shares_has_no_name(service: RunningService) -> None:
    """A name would stay when a worker is killed."""
    # Files of messages to the workers, and of tensors that ranks exchange.
    kinds = {"psm_", "cpushm"} if ranks_share_memory() else {"psm_"}
    workers = service.processes("LazyWorkerActor")
    assert workers
    for worker in workers:
        used = {region.path for region in worker.memory_maps() if region.path.startswith(f"{SHARED_MEMORY}/")}
        assert {kind for kind in ("psm_", "cpushm") if any(kind in path for path in used)} == kinds, used
    assert not mapped_by(process.pid for process in service.processes())


def test_tenants(second: RunningService) -> None:
    with pytest.raises(Unauthenticated):
        interpose.connect(second.address)
    with pytest.raises(Unauthenticated):
        interpose.connect(second.address, api_key="red-key-2")
    with (
        interpose.connect(second.address, api_key="red-key-1") as red,
        interpose.connect(second.address, api_key="blue-key-1") as blue,
    ):
        model = red.model()
        assert model.name == "tiny"
        assert model.max_model_len == 512
        with model.trace("one two three"):
            hidden = model.model.layers[0].output[0].save()
        assert hidden.shape[-1] == 128
        assert [tenant.name for tenant in red.status().tenants] == ["red"]
        assert {tenant.name for tenant in blue.status().tenants} <= {"blue"}
        # What is red's is not there for blue.
        red_session = red.own_session.open()
        with pytest.raises(interpose.NotFound, match="no such session"):
            blue.own_session.fetch(red_session, [value_pb2.Blob(id="x", size=1)])
        with model.trace("one two three", blocking=False) as tracer:
            hidden = model.model.layers[0].output[0].save()
        for call in (interpose.Job.status, interpose.Job.result, interpose.Job.cancel, interpose.Job.forget):
            with pytest.raises(interpose.NotFound, match="no such session"):
                call(blue.job(tracer.job.id))
        assert red.job(tracer.job.id).result()["hidden"].shape[-1] == 128
        tracer.job.forget()


def test_edits_are_the_tenants_own(second: RunningService) -> None:
    """Each has one of the same name; neither sees, runs or clears the other's."""
    with (
        interpose.connect(second.address, api_key="red-key-1", progress=False) as red,
        interpose.connect(second.address, api_key="blue-key-1", progress=False) as blue,
    ):
        reds, blues = red.model(), blue.model()

        def chosen(model: interpose.Model) -> int:
            with model.trace("one two three", edits=["calm"]) as tracer:
                pass
            return tracer.result.token_ids[0]

        with reds.edit("calm"):
            reds.logits.output[:, 7] = 1e4
        assert not blues.edits()
        with pytest.raises(interpose.NotFound, match="there is no edit 'calm' of tiny; there are none"):
            chosen(blues)
        with blues.edit("calm"):
            blues.logits.output[:, 9] = 1e4
        assert (chosen(reds), chosen(blues)) == (7, 9)
        assert blues.clear_edits() == 1 and not blues.edits()
        assert [edit.name for edit in reds.edits()] == ["calm"] and chosen(reds) == 7
        assert reds.clear_edits() == 1


def test_uploads_are_the_tenants_own(second: RunningService) -> None:
    """A tenant cannot learn that another has sent the same weights: it sends them itself."""
    weights = torch.arange(200_000, dtype=torch.float32)
    digest = f"sha256:{hashlib.sha256(weights.numpy()).hexdigest()}"
    with (
        interpose.connect(second.address, api_key="red-key-1", progress=False) as red,
        interpose.connect(second.address, api_key="blue-key-1", progress=False) as blue,
    ):
        model = red.model()
        with model.trace("one two three"):
            total = weights.sum().save()
        assert total == weights.sum()

        def held(client: interpose.Client) -> int:
            with client.session() as session:
                ask = service_pb2.UploadRequest(session_id=session.id, digest=digest, size=weights.nbytes)
                return client.call("Upload", ask).received

        assert held(red) == weights.nbytes, "a later session of the tenant"
        assert held(blue) == 0
        blues = blue.model()
        with blues.trace("one two three"):
            total = weights.sum().save()
        assert total == weights.sum()


def test_code_of_libraries_in_a_sandbox(
    second: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant without trust hears what the sandbox has; other code is sent as source, and is imported nowhere else."""
    with (
        interpose.connect(second.address, api_key="red-key-1", progress=False) as red,
        installed(tmp_path, monkeypatch) as tiny_sae,
    ):
        assert (
            {"numpy", "torch"}
            <= {row["package"] for row in red.packages()}
            <= {"einops", "interpose", "numpy", "torch"}
        )
        model = red.model()
        with model.trace("one two three"):
            plain = model.model.layers[1].output[0].save()
        sae = tiny_sae.load(5, plain.shape[-1])
        with model.trace("one two three"):
            features = sae.encode(model.model.layers[1].output[0]).save()
        assert torch.allclose(features, sae.encode(plain).detach(), atol=1e-5)
        with pytest.raises(interpose.InvalidArgument, match="imports transformers, which .*The server's sandbox has"):
            with model.trace("one two three"):
                import transformers

                name = transformers.__name__.save()


def test_what_is_kept_is_bounded_in_time_and_size(second: RunningService) -> None:
    with interpose.connect(second.address, api_key="red-key-1", progress=False) as red:
        model = red.model()
        with model.trace("one two three", blocking=False) as tracer:
            large = model.model.layers[0].output[0].new_ones(1_400_000).save()
        tracer.job.wait(timeout=60)
        assert 0 < tracer.job.status().seconds_left <= RETENTION_SECONDS
        with red.session() as s:
            with model.trace("one two three"):
                first = model.model.layers[0].output[0].new_ones(1_400_000).save()
            with pytest.raises(interpose.QuotaExceeded, match="no room for 5600000 more: save less, or close it"):
                with model.trace("one two three"):
                    second_one = model.model.layers[0].output[0].new_ones(1_400_000).save()
            assert set(s.saved()) == {"first"}
        assert first.sum() == 1_400_000

        def gone() -> bool:
            try:
                tracer.job.status()
            except interpose.NotFound as error:
                return "kept for 12 s after the trace has ended" in error.message
            return False

        wait_for(gone, 60)
        with pytest.raises(interpose.NotFound, match="kept for 12 s"):
            red.job(tracer.job.id).result()


def test_kept_sessions_do_not_give_way(second: RunningService) -> None:
    with interpose.connect(second.address, api_key="blue-key-1", progress=False) as blue:
        kept = [blue.session() for _ in range(3)]
        assert len({session.id for session in kept}) == 3
        with pytest.raises(
            interpose.QuotaExceeded, match="blue has 3 sessions open, the most a tenant may have"
        ) as caught:
            assert blue.session().id
        assert caught.value.retry_after > 0
        kept[0].close()
        assert blue.session(kept[1].id).saved() == {}
        with blue.session() as another:
            assert another.id
        for session in kept:
            session.close()


_CLASSES = """
import json, pickle, ray
ray.init(address="auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
kept = ray.get_runtime_context().worker.gcs_client
keys = kept.internal_kv_keys(b"ActorClass", b"fun")
print(json.dumps([pickle.loads(kept.internal_kv_get(key, b"fun"))["class_name"] for key in keys]))
"""


def _connected(code: str) -> str:
    """`_CLASSES` with something before it is asked what there is."""
    connect, ask = _CLASSES.split("kept = ")
    return f"{connect}{code}kept = {ask}"


def test_a_message_without_a_key_is_not_kept(second: RunningService) -> None:
    """The proxy ends the call before it has read the message."""
    [proxy] = second.processes("ProxyActor")
    with Memory([proxy]) as memory, ThreadPoolExecutor(4) as pool:
        send = second.channel.unary_unary("/interpose.v1.Interpose/Hello")
        for call in [pool.submit(send, bytes(48 << 20), timeout=60) for _ in range(4)]:
            with pytest.raises(grpc.RpcError) as caught:
                call.result()
            assert failure_of(caught.value).failure.code == pb.ERROR_CODE_UNAUTHENTICATED
    assert max(memory.grown.values()) < 48 << 20


def test_a_new_session_leaves_no_class_with_ray(second: RunningService) -> None:
    """Ray's control service would keep it for good, and so would each process that hears of the session's actor.

    Of three sessions, the last starts an actor of its own here, which ends with it.
    """

    def actors() -> set[int]:
        return {process.pid for process in second.processes() if "ray::Session" in title(process)}

    def open_three() -> None:
        clients = [interpose.connect(second.address, api_key="red-key-1", progress=False) for _ in range(3)]
        for client in clients:
            client.own_session.open()
        seen.append(actors())
        for client in clients:
            client.close()

    seen: list[set[int]] = []
    for _ in range(3):
        open_three()
    assert len(set.union(*seen)) >= 4, "one of them was to be a new one each time"
    classes = json.loads(second.joined(_CLASSES).splitlines()[-1])
    assert classes.count("SessionHost") == 1, classes


def test_who_looks_for_the_directory_again_leaves_no_class_with_ray(second: RunningService) -> None:
    """A replica looks ten times a second while an old one ends."""
    look = "from actors.find_directory import directory\nfor _ in range(5): directory(None)\n"
    before, after = (json.loads(second.joined(code).splitlines()[-1]) for code in (_CLASSES, _connected(look)))
    assert after.count("Directory") <= before.count("Directory") + 1, after


def test_one_worker_computes_what_transformers_does(second: RunningService, checkpoints: dict[str, Path]) -> None:
    """What is read, and what follows from edits and from a patch."""
    with interpose.connect(second.address, api_key="blue-key-1", progress=False) as client:
        served = Served(client, "tiny", checkpoints["llama"], Oracle(checkpoints["llama"]))
        for prompt in PROMPTS:
            check_everything(served, prompt, *read_everything(served, prompt))
        for kind in EDITS:
            check_edit(served, kind)
        check_patch(served)


def test_each_prompt_with_its_adapter(
    second: RunningService, checkpoints: dict[str, Path], merged: dict[str, Path]
) -> None:
    """Prompts of one trace, without an adapter and with each, are what transformers makes of weights that it was merged into."""
    weights = {None: checkpoints["llama"], **merged}
    prompt = PROMPTS[0]
    with interpose.connect(second.address, api_key="blue-key-1", progress=False) as client:
        served = [Served(client, "tiny", path, Oracle(path)) for path in weights.values()]
        model, places = served[0].model, [(module, kind) for module, kind, _ in served[0].places]
        assert model.adapters == list(client.status().models[0].adapters) == list(merged)
        with model.trace(max_tokens=STEPS, ignore_eos=True, temperature=0.0) as tracer:
            values, tokens = {}.save(), {}.save()
            for name in weights:
                with tracer.invoke(prompt, lora=name):
                    seen = []
                    for _step in tracer.iter[:]:
                        for module, kind in places:
                            seen.append((module.output if kind == "output" else module.input).save())
                    values[name] = seen
                    tokens[name] = tracer.result.token_ids
        for one, name in zip(served, weights, strict=True):
            check_everything(one, prompt, values[name], tokens[name])
        truths = [one.oracle.run(prompt).logits[0] for one in served]
        assert all(difference(a, b) > 1e-2 for a, b in combinations(truths, 2)), "the adapters must show"
        for name, truth in zip(merged, truths[1:], strict=True):
            with model.trace(lora=name, temperature=0.0) as tracer:
                with tracer.invoke(prompt):
                    adapted = model.logits.output.save()
                with tracer.invoke(prompt, lora=None):
                    plain = model.logits.output.save()
            assert max(difference(adapted, truth), difference(plain, truths[0])) <= TOLERANCE


def test_an_adapter_that_there_is_not(second: RunningService, merged: dict[str, Path]) -> None:
    with interpose.connect(second.address, api_key="blue-key-1", progress=False) as client:
        for name in merged:
            with pytest.raises(interpose.InvalidArgument, match="there is no LoRA adapter") as caught:
                client.model().trace("one two three", lora=name[:-1])
            assert caught.value.suggestions == (name,)
        # What the client would not send, the server refuses.
        asked = trace()
        asked.model, asked.lora = "tiny", "nobody"
        with pytest.raises(
            ServiceFailure, match="there is no LoRA adapter 'nobody'; it has " + ", ".join(merged)
        ) as refused:
            second.submit(asked, metadata=(("x-api-key", "blue-key-1"),))
        assert refused.value.failure.code == pb.ERROR_CODE_INVALID_ARGUMENT


def test_keys_of_the_openai_endpoint(second: RunningService) -> None:
    with openai.OpenAI(base_url=second.http, api_key="nobody's key", max_retries=0, timeout=60) as nobody:
        with pytest.raises(openai.AuthenticationError, match="not known"):
            nobody.completions.create(model="tiny", prompt="x", max_tokens=2)
    with openai.OpenAI(base_url=second.http, api_key="red-key-1", max_retries=10, timeout=60) as red:
        assert red.completions.create(model="tiny", prompt="x", max_tokens=2).choices[0].text
    assert httpx.get(f"{second.http}/models").status_code == 401


def test_a_server_that_stops_in_the_middle(second: RunningService) -> None:
    errors: list[Exception] = []
    started = threading.Event()

    def run() -> None:
        client = interpose.connect(second.address, api_key="red-key-1", progress=False)
        model = client.model()
        started.set()
        try:
            with model.trace("one two three", max_tokens=60, ignore_eos=True) as tracer:
                for _step in tracer.iter[:]:
                    import time

                    time.sleep(0.5)
        except interpose.InterposeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(30)
    time.sleep(2)
    begun = time.monotonic()
    assert second.stop(signal.SIGINT) == 0
    assert time.monotonic() - begun < 40
    thread.join(30)
    assert len(errors) == 1
    assert isinstance(errors[0], Unavailable)
    with pytest.raises(Unavailable):
        interpose.connect(second.address, api_key="red-key-1", timeout=3)
