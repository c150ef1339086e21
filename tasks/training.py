"""Hands a job to a cluster and follows it to its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from heterps_core.cluster import Cluster
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.schema import DataSchema
from heterps_core.errors import RunStoppedError, UnknownNameError
from heterps_core.training.job import (
    DELAYED,
    TrainingConfig,
    TrainingJob,
    default_microbatches,
    default_update_mode,
    delayed_microbatches,
)
from heterps_core.training.monitor import follow_training, publish_cluster, submit_job
from heterps_core.training.node.host_memory import check_workers_fit
from heterps_core.training.outcome import Stopped, TrainingOutcome
from heterps_core.training.step_metrics import Progress
from heterps_core.training.storage.run_directory import JOB, RunDirectory
from heterps_core.training.storage.verified_files import write_signed_json
from tasks.planning.extra_costs import checkpoint_interval_seconds
from tasks.provisioning import Provisioning, usd_for
from tasks.running.progress import show_progress
from tasks.running.start import Start
from tasks.steps import step

_LEAST_CHECKPOINT_STEPS, _MOST_CHECKPOINT_STEPS = 50, 200
"""At most 200 steps are lost, some seconds here; below 50 the writing would show in the throughput."""

_LOG_INTERVAL_S = 5.0

logger = logging.getLogger(__name__)


def resume_summary(run: RunDirectory) -> str:
    """Return from where a resumed run goes on, in one line.

    Raises:
        CheckpointError: It has checkpoints, but none that can be read.
    """
    from heterps_core.training.checkpoint import step_to_resume_from

    step = step_to_resume_from(run)
    if not step:
        return "the run has no checkpoint yet: it begins at step 0"
    return f"from the checkpoint of step {step:,}"


def stopped_error(stopped: Stopped, *, run_id: str) -> RunStoppedError:
    """Return the error of a run that `heterps stop` stopped; its model is not judged."""
    steps = stopped.training.steps
    return RunStoppedError(
        f"run {run_id} was asked to stop: it wrote a checkpoint at step {steps[-1].step if steps else 0:,} and its "
        f"model is not judged; set resume_run_id={run_id} to go on from there"
    )


def label_weights_of(schema: DataSchema, weights: Mapping[str, float]) -> tuple[float, ...]:
    """Return the weight of each label of a schema, 1 where none is given; empty where none is.

    Raises:
        UnknownNameError: A weight is of no label of the schema.
    """
    for name in weights:
        if name not in schema.labels:
            raise UnknownNameError("label in label_weights", name, schema.labels)
    return tuple(weights.get(name, 1.0) for name in schema.labels) if weights else ()


def training_config(
    dataset: PreparedDataset,
    *,
    batch_size: int,
    epochs: int,
    num_stages: int,
    samples_per_s: float,
    interruptions_per_hour: float,
    update_mode: str | None,
    max_samples: int | None = None,
    **others: Any,
) -> TrainingConfig:
    """Return the numbers of a run; without an update mode, with the one that so many steps want.

    Args:
        samples_per_s: Predicted; checkpoints come five times a run, but neither every few seconds nor, where this is
            known, more seldom than `checkpoint_interval_seconds`.
        interruptions_per_hour: Of the whole fleet; 0 where none of it is on spot.
    """
    interval_s = checkpoint_interval_seconds(interruptions_per_hour)
    most_steps = max(_MOST_CHECKPOINT_STEPS, int(interval_s * samples_per_s / batch_size))
    steps = dataset.num_batches(batch_size) * epochs
    if max_samples is not None:
        steps = min(steps, -(-max_samples // batch_size))
    update_mode = update_mode or default_update_mode(steps)
    microbatches = delayed_microbatches if update_mode == DELAYED else default_microbatches
    return TrainingConfig(
        batch_size=batch_size,
        num_microbatches=microbatches(batch_size, num_stages=num_stages),
        update_mode=update_mode,
        num_epochs=epochs,
        max_steps=None if max_samples is None else steps,
        checkpoint_interval_steps=min(max(steps // 5, _LEAST_CHECKPOINT_STEPS), most_steps),
        **others,
    )


def write_job(
    run: RunDirectory,
    provisioning: Provisioning,
    *,
    run_id: str,
    model: str,
    dataset: PreparedDataset,
    config: TrainingConfig,
    start: Start,
    is_under_way: bool = False,
) -> TrainingJob:
    """Write the job into the run directory, before any node is launched, with the model that it begins with.

    Args besides what is in the job:
        is_under_way: Nodes are there and wait for their next generation; its stages have other numbers of replicas.

    Raises:
        ConfigurationError: Its workers do not fit into this machine's memory.
    """
    from heterps_core.training.memory_need import worker_memory

    stages = provisioning.launch_stages
    needs = worker_memory(
        model,
        dataset.features,
        config,
        stages,
        mean_lengths=dataset.manifest.mean_lengths,
        rows_per_list=dataset.manifest.rows_per_list,
        num_train_rows=dataset.num_train_rows,
        largest_group_rows=dataset.largest_group_rows,
        is_dry_run=provisioning.is_dry_run,
    )
    job = TrainingJob(
        run_id=run_id,
        model=model,
        dataset=str(dataset.directory),
        stages=stages,
        config=config,
        start_model=start.model,
        worker_bytes=tuple(need.num_bytes for need in needs),
    )
    if run.is_local and provisioning.runs_here:
        check_workers_fit(
            {
                f"stage {index}": [num_bytes] * stage.num_replicas
                for index, (stage, num_bytes) in enumerate(zip(job.stages, job.worker_bytes, strict=True))
            },
            where="this machine",
            made_of={f"stage {index}": need for index, need in enumerate(needs)},
        )
    if is_under_way:
        write_signed_json(run, JOB, job.to_json())
    else:
        submit_job(run, job, start_folder=start.folder)
    return job


@step("train")
def train(run: RunDirectory, cluster: Cluster, *, on_progress: Callable[[], None]) -> TrainingOutcome:
    """Publish the cluster to its nodes, and follow them to the end; `on_progress` is called after steps."""
    publish_cluster(run, cluster)
    created_at = datetime.fromisoformat(cluster.created_at)
    logged_at_s = 0.0

    def show(progress: Progress) -> None:
        nonlocal logged_at_s
        usd = usd_for(cluster.price_usd_per_hour, (datetime.now(UTC) - created_at).total_seconds())
        speed = progress.num_samples / progress.elapsed_s if progress.elapsed_s > 0 else 0.0
        text = f"{speed:,.0f} samples/s, {usd:.5f} USD"
        show_progress(progress.phase, num_done=progress.step, num_steps=progress.num_steps, text=text)
        if time.monotonic() - logged_at_s >= _LOG_INTERVAL_S:
            logged_at_s = time.monotonic()
            logger.info(
                "%s: step %d of %d, %s, log-loss %.4f",
                progress.phase,
                progress.step,
                progress.num_steps,
                text,
                progress.loss,
            )
        on_progress()

    return follow_training(run, cluster, on_progress=show)
