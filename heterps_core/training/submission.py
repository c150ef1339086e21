"""How the flow's host hands a job to its nodes."""

from __future__ import annotations

from pathlib import Path

from heterps_core.cluster import Cluster
from heterps_core.data.manifest import MANIFEST_NAME
from heterps_core.training.job import TrainingJob
from heterps_core.training.storage.run_directory import (
    CLUSTER,
    DATA,
    FAILURES,
    JOB,
    RESULT,
    STOP,
    USAGE,
    RunDirectory,
)


def submit_job(run: RunDirectory, job: TrainingJob, *, start_folder: Path | None = None) -> None:
    """Write the job, before its nodes are launched; its data too, where nodes do not see this disk.

    Marks of an earlier attempt in the same folder (a run that is resumed) are removed; its checkpoints, steps and
    logs stay, and so does the model that it began with.

    Args:
        run: Where to.
        job: What to train.
        start_folder: The exported model that the job begins with; not needed where the run has begun with it before.
    """
    for key in (CLUSTER, RESULT, STOP):
        run.delete_file(key)
    for node in run.names("nodes"):
        for name in ("exit.json", "heartbeat.json", "leaving.json"):
            run.delete_file(f"nodes/{node}/{name}")
    run.delete_folder(FAILURES)
    run.delete_folder(USAGE)
    if not run.is_local and not run.exists(f"{DATA}/{MANIFEST_NAME}"):
        run.upload_folder(Path(job.dataset), DATA)
    if start_folder is not None:
        # Not above: what only watches a run need not wait for torch.
        from heterps_core.training.start_model import publish_start_model

        assert job.start_model is not None
        publish_start_model(run, job.start_model, start_folder)
    run.reserve_space()
    run.write_json(JOB, job.to_json())


def publish_cluster(run: RunDirectory, cluster: Cluster) -> None:
    """Tell the nodes who takes part; they wait for it."""
    run.write_json(CLUSTER, cluster.to_json())


def request_stop(run: RunDirectory) -> None:
    """Ask the workers to write a checkpoint and end."""
    run.write_bytes(STOP, b"")
