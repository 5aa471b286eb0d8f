"""Notebooks of the documents: run them, check what their cells show, and make pages of them.

    python -m tools.notebooks                          # all notebooks, against the service at localhost:9000
    python -m tools.notebooks --address 10.0.0.7:9000 docs/notebooks/first-experiment.ipynb

A notebook is written with the outputs of its cells if nothing in them is wrong. The service serves the model that the cells name.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs"
ADDRESS = "localhost:9000"  # of the service, in a notebook's text
MOST_PICTURES = 400_000  # bytes of all pictures of a notebook, as base64
SECONDS = 600  # that a cell may take

# What no output may show: names of the package's inside, objects without a text, folders of a machine, and other addresses.
_INTERNAL = re.compile(
    r"\b_pb2\b|interpose\.(?:wire|rpc|program|results|contract|tracing|v1|modules)\b|object at 0x|Envoy\b"
)
_FOLDERS = re.compile(r"(?<![\w.:/<])/(?:home|root|tmp|usr|opt|var|mnt|work|Users|private)/[\w.]+")
_ADDRESSES = re.compile(r"\b(?:localhost|\d+\.\d+\.\d+\.\d+):\d+")


def outputs(notebook: Mapping[str, Any]) -> list[Any]:
    """Return the outputs of all cells."""
    return [output for cell in notebook["cells"] if cell["cell_type"] == "code" for output in cell["outputs"]]


def problems(notebook: Mapping[str, Any]) -> list[str]:
    """Return what no reader of an executed notebook should see.

    That is errors and warnings, the package's inside, and the folders and addresses of one machine.
    """
    found = []
    for output in outputs(notebook):
        text = _text(output)
        if output["output_type"] == "error" or output.get("name") == "stderr" or "Warning" in text:
            found.append(f"an error or a warning: {text[:300]}")
        for pattern in (_INTERNAL, _FOLDERS, re.compile(re.escape(socket.gethostname()))):
            found += [f"{match!r} in an output" for match in pattern.findall(text)]
        found += [f"{match!r} in an output" for match in _ADDRESSES.findall(text) if match != ADDRESS]
    size = sum(
        len(output["data"]["image/png"]) for output in outputs(notebook) if "image/png" in output.get("data", {})
    )
    if size > MOST_PICTURES:
        found.append(f"pictures of {size} bytes; {MOST_PICTURES} at most")
    return found


def executed(notebook: Any, address: str = ADDRESS, words: Mapping[str, str] | None = None) -> Any:
    """Run a notebook in a kernel of its own; return it with its outputs and own sources.

    Args:
        notebook: of nbformat, which is left as it is.
        address: of a service with the notebook's model.
        words: what else is another word in the sources while they run, e.g. the model's name.

    Raises:
        CellExecutionError: a cell fails.
    """
    import nbformat
    from nbclient import NotebookClient

    changed = {ADDRESS: address, **(words or {})}
    running = nbformat.reads(nbformat.writes(notebook), as_version=4)
    for cell in running["cells"]:
        for word, other in changed.items():
            cell["source"] = cell["source"].replace(word, other)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(
            running, timeout=SECONDS, kernel_name="python3", resources=resources, coalesce_streams=True
        )
        client.execute(env=os.environ | {"TQDM_DISABLE": "1"})  # a bar moves; a page would show its last state
    for cell, original in zip(running["cells"], notebook["cells"], strict=True):
        cell["source"] = original["source"]
        cell["metadata"].pop("execution", None)  # when it ran
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = small(data["image/png"])
    running["metadata"] = notebook["metadata"]
    return running


def small(picture: str) -> str:
    """Return a PNG picture with 256 colours, as base64.

    The colours are as far apart as those of the picture.
    """
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    made = io.BytesIO()
    few = image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(made, format="PNG", optimize=True)
    return base64.b64encode(made.getvalue()).decode()


def page_of(notebook: Path) -> str:
    """Return a notebook as Markdown, with what its cells gave when they ran last."""
    cells = json.loads(notebook.read_text())["cells"]
    return "\n\n".join(part for cell in cells for part in _parts(cell)) + "\n"


def _parts(cell: Mapping[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        yield _shown(output)


def _shown(output: Mapping[str, Any]) -> str:
    """Return an output of a cell as HTML: the best of its forms that a page can show."""
    if output["output_type"] in ("stream", "error"):
        return _plain(_text(output))
    data = output["data"]
    if "image/png" in data:
        return f'<p><img alt="picture" src="data:image/png;base64,{"".join(data["image/png"]).strip()}"></p>'
    if "text/html" in data:
        return f'<div class="cell-output">{"".join(data["text/html"])}</div>'
    return _plain("".join(data["text/plain"]))


def _text(output: Mapping[str, Any]) -> str:
    """Return all that an output shows as text or as HTML."""
    if output["output_type"] == "error":
        return f"{output['ename']}: {output['evalue']}"
    data = output.get("data", {})
    return "\n".join(
        "".join(part)
        for part in (output.get("text", ""), data.get("text/plain", ""), data.get("text/html", ""))
        if part
    )


def _plain(text: str) -> str:
    """Return text as HTML of one block; an empty line would end it."""
    return f"<pre><code>{html.escape(text.rstrip()).replace(chr(10), '&#10;')}</code></pre>"


def main(argv: list[str] | None = None) -> int:
    """Run notebooks and write them with their outputs; return the exit status."""
    import nbformat

    parser = argparse.ArgumentParser(prog="python -m tools.notebooks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all of docs/")
    parser.add_argument("--address", default=ADDRESS, help=f"of the service (default: {ADDRESS})")
    args = parser.parse_args(argv)
    status = 0
    for path in args.notebooks or sorted(FOLDER.rglob("*.ipynb")):
        done = executed(nbformat.read(path, as_version=4), args.address)
        wrong = problems(done)
        if wrong:
            status = 1
            print(f"{path} is not written:", *wrong, sep="\n  ", file=sys.stderr)
            continue
        path.write_text(nbformat.writes(done) + "\n")
        print(f"{path}: {len(outputs(done))} outputs, {path.stat().st_size} bytes")
    return status


if __name__ == "__main__":
    sys.exit(main())
