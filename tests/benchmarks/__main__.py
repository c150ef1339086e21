"""Run one benchmark: `python -m tests.benchmarks NAME [--json FILE]`.

A benchmark is a module here with a function `run(*, seed, ...)` that prints a table and returns its figures; its name
is listed in `BENCHMARKS`. This file adds what makes a figure worth keeping: command, hardware, versions and seed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

BENCHMARKS = (
    "chaos",
    "cost_to_quality",
    "elastic",
    "fault_injection",
    "gpu_split",
    "input_scale",
    "input_speed",
    "measured_clusters",
    "models",
    "nights",
    "pipeline_efficiency",
    "pictures",
    "planner_proofs",
    "planner_quality",
    "prediction_error",
    "quality",
    "replica_path",
    "serving",
    "tiered_table",
    "training_speed",
    "whole_line",
)

PACKAGES = ("heterps", "numpy", "torch", "optuna", "pyarrow", "lightgbm", "catboost", "vowpalwabbit")


def main() -> int:
    """Run the named benchmark and write its record."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cases",
        type=int,
        metavar="N",
        help="random problems or seeds per figure, where a benchmark draws some",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="go on from what an earlier run left there, where one can"
    )
    parser.add_argument(
        "--data", metavar="FILE", help="rows in the Criteo format, where a benchmark takes some"
    )
    options = parser.parse_args()
    run = import_module(f"tests.benchmarks.{options.name}").run
    known = inspect.signature(run).parameters
    arguments: dict[str, Any] = {"seed": options.seed}
    if options.cases is not None:
        if "num_cases" not in known:
            parser.error(f"{options.name} draws no random problems, so --cases says nothing")
        arguments["num_cases"] = options.cases
    if options.data is not None:
        if "data" not in known:
            parser.error(f"{options.name} takes no rows, so --data says nothing")
        arguments["data"] = options.data
    if options.keep is not None:
        if "keep" not in known:
            parser.error(f"{options.name} keeps nothing, so --keep says nothing")
        options.keep.mkdir(parents=True, exist_ok=True)
        arguments["keep"] = options.keep
    record = {
        "benchmark": options.name,
        "command": f"python -m tests.benchmarks {' '.join(sys.argv[1:])}",
        "hardware": hardware(),
        "versions": versions(),
        "seed": options.seed,
        "figures": run(**arguments),
    }
    print(f"{record['hardware']}; {', '.join(f'{k} {v}' for k, v in record['versions'].items())}")
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def hardware() -> str:
    """Return the processor and how many cores this process may use."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter for speed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
