"""Runs a few real training steps under a plan and says how long one takes.

The processes of all devices are started once and take plan after plan, because loading torch takes seconds. Each
runs one stage at a time; a device that holds several stages of a plan runs them in as many processes on its cores.
A plan that fails or hangs costs the processes their connections, so all of them are started anew for the next one.
"""

from __future__ import annotations

import json
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from heterps_core.errors import TrainingError
from heterps_core.measurement.placed_plan import Device, MeasuredModel, PlacedStage, check_stages

START_LIMIT_S = 180.0
"""Longest wait for processes that load torch and build the model."""

NUM_WARMUP = 1
"""Steps that are run first and not counted: they build kernels and touch memory."""


class MeasurementError(TrainingError):
    """A plan could not be run to its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasurement:
    """How long a training step takes under a plan, and what the devices do meanwhile."""

    step_seconds: float
    """Forward, backward and update of one batch; the median of the steps behind the warm-up."""

    computed_seconds: Mapping[str, float]
    """Device -> CPU time of its computing threads in a step, of the devices that the plan uses."""

    @property
    def communication_share(self) -> float:
        """Share of a step in which even the busiest device does not compute.

        It waits for messages then: for gradients or activations on their way, or for a pipeline that fills or
        drains.
        """
        return max(0.0, 1 - max(self.computed_seconds.values()) / self.step_seconds)


class PlanMeasurer:
    """Measures plans of one model on the devices of this machine; a context manager that ends its processes.

    Args:
        model: What is trained.
        devices: By name.
        batch_size: Samples per training step.
        num_microbatches: Into how many parts plans with several stages cut a batch.
        processes_per_device: Most stages of one plan that a device can hold.
        limit_s: Longest measurement of a plan.
        optimizer: Name in `DENSE_OPTIMIZERS`.
    """

    def __init__(
        self,
        model: MeasuredModel,
        devices: Mapping[str, Device],
        *,
        batch_size: int,
        num_microbatches: int,
        processes_per_device: int,
        limit_s: float = 60.0,
        optimizer: str = "sgd",
    ) -> None:
        self._model = model
        self._devices = dict(devices)
        self._batch_size = batch_size
        self._num_microbatches = num_microbatches
        self._processes_per_device = processes_per_device
        self._limit_s = limit_s
        self._optimizer = optimizer
        self._processes: list[subprocess.Popen[str]] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Start the processes."""
        self._start()
        return self

    def __exit__(
        self,
        error_class: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the processes."""
        self._stop()

    def measure(self, stages: Sequence[PlacedStage], *, num_steps: int) -> StepMeasurement:
        """Train for some steps under a plan.

        Args:
            stages: In the order of the chain.
            num_steps: Steps to time, at least 1; warm-up comes on top.

        Raises:
            ConfigurationError: The stages are no chain on these devices.
            MeasurementError: A process failed, the plan took longer than the limit, or a device cannot hold so
                many stages.
        """
        check_stages(stages, self._devices)
        ranks = self._ranks(stages)
        if not self._processes:
            self._start()
        request = {
            "num_steps": NUM_WARMUP + num_steps,
            "stages": [
                {**stage.to_json(), "ranks": stage_ranks}
                for stage, stage_ranks in zip(stages, ranks, strict=True)
            ],
        }
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            answers = self._answers(self._limit_s)
        except (MeasurementError, OSError) as error:
            self._stop()
            raise MeasurementError(f"the plan {_shown(stages)} must run to its end, but: {error}") from error
        return self._summary(stages, ranks, answers)

    def _ranks(self, stages: Sequence[PlacedStage]) -> list[list[int]]:
        """Give each replica the next free process of its device."""
        names = list(self._devices)
        used = dict.fromkeys(names, 0)
        ranks: list[list[int]] = []
        for stage in stages:
            ranks.append([])
            for name in stage.devices:
                if used[name] == self._processes_per_device:
                    raise MeasurementError(
                        f"a device can hold {self._processes_per_device} stages, but the plan {_shown(stages)} "
                        f"has more on {name}; allow more processes per device"
                    )
                ranks[-1].append(names.index(name) * self._processes_per_device + used[name])
                used[name] += 1
        return ranks

    def _summary(
        self,
        stages: Sequence[PlacedStage],
        ranks: Sequence[Sequence[int]],
        answers: Sequence[Mapping[str, list[float]]],
    ) -> StepMeasurement:
        taking_part = [answers[rank] for stage_ranks in ranks for rank in stage_ranks]
        # A step is over when its slowest worker is done; the next one then has long begun elsewhere.
        ended_s = [max(times) for times in zip(*(answer["ended_s"] for answer in taking_part), strict=True)]
        computed: dict[str, float] = {}
        for stage, stage_ranks in zip(stages, ranks, strict=True):
            for name, rank in zip(stage.devices, stage_ranks, strict=True):
                own = statistics.median(answers[rank]["computed_s"][NUM_WARMUP:])
                computed[name] = computed.get(name, 0.0) + own
        return StepMeasurement(
            step_seconds=statistics.median(later - earlier for earlier, later in pairwise(ended_s)),
            computed_seconds=computed,
        )

    def _start(self) -> None:
        folder = self._open.enter_context(tempfile.TemporaryDirectory(prefix="heterps-measure-"))
        world_size = len(self._devices) * self._processes_per_device
        for device in self._devices.values():
            for _ in range(self._processes_per_device):
                set_up = {
                    "model": asdict(self._model),
                    "batch_size": self._batch_size,
                    "num_microbatches": self._num_microbatches,
                    "optimizer": self._optimizer,
                    "rank": len(self._processes),
                    "world_size": world_size,
                    "store_file": str(Path(folder) / "store"),
                    "limit_s": START_LIMIT_S,
                    "cores": device.cores,
                    "num_threads": device.num_threads,
                }
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "heterps_core.measurement.plan_worker", json.dumps(set_up)],
                        env=_environment(device),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
        try:
            self._answers(START_LIMIT_S)
        except MeasurementError:
            self._stop()
            raise

    def _stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()
        self._processes.clear()
        self._open.close()

    def _answers(self, limit_s: float) -> list[dict[str, Any]]:
        """Return one answer of each process.

        Raises:
            MeasurementError: One of them failed, ended, or was silent for too long.
        """
        deadline_s = time.monotonic() + limit_s
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, (rank, process.stdout))
            while len(answers) < len(self._processes):
                ready = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    raise MeasurementError(f"it took longer than {limit_s:.0f} s")
                for key, _ in ready:
                    rank, stream = key.data
                    answers[rank] = _answer(rank, stream.readline())
                    selector.unregister(stream)
        return [answers[rank] for rank in range(len(self._processes))]


def _answer(rank: int, line: str) -> dict[str, Any]:
    if not line:
        raise MeasurementError(f"process {rank} ended")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise MeasurementError(f"process {rank} failed with {answer['error']}")
    return answer


def _environment(device: Device) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(device.num_threads),
        "GLOO_SOCKET_IFNAME": "lo",
        # A builder is found wherever this process finds it.
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        **device.environment,
    }


def _shown(stages: Sequence[PlacedStage]) -> str:
    return " | ".join(
        f"{stage.first_block}..{stage.last_block} on {' + '.join(stage.devices)}" for stage in stages
    )
