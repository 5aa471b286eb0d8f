"""Runs the benchmarks, prints a table, and writes the results as JSON.

The results contain the load average before each benchmark. Figures of a machine that was busy with other work say little about
this system; the figures of the service say least.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.graph_steps import CASES
from benchmarks.layouts import Layout
from benchmarks.models import DTYPES, SIZES
from benchmarks.tier_rows import ROWS

# Modules of this folder. Each has a `run()` that returns figures by their name, by case. Its keyword arguments are the options
# of the benchmark.
BENCHMARKS = (
    "plain_decode",
    "plain_steps",
    "traced_steps",
    "general_path",
    "edges",
    "graph_steps",
    "service",
    "hops",
    "endpoint",
    "fairness",
    "weights",
    "tensor_parallel",
    "start_up",
    "encoding",
    "peers",
    "tiers",
    "tier_scaling",
    "tier_ranks",
    "many_blocks",
    "sandbox",
    "sandbox_steps",
    "fuzz",
)
# Benchmarks that run only when they are named: these measure nothing, and take long.
NAMED = ("fuzz",)
_OPTIONS = ("tensor_parallel_sizes", "layouts", "model", "dtype", "rounds", "engines", "seconds", "cases")
_OPTIONS += ("rows", "profile", "service", "joined", "blocks", "messages", "seed")

Run = Callable[..., dict[str, dict[str, float]]]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)} (default: all but {', '.join(NAMED)})"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder for the JSON file")
    some = parser.add_argument_group("options", "for those of the benchmarks that say so in brackets")
    some.add_argument(
        "--tensor-parallel-size",
        dest="tensor_parallel_sizes",
        type=_count,
        nargs="+",
        metavar="N",
        help=f"ranks, one size after the other (default: 1 2, and 4 where there are GPUs) {_takers('tensor_parallel_sizes')}",
    )
    some.add_argument(
        "--layout",
        dest="layouts",
        type=_layout,
        nargs="+",
        metavar="TxS",
        help=f"further layouts: T tensor-parallel ranks in each of S pipeline stages, e.g. 2x2 {_takers('layouts')}",
    )
    some.add_argument(
        "--model", choices=SIZES, help=f"its sizes (default: small, 1b where there is a GPU) {_takers('model')}"
    )
    some.add_argument(
        "--dtype", choices=DTYPES, help=f"default: float32, bfloat16 where there is a GPU {_takers('dtype')}"
    )
    some.add_argument("--rounds", type=_rounds, metavar="N", help=f"that count, two at least {_takers('rounds')}")
    some.add_argument(
        "--engines",
        type=_count,
        metavar="N",
        help=f"of each kind for plain requests (default: 1; graph_steps: 3 on a GPU) {_takers('engines')}",
    )
    some.add_argument(
        "--seconds", type=float, help=f"in which a case ends, whatever rounds are left {_takers('seconds')}"
    )
    some.add_argument("--blocks", type=_count, metavar="N", help=f"different blocks {_takers('blocks')}")
    some.add_argument("--case", dest="cases", choices=CASES, nargs="+", help=f"only these {_takers('cases')}")
    some.add_argument("--rows", choices=ROWS, nargs="+", help=f"only these {_takers('rows')}")
    some.add_argument(
        "--profile", choices=ROWS, help=f"only the parts and the profile of this row {_takers('profile')}"
    )
    some.add_argument(
        "--service", action="store_true", default=None, help=f"through a whole service too {_takers('service')}"
    )
    some.add_argument(
        "--joined", action="store_true", default=None, help=f"one trace for each batch {_takers('joined')}"
    )
    some.add_argument("--messages", type=_count, metavar="N", help=f"messages to send {_takers('messages')}")
    some.add_argument("--seed", type=int, help=f"of the messages {_takers('seed')}")
    return parser


def run_of(name: str) -> Run:
    """Return a benchmark's function."""
    run: Run = importlib.import_module(f"benchmarks.{name}").run
    return run


def options_of(name: str) -> list[str]:
    """Return the names of the options that a benchmark takes."""
    return list(inspect.signature(run_of(name)).parameters)


def _takers(option: str) -> str:
    return f"[{', '.join(name for name in BENCHMARKS if option in options_of(name))}]"


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a count")
    return count


def _layout(text: str) -> str:
    try:
        return str(Layout.of(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rounds(text: str) -> int:
    if _count(text) < 2:
        raise argparse.ArgumentTypeError(f"{text} is not a count of rounds that has quartiles: two at least")
    return int(text)


def chosen(argv: list[str] | None = None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Parse the command line; return the arguments, and the options by their names.

    Ends the process where they do not fit.
    """
    known = parser()
    args = known.parse_args(argv)
    if unknown := set(args.names) - set(BENCHMARKS):
        known.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    args.names = args.names or [name for name in BENCHMARKS if name not in NAMED]
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    for name in args.names:
        if unused := given.keys() - set(options_of(name)):
            known.error(f"{name} does not take {', '.join(sorted(unused))}")
    return args, given


def main() -> None:
    """Run the benchmarks that the command line names, or all."""
    args, given = chosen()
    args.output.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = args.output / f"{stamp}.json"
    results: dict[str, Any] = {}
    loads: dict[str, float] = {}
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "gpus": gpus()}
    for name in args.names:
        run = run_of(name)
        loads[name] = os.getloadavg()[0]
        print(f"\n{name}: {(inspect.getmodule(run).__doc__ or '').splitlines()[0]}", flush=True)
        print(f"  load average before it: {loads[name]:.1f} on {os.cpu_count()} cores", flush=True)
        began = time.monotonic()
        results[name] = run(**given)
        print(table(results[name]), flush=True)
        print(f"  it took {time.monotonic() - began:.0f} s", flush=True)
        about = {**machine, "load average before": loads, "options": given, "time": stamp}
        path.write_text(json.dumps({**about, "results": results}, indent=2) + "\n")
    print(f"\nwrote {path}")


def gpus() -> list[str]:
    """Return the names of this machine's GPUs."""
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def table(cases: dict[str, dict[str, float]]) -> str:
    """Return a line for each case, with the figures of the case."""
    width = max(len(case) for case in cases) + 2
    return "\n".join(
        f"  {case:{width}}" + "  ".join(f"{name} {value:<8.4g}" for name, value in figures.items()).rstrip()
        for case, figures in cases.items()
    )


if __name__ == "__main__":
    main()
