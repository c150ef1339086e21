"""Run one benchmark: `python -m tests.benchmarks NAME [--json FILE]`.

A benchmark is a function `run(*, seed, ...)` that prints a table and returns its figures; it is listed in
`BENCHMARKS`. This file adds what makes a figure worth keeping: command, hardware, versions and seed.
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

BENCHMARKS = {
    "chaos": "tests.benchmarks.chaos:run",
    "elastic": "tests.benchmarks.elastic:run",
    "fault_injection": "tests.benchmarks.fault_injection:run",
    "gpu_split": "tests.benchmarks.gpu_split:run",
    "input_scale": "tests.benchmarks.input_scale:run",
    "input_speed": "tests.benchmarks.input_speed:run",
    "measured_clusters": "tests.benchmarks.measured_clusters:run",
    "models": "tests.benchmarks.models:run",
    "nights": "tests.benchmarks.nights:run",
    "orchestration_overhead": "tests.benchmarks.orchestration_overhead:run",
    "pipeline_efficiency": "tests.benchmarks.pipeline_efficiency:run",
    "pictures": "tests.benchmarks.pictures:run",
    "plan_truth": "tests.benchmarks.plan_truth:run",
    "planner_anytime": "tests.benchmarks.planner_anytime:run",
    "planner_proofs": "tests.benchmarks.planner_proofs:run",
    "planner_quality": "tests.benchmarks.planner_quality:run",
    "planner_speed": "tests.benchmarks.planner_speed:run",
    "prediction_error": "tests.benchmarks.prediction_error:run",
    "quality": "tests.benchmarks.quality:run",
    "serving": "tests.benchmarks.serving:run",
    "spot_fleets": "tests.benchmarks.spot_fleets:run",
    "tiered_table": "tests.benchmarks.tiered_table:run",
    "training_speed": "tests.benchmarks.training_speed:run",
    "zero_shot": "tests.benchmarks.zero_shot:run",
}

PACKAGES = (
    "heterps",
    "numpy",
    "torch",
    "optuna",
    "pyarrow",
    "torchrec",
    "fbgemm-gpu-cpu",
    "rocksdict",
    "lmdb",
)


def main() -> int:
    """Run the named benchmark and write its record."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHMARKS))
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
    module_name, function_name = BENCHMARKS[options.name].split(":")
    run = getattr(import_module(module_name), function_name)
    arguments: dict[str, Any] = {"seed": options.seed}
    if options.cases is not None:
        if "num_cases" not in inspect.signature(run).parameters:
            parser.error(f"{options.name} draws no random problems, so --cases says nothing")
        arguments["num_cases"] = options.cases
    if options.data is not None:
        if "data" not in inspect.signature(run).parameters:
            parser.error(f"{options.name} takes no rows, so --data says nothing")
        arguments["data"] = options.data
    if options.keep is not None:
        if "keep" not in inspect.signature(run).parameters:
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
