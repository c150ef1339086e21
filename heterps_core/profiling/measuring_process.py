"""Asks for a profile and measures it in a process of its own, as torch's threads belong to a whole process.

No torch here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heterps_core.core_use import ONE_CORE, THREADS_VARIABLE
from heterps_core.data.features import FeatureSpec
from heterps_core.errors import ConfigurationError, HeterpsError
from heterps_core.json_codec import JsonDocument
from heterps_core.profiling.layer_profile import LayerProfile
from heterps_core.profiling.replica_path import ReplicaPath
from heterps_core.training.job import TrainingJob
from heterps_core.training.node.failures import OutOfMemoryError
from heterps_core.training.node.host_memory import MemoryWatch

REQUEST_NAME, RESULT_NAME = "request.json", "result.json"

TIMEOUT_S = 1200.0

_SHOWN_LINES = 5

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit status of a process that was killed, and of a shell or a container whose process was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRequest(JsonDocument):
    """A measurement to make."""

    model: str
    """Registry name or import path of the model."""

    features: FeatureSpec
    batch_size: int
    """B_o, samples of one profiling batch, at least 2; best a micro-batch, which a stage trains at once."""

    num_threads: int = 1
    """Threads of a worker; one, where a unit is one core."""

    dense_optimizer: str = "adam"
    embedding_optimizer: str = "rowwise-adagrad"
    precision: str = "float32"
    """Precision in which dense layers multiply, where the hardware has units for it; name in `PRECISIONS`."""

    dataset: str | None = None
    """Folder of a prepared data set whose row indices are looked up; None to draw some by Zipf's law."""

    mean_lengths: tuple[float, ...] = ()
    """Values of a row in each slot in the mean; empty for as many as there may be."""

    rows_per_list: tuple[float, ...] = ()
    """Rows that share the list of each slot in the mean; empty for 1."""

    dataset_fingerprint: str = ""
    """Fingerprint of that data set; a profile of other data is another profile."""

    budget_s: float = 1.0
    """Time for the repeats, on a core; loading torch and making tables comes on top."""

    seed: int = 0

    device: str = "cpu"
    """"cpu", or "cuda" for the first CUDA device of this machine."""

    def __post_init__(self) -> None:
        if self.batch_size < 2:
            raise ConfigurationError(
                f"a profiling batch must have at least 2 rows, because half of it is timed too, "
                f"got {self.batch_size}"
            )
        if self.num_threads < 1:
            raise ConfigurationError(f"num_threads must be at least 1, got {self.num_threads}")

    @property
    def ids_source(self) -> str:
        """Where the row indices come from, for people and caches."""
        return "Zipf's law, exponent 1" if self.dataset is None else f"data set {self.dataset_fingerprint}"


def measure_in_fresh_process(*requests: ProfileRequest) -> list[LayerProfile]:
    """Measure a model on this machine, for requests that differ in batch size alone; see `layer_profiler.measure`.

    Raises:
        HeterpsError: The process failed or hung; the message holds the end of its output.
        OutOfMemoryError: The kernel killed it for lack of memory.
    """
    documents: list[Any] = _measured(
        "heterps_core.profiling.measurement.layer_profiler",
        [request.to_json() for request in requests],
        what=f"profiling {requests[0].model!r}",
        way_out=f"lower the batch size, which is {max(request.batch_size for request in requests)}",
    )
    return [LayerProfile.from_json(document) for document in documents]


def measure_replica_path() -> ReplicaPath:
    """Measure what the exchange of rows costs a replica on this machine; see `replica_measurement`.

    Raises:
        HeterpsError: As `measure_in_fresh_process`.
    """
    document = _measured(
        "heterps_core.profiling.measurement.replica_measurement",
        None,
        what="measuring the exchange of rows",
        way_out="free this machine of other work",
    )
    return ReplicaPath.from_json(document)


def measure_step_seconds(job: TrainingJob) -> float:
    """Return the seconds of a step where all workers of a job run on this machine; see `step_profiler`.

    Raises:
        HeterpsError: As `measure_in_fresh_process`.
    """
    seconds: float = _measured(
        "heterps_core.profiling.measurement.step_profiler",
        job.to_json(),
        what=f"profiling {job.model!r}",
        way_out=f"lower the batch size, which is {job.config.batch_size}",
    )
    return seconds


def _measured(program: str, asked: object, *, what: str, way_out: str) -> Any:
    """Run a module on a folder with a JSON document, and return the document that it adds."""
    with tempfile.TemporaryDirectory(prefix="heterps-profile-") as path:
        folder = Path(path)
        (folder / REQUEST_NAME).write_text(json.dumps(asked), encoding="utf-8")
        environment = {
            **os.environ,
            THREADS_VARIABLE: ONE_CORE,
            # A user's own model is found wherever this process finds it.
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        }
        memory = MemoryWatch()
        try:
            finished = subprocess.run(
                [sys.executable, "-m", program, str(folder)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise HeterpsError(f"{what} must end within {TIMEOUT_S:.0f} s, but did not; {way_out}") from error
        shortage = memory.shortage(what) if finished.returncode in KILLED else None
        if shortage is not None:
            raise OutOfMemoryError(shortage)
        if finished.returncode != 0:
            said = "\n".join(finished.stderr.strip().splitlines()[-_SHOWN_LINES:])
            raise HeterpsError(f"{what} failed with exit status {finished.returncode}:\n{said}")
        return json.loads((folder / RESULT_NAME).read_text(encoding="utf-8"))
