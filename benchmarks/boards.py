"""Shows the dashboards of a running service by a real Prometheus, with pictures.

`python -m benchmarks.boards FOLDER` needs the command `prometheus` (Debian: apt-get install prometheus) and matplotlib. It serves
a small model with tenants of two kinds of trust, lets Prometheus scrape the service while traces run, and asks Prometheus for
every expression of `dashboards/grafana` over that time. It prints the number of series of each expression, and writes a picture
of each dashboard into the folder. The exit status is 1 if Prometheus refuses an expression, or finds nothing for an expression
whose metrics the service has shown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import interpose
from benchmarks import tenants
from benchmarks.served import Service
from interpose.contract.errors import InterposeError
from serve_app.service import free_port

DASHBOARDS = Path(__file__).parents[1] / "dashboards" / "grafana"
SECONDS = 60.0
SCRAPE_SECONDS = 2
WINDOW = "15s"  # in the place of Grafana's $__rate_interval
START_SECONDS = 60.0
COLUMNS = 3

Series = list[tuple[dict[str, str], list[tuple[float, float]]]]


@dataclass(frozen=True)
class Shown:
    """What Prometheus has for one expression of a panel.

    Attributes:
        board, panel: their titles.
        expression: as the dashboard has it.
        series: labels and points of each series.
        fault: why there are none, "" if that may be.
    """

    board: str
    panel: str
    expression: str
    series: Series
    fault: str


class Prometheus:
    """A Prometheus that scrapes one address.

    Args:
        target: the host and port with `/metrics`.
        folder: for its configuration and data.

    Raises:
        FileNotFoundError: there is no command `prometheus`.
    """

    def __init__(self, target: str, folder: Path) -> None:
        program = shutil.which("prometheus")
        if program is None:
            raise FileNotFoundError("there is no command `prometheus`; on Debian: apt-get install prometheus")
        scrape = {"job_name": "ray", "static_configs": [{"targets": [target]}]}
        config = folder / "prometheus.yml"  # JSON is YAML
        config.write_text(json.dumps({"global": {"scrape_interval": f"{SCRAPE_SECONDS}s"}, "scrape_configs": [scrape]}))
        self.address = f"127.0.0.1:{free_port()}"
        command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [*command, f"--web.listen-address={self.address}"], stdout=self._log, stderr=self._log
        )

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of a reply of its API.

        Raises:
            ValueError: it refuses the request; with its words.
            OSError: it does not answer.
        """
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"http://{self.address}/api/v1/{path}?{query}", timeout=30) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode()) from None

    def until_it_scrapes(self) -> None:
        """Wait until it has scraped its target.

        Raises:
            TimeoutError: it has not, in time.
        """
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if any(one["health"] == "up" for one in self.ask("targets")["activeTargets"]):
                    return
            time.sleep(0.5)
        raise TimeoutError("Prometheus does not scrape the service")

    def shown(self, board: str, panel: str, expression: str, began: float) -> Shown:
        """Return what it has for an expression since a time, in seconds since the epoch."""
        query = expression.replace("$__rate_interval", WINDOW).replace("$tenant", ".*").replace("$model", ".*")
        try:
            found = self.ask(
                "query_range", query=query, start=f"{began}", end=f"{time.time()}", step=f"{SCRAPE_SECONDS}"
            )
        except ValueError as error:
            return Shown(board, panel, expression, [], f"refused: {error}")
        series = [(one["metric"], [(at, float(value)) for at, value in one["values"]]) for one in found["result"]]
        fault = "" if series or not self._has(query) else "no series, though the service has shown its metrics"
        return Shown(board, panel, expression, series, fault)

    def _has(self, query: str) -> bool:
        """Return whether all metrics of an expression have been scraped."""
        names = set(self.ask("label/__name__/values"))
        used = {word for word in query.replace("(", " ").replace("{", " ").split() if word.startswith("ray_")}
        return used <= names


def expressions() -> Iterator[tuple[str, str, str]]:
    """Yield the dashboards' expressions, with the titles of dashboard and panel."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield path.stem, panel["title"], target["expr"]


def work(address: str, seconds: float) -> None:
    """Run traces of both tenants for some seconds, of which some fail and some are refused."""
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        models = [
            stack.enter_context(interpose.connect(address, key, progress=False)).model()
            for key in (tenants.LAB, tenants.STRANGERS)
        ]
        number = 0
        while time.monotonic() < end:
            number += 1
            for model in models:
                with model.trace("The Eiffel Tower is in", max_tokens=8, ignore_eos=True) as tracer:
                    for _ in tracer.iter[:]:
                        model.model.layers[1].output[0][:] *= 1.01
                with model.trace(list(range(5, 105)), max_tokens=1):
                    model.model.layers[0].output[0].save()
                if number % 4 == 0:
                    with contextlib.suppress(InterposeError), model.trace("one two", max_tokens=2):
                        1 // 0
                    with contextlib.suppress(InterposeError), model.trace("one two", max_tokens=2):
                        while True:
                            pass
                    with contextlib.suppress(InterposeError), model.trace("one two", max_tokens=100_000):
                        pass


def draw(shown: list[Shown], folder: Path) -> None:
    """Write a picture of each dashboard: a small plot for each panel."""
    from matplotlib.figure import Figure

    for board in dict.fromkeys(one.board for one in shown):
        panels = list(dict.fromkeys(one.panel for one in shown if one.board == board))
        lines = -(-len(panels) // COLUMNS)
        figure = Figure(figsize=(6 * COLUMNS, 3 * lines), layout="constrained")
        for number, panel in enumerate(panels, 1):
            axes = figure.add_subplot(lines, COLUMNS, number)
            axes.set_title(panel, fontsize=9)
            axes.tick_params(labelsize=7)
            for one in (one for one in shown if (one.board, one.panel) == (board, panel)):
                for labels, points in one.series:
                    first = points[0][0]
                    label = ", ".join(labels.values()) or "all"
                    axes.plot([at - first for at, _ in points], [value for _, value in points], label=label)
            if axes.lines:
                axes.legend(fontsize=6)
        figure.savefig(folder / f"{board}.png", dpi=80)


def main() -> int:
    """Run it as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.boards", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="for the pictures; made if it is missing")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for which traces run (default: {SECONDS:g})")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    limits = {"step_seconds": 1.0}
    engine = {"enforce_eager": True, "max_model_len": 256}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prometheus = Prometheus(f"127.0.0.1:{port}", folder)
        stack.callback(prometheus.close)
        settings = {"metrics": {"port": port}}
        service = Service(1, 2, engine, limits=limits, tenants=tenants.TENANTS, settings=settings)
        stack.callback(service.close)
        address = service.address()
        prometheus.until_it_scrapes()
        began = time.time()
        work(address, arguments.seconds)
        time.sleep(6 * SCRAPE_SECONDS)  # the directory exports its counts every five seconds
        shown = [prometheus.shown(*one, began) for one in expressions()]
    for one in shown:
        print(f"  {one.board:9} {one.panel:62} {len(one.series):2} series  {one.fault or ''}")
    draw(shown, arguments.folder)
    return 1 if any(one.fault for one in shown) else 0


if __name__ == "__main__":
    sys.exit(main())
