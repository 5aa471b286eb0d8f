"""A first trace: reads a model's residual stream, changes it, and compares the texts.

python examples/first_trace.py --address localhost:9000 --picture lens.png
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import interpose
from interpose import plots
from interpose.verbs.lenses import lens_of
from interpose.verbs.tokens import decode, encode, layer_at

PROMPT = "The Eiffel Tower is in"
SAMPLING = {"max_tokens": 12, "temperature": 0.0}
EDITED_DEPTH = 0.375  # of the layer without its MLP; 1: after the last


def read(model: Any, ids: list[int]) -> tuple[Any, ...]:
    """Read a prompt's residual stream.

    Returns:
        The residual stream after the last layer, [tokens, hidden], what each layer would say, the climb of the answer,
        the logits, [1, vocab], and the result.
    """
    with model.trace(ids, **SAMPLING) as tracer:
        best, last = [].save(), []
        for block in model.blocks:
            stream = block.resid_post
            scores = model.unembed(model.final_norm(stream)).float()
            top = scores.softmax(-1).max(-1)
            best.append((top.indices, top.values))
            last.append(scores[-1])
        stream.save()
        logits = model.logits.output.save()
        answer = int(logits[0].argmax())
        climb = [(int((row > row[answer]).sum()) + 1, float(row.softmax(-1)[answer])) for row in last].save()
        result = tracer.result.save()
    return stream, best, climb, logits, result


def edit(model: Any, ids: list[int], edited: int, answer: int) -> tuple[Any, ...]:
    """Silence one layer's MLP over the prompt; return the lens, the climb and the result."""
    with model.trace(ids, **SAMPLING) as tracer:
        best, climb = [].save(), [].save()
        for index, block in enumerate(model.blocks):
            if index == edited:
                block.mlp.act[:] = 0
            scores = model.unembed(model.final_norm(block.resid_post)).float()
            top = scores.softmax(-1).max(-1)
            best.append((top.indices, top.values))
            row = scores[-1]
            climb.append((int((row > row[answer]).sum()) + 1, float(row.softmax(-1)[answer])))
        result = tracer.result.save()
    return best, climb, result


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Print how long something took."""
    start = time.perf_counter()
    yield
    print(f"[{name}: {time.perf_counter() - start:.2f} s]", flush=True)


def block_of(function: Any) -> str:
    """Return the source of the trace in a function."""
    source = inspect.getsource(function)
    return textwrap.indent(textwrap.dedent(source[source.index("    with") : source.index("    return")]), "    | ")


def main() -> int:
    """Run both traces; return 0 if the edit changed the continuation."""
    parser = argparse.ArgumentParser(description="Read and change a served model's residual stream.")
    parser.add_argument("--address", default="localhost:9000")
    parser.add_argument("--model", help="name of the served model, if there are several")
    parser.add_argument("--picture", type=Path, help="where to write the logit lens, a PNG")
    args = parser.parse_args()

    with phase("connect"):
        client = interpose.connect(args.address, progress=False)
        model = client.model(args.model)

    ids, edited_layer = encode(model, PROMPT), layer_at(model, EDITED_DEPTH)
    with phase("trace that only reads"):
        stream, lens, climb, logits, result = read(model, ids)
    answer = int(logits[0].argmax())
    print("residual stream after the last layer:", tuple(stream.shape), stream.dtype)
    print("at the last token it begins:", [round(float(x), 4) for x in stream[-1, :5]])
    print("logits:", tuple(logits.shape), "best:", repr(decode(model, answer)))
    print(block_of(edit), end="")
    with phase("trace that edits"):
        edited_lens, edited_climb, edited = edit(model, ids, edited_layer, answer)

    print(f"prompt:                      {PROMPT!r}")
    print(f"continuation:                {result.text!r}")
    print(f"without the MLP of layer {edited_layer:2}:  {edited.text!r}")
    changed: bool = result.token_ids != edited.token_ids
    print("the edit", "changed" if changed else "DID NOT CHANGE", "the continuation")
    print(f"the answer {decode(model, answer)!r} after each layer, rank and probability:")
    for layer, (rank, probability) in enumerate(climb):
        print(f"  layer {layer:2}: {rank:7,}  {probability:.4f}")

    if args.picture:
        with phase("picture"):
            layers = tuple(range(len(lens)))
            panels = {
                "as it is": lens_of(model, ids, layers, answer, lens, climb),
                f"without the MLP of layer {edited_layer}": lens_of(
                    model, ids, layers, answer, edited_lens, edited_climb
                ),
            }
            plots.lenses(panels, args.picture)
        print("picture:", args.picture)
    client.close()
    return 0 if changed else 1


if __name__ == "__main__":
    sys.exit(main())
