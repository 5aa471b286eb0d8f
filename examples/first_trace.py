"""A first trace: read a served llama's residual stream, change it on the way, and see what else the model then says.

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

import logit_lens

import interpose

PROMPT = "The Eiffel Tower is in"
SAMPLING = {"max_tokens": 12, "temperature": 0.0}
EDITED_LAYER = 1


def read(model: Any) -> tuple[Any, Any, Any, Any]:
    """Return the residual stream after the last layer, [tokens, hidden], the logit lens of each layer (logit_lens.py), the
    logits, [1, vocab], and the result."""
    with model.trace(PROMPT, **SAMPLING) as tracer:
        lens: Any = []
        for block in model.blocks:
            stream = block.resid_post
            top = model.unembed(model.final_norm(stream)).softmax(-1).max(-1)
            lens.append((top.indices, top.values))
        lens.save()
        stream.save()
        logits = model.logits.output.save()
        result = tracer.result.save()
    return stream, lens, logits, result


def edit(model: Any) -> tuple[Any, Any]:
    """The same with one layer's MLP silenced, while the prompt is read; return the lens and the result."""
    with model.trace(PROMPT, **SAMPLING) as tracer:
        lens: Any = []
        for index, block in enumerate(model.blocks):
            if index == EDITED_LAYER:
                block.mlp.act[:] = 0
            top = model.unembed(model.final_norm(block.resid_post)).softmax(-1).max(-1)
            lens.append((top.indices, top.values))
        lens.save()
        result = tracer.result.save()
    return lens, result


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
    parser.add_argument("--picture", type=Path, help="where to write the logit lens, a PNG")
    args = parser.parse_args()

    with phase("connect"):
        client = interpose.connect(args.address, progress=False)
        model = client.model()

    def decode(token: int) -> str:
        text: str = model.tokenizer.decode([token])
        return text

    with phase("trace that only reads"):
        stream, lens, logits, result = read(model)
    print("residual stream after the last layer:", tuple(stream.shape), stream.dtype)
    print("at the last token it begins:", [round(float(x), 4) for x in stream[-1, :5]])
    print("logits:", tuple(logits.shape), "best:", repr(decode(int(logits.argmax()))))
    print(block_of(edit), end="")
    with phase("trace that edits"):
        edited_lens, edited = edit(model)

    print(f"prompt:                     {PROMPT!r}")
    print(f"continuation:               {result.text!r}")
    print(f"without the MLP of layer {EDITED_LAYER}:  {edited.text!r}")
    changed: bool = result.token_ids != edited.token_ids
    print("the edit", "changed" if changed else "DID NOT CHANGE", "the continuation")

    if args.picture:
        with phase("picture"):
            panels = {
                "as it is": logit_lens.lens_of(lens),
                f"without the MLP of layer {EDITED_LAYER}": logit_lens.lens_of(edited_lens),
            }
            tokens = [decode(token) for token in model.tokenizer.encode(PROMPT)]
            logit_lens.draw_panels(panels, tokens, decode, args.picture)
        print("picture:", args.picture)
    client.close()
    return 0 if changed else 1


if __name__ == "__main__":
    sys.exit(main())
