"""Processor time of `heterps train` over that of plain torch, from a text file to a judged model.

Both train one epoch of the same model from the same text file, in turns, warm: kernels are compiled and layers are
timed by a first training. Ours plans, keeps records, exports and reports besides. All processes count.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from heterps_core.data.synthetic.click_stream import write_click_stream

MODEL = "ctrdnn"
NUM_ROUNDS = 3
SAMPLED_EACH_S = 0.1


def run(*, seed: int = 0, num_cases: int = 200_000) -> list[dict[str, Any]]:
    """Train in turns, print each round, and return the median of the ratios.

    Args:
        num_cases: Rows of the file.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clicks.tsv"
        write_click_stream(path, num_rows=num_cases, seed=seed)
        environment = {**os.environ, "HETERPS_HOME": f"{folder}/home"}
        plain = ["tests.benchmarks.plain_torch", str(path), MODEL]
        ours = ["flows.cli", "train", "--data", str(path), "--model", MODEL, "--no-baseline"]
        processor_seconds(ours, environment)
        ratios = []
        for _ in range(NUM_ROUNDS):
            plain_s, ours_s = (processor_seconds(command, environment) for command in (plain, ours))
            ratios.append(ours_s / plain_s)
            print(f"plain torch {plain_s:.1f} s, heterps train {ours_s:.1f} s: {ratios[-1]:.2f}", flush=True)
    median = statistics.median(ratios)
    print(f"{num_cases:,} rows: {median:.2f} in the median; load average {os.getloadavg()[0]:.1f} after")
    name = f"{num_cases} rows: heterps train over plain torch"
    return [{"name": name, "value": round(median, 3), "unit": "ratio", "higher_is_better": False}]


def processor_seconds(module: list[str], environment: dict[str, str]) -> float:
    """Run a module, and return the processor time of it and all processes below it, as last seen of each."""
    seconds: dict[psutil.Process, float] = {}
    # A pipe that no one reads would stop a process that prints more than it holds.
    with tempfile.TemporaryFile() as errors:
        process = psutil.Popen(
            [sys.executable, "-m", *module], env=environment, stdout=subprocess.DEVNULL, stderr=errors
        )
        while process.poll() is None:
            for each in [process, *process.children(recursive=True)]:
                try:
                    times = each.cpu_times()
                except psutil.Error:
                    continue
                seconds[each] = times.user + times.system
            time.sleep(SAMPLED_EACH_S)
        errors.seek(0)
        assert process.returncode == 0, errors.read().decode()
    return sum(seconds.values())
