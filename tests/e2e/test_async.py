"""The client for asyncio on the whole service: what it gives is what the ordinary client gives."""

from __future__ import annotations

import asyncio

import torch

import interpose
from tests.e2e.service import RunningService

PROMPT = "The Eiffel Tower is in"
PROMPTS = [PROMPT, "one two three", "The capital of Spain is", "The fox"]


async def test_everything_is_awaited(service: RunningService, model: interpose.Model) -> None:
    """Traces one by one and at once, a stream, a job, a session, and an edit."""
    plain = []
    for prompt in PROMPTS:
        with model.trace(prompt, max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:
            hidden = [].save()
            for _step in tracer.iter[:]:
                hidden.append(model.model.layers[1].output[0])
        plain.append((hidden, tracer.result))

    def same(found: list[torch.Tensor], number: int) -> bool:
        """Whether these are the values of a prompt's first steps."""
        return all((a - b).abs().max() < 1e-4 for a, b in zip(found, plain[number][0], strict=False))

    async with await interpose.connect_async(service.address, progress=False) as client:
        theirs = await client.model("llama")

        async def run(prompt: str) -> tuple[list[torch.Tensor], interpose.Result]:
            async with theirs.trace(prompt, max_tokens=3, temperature=0.0, ignore_eos=True) as tracer:
                hidden = [].save()
                for _step in tracer.iter[:]:
                    hidden.append(theirs.model.layers[1].output[0])
            return hidden, tracer.result

        for number, (hidden, result) in enumerate(await asyncio.gather(*map(run, PROMPTS))):
            assert len(hidden) == 3 and same(hidden, number) and result == plain[number][1]

        async with theirs.trace(PROMPT, max_tokens=3, temperature=0.0, ignore_eos=True, stream=True) as streamed:
            rows = [].save()
            for _step in streamed.iter[:]:
                rows.append(theirs.model.layers[1].output[0])
        lengths = [(len(out.saves["rows"]), len(out.token_ids)) async for out in streamed.stream()]
        assert lengths == [(1, 1), (2, 2), (3, 3)]
        assert len(rows) == 3 and same(rows, 0) and streamed.result == plain[0][1]

        async with theirs.trace(PROMPT, blocking=False, max_tokens=3, temperature=0.0, ignore_eos=True) as background:
            late = [].save()
            for _step in background.iter[:]:
                late.append(theirs.model.layers[1].output[0])
        await background.job.wait(timeout=60)
        assert len(late) == 3 and same(late, 0) and background.result == plain[0][1]
        found = client.job(background.job.id)
        assert (await found.status()).state == "done" and same((await found.result())["late"], 0)
        await found.forget()

        async with client.session() as session:
            async with theirs.trace(PROMPT):
                wide = theirs.model.layers[1].output[0].repeat(20, 1).save()
            assert isinstance(wide, interpose.RemoteValue) and set(await session.saved()) == {"wide"}
            row = await wide[-1].fetch()
            async with theirs.trace(PROMPT):
                theirs.model.layers[1].output[0][-1] = wide[-1] * 2
                double = theirs.model.layers[1].output[0][-1].save()
        assert same([wide[: len(wide) // 20]], 0) and torch.equal(wide[-1], row) and torch.equal(double, row * 2)

        async with theirs.edit("calm"):
            theirs.logits.output[:, 7] = 1e4
        assert [edit.name for edit in await theirs.edits()] == ["calm"]
        async with theirs.trace(PROMPT, edits=["calm"]) as calm:
            pass
        assert calm.result.token_ids == [7] and await theirs.clear_edits() == 1
