"""Runs the benchmarks, prints a table, and writes the results as JSON.

The load average before each of them is part of the results: figures of a machine that was busy with something else say
little about this system, those of the service least.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import time
from pathlib import Path

# Modules of this folder, each with a `run()` that returns figures by their name, by case.
BENCHMARKS = ("plain_decode", "traced_steps", "graph_steps", "service")


def main() -> None:
    """Run the benchmarks named on the command line, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"), help="folder for the JSON file")
    args = parser.parse_args()
    if unknown := set(args.names) - set(BENCHMARKS):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    results = {}
    loads = {}
    for name in args.names or BENCHMARKS:
        module = importlib.import_module(f"benchmarks.{name}")
        loads[name] = os.getloadavg()[0]
        print(f"\n{name}: {(module.__doc__ or '').splitlines()[0]}", flush=True)
        print(f"  load average before it: {loads[name]:.1f} on {os.cpu_count()} cores", flush=True)
        results[name] = module.run()
        print(table(results[name]), flush=True)
    args.output.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = args.output / f"{stamp}.json"
    machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load average before": loads}
    path.write_text(json.dumps({**machine, "time": stamp, "results": results}, indent=2) + "\n")
    print(f"\nwrote {path}")


def table(cases: dict[str, dict[str, float]]) -> str:
    """Return a line for each case, with the figures that it has."""
    width = max(len(case) for case in cases) + 2
    return "\n".join(
        f"  {case:{width}}" + "  ".join(f"{name} {value:<8.4g}" for name, value in figures.items()).rstrip()
        for case, figures in cases.items()
    )


if __name__ == "__main__":
    main()
