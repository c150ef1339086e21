"""What redo logs cost an undisturbed training: the same training with them and without, in turn."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil

from heterps_core.training.job import TrainingJob

if TYPE_CHECKING:
    from tests.benchmarks.elastic import Training

WARMUP_STEPS = 30
MEASURED_STEPS = 100


def measure_protection(training: Training, job: TrainingJob, *, num_rounds: int) -> dict[str, float]:
    """Return how many steps a second of the clock, and of processor time, are left of those without logs.

    Processor time is that of all processes of all hosts; the workers are asked to stop between two trainings.
    """
    steps_per_s: dict[bool, list[float]] = {False: [], True: []}
    steps_per_processor_s: dict[bool, list[float]] = {False: [], True: []}
    for number in range(num_rounds):
        # Each goes first in turn, as the machine may become slower.
        for redo_log in (False, True) if number % 2 == 0 else (True, False):
            following = training.cluster.next_generation()
            training.go_on(following, replace(job, config=replace(job.config, redo_log=redo_log)))
            training.wait_for(following, 1)
            training.wait_for(following, training.slowest_step() + WARMUP_STEPS)
            first_step, first_s, first_processor_s = (
                training.slowest_step(),
                time.monotonic(),
                processor_s(training),
            )
            training.wait_for(following, first_step + MEASURED_STEPS)
            steps = training.slowest_step() - first_step
            steps_per_s[redo_log].append(steps / (time.monotonic() - first_s))
            steps_per_processor_s[redo_log].append(steps / (processor_s(training) - first_processor_s))
            training.stop()
    print(steps_per_s, steps_per_processor_s, file=sys.stderr, flush=True)
    return {
        "protected_over_unprotected": _ratio(steps_per_s),
        "protected_over_unprotected_by_processor_time": _ratio(steps_per_processor_s),
    }


def processor_s(training: Training) -> float:
    """Return the processor time of all processes that run on the hosts now."""
    nodes = [host.node for host in training.hosts if host.node is not None]
    processes = [process for node in nodes for process in [node, *node.children(recursive=True)]]
    return sum(sum(_times(process)) for process in processes)


def _times(process: psutil.Process) -> tuple[float, float]:
    used = process.cpu_times()
    return used.user, used.system


def _ratio(found: dict[bool, list[float]]) -> float:
    return statistics.median(found[True]) / statistics.median(found[False])
