"""Embeddings updated by parameter servers as gradients come (hybrid) beside updates in step (sync), on one plan.

The plan is CTR-DNN cut behind its embedding, with one process for each stage, so two; in hybrid the first of them is
a parameter server. Each mode takes the number of micro-batches that the trainer would give it. Quality is that of
held-out rows of the made-up click stream after one pass, with Adam and row-wise Adagrad, each seed in both modes.
Data, checkpoint at the end, and evaluation go the trainer's own way; start-up of processes is left out.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.judging.quality import measure_quality
from heterps_core.models.chain import build_chain
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.cursor import TrainingCursor
from heterps_core.training.gradients.microbatches import default_microbatches
from heterps_core.training.job import UPDATE_MODES, TrainingConfig, default_batch_size
from heterps_core.training.loop import TrainingLoop
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.pipeline.stage_runner import StageRunner
from heterps_core.training.servers.parameter_server import ParameterServer
from heterps_core.training.step_metrics import MetricWriter, read_steps
from heterps_core.training.storage.run_directory import STALENESS, RunDirectory
from heterps_core.training.training_run import median_throughput_samples_per_s
from heterps_core.transport.rank_layout import RankLayout
from tests.worker_processes import run_in_processes

MODEL = "ctrdnn"
NUM_CLICKS = 200_000
BUCKETS_PER_SLOT = 10_000
NUM_SEEDS = 5
SPEED_BATCH_SIZE = 4096
SPEED_ROUNDS = 5
LAYOUT = RankLayout(((0,), (1,)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one run came to."""

    update_mode: str
    throughput_samples_per_s: float
    auc: float
    mean_staleness_steps: float = 0.0
    max_staleness_steps: int = 0


def run(*, seed: int) -> list[dict[str, Any]]:
    """Print the table and return the figures."""
    with tempfile.TemporaryDirectory(prefix="heterps-update-modes-") as folder:
        stream = write_click_stream(Path(folder) / "clicks.tsv", num_rows=NUM_CLICKS, seed=seed)
        dataset = Path(folder) / "prepared"
        prepare_dataset(stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=BUCKETS_PER_SLOT, out_dir=dataset)
        batch_size = default_batch_size(PreparedDataset.open(dataset).num_train_rows)
        runs = [
            (mode, size, number)
            for size, count in ((SPEED_BATCH_SIZE, SPEED_ROUNDS), (batch_size, NUM_SEEDS))
            for number in range(seed, seed + count)
            for mode in UPDATE_MODES
        ]
        outcomes = dict(
            zip(runs, run_in_processes(_train_all, 2, str(dataset), folder, runs)[1], strict=True)
        )
    ratios = {
        size: [
            outcomes["hybrid", size, number].throughput_samples_per_s
            / outcomes["sync", size, number].throughput_samples_per_s
            for mode, own_size, number in runs
            if own_size == size and mode == "sync"
        ]
        for size in (SPEED_BATCH_SIZE, batch_size)
    }
    print(f"{MODEL}, two processes, {NUM_CLICKS:,} clicks; samples/s, medians")
    for size, of_size in ratios.items():
        sync, hybrid = (
            statistics.median(
                outcome.throughput_samples_per_s
                for (own, at, _), outcome in outcomes.items()
                if (own, at) == (mode, size)
            )
            for mode in UPDATE_MODES
        )
        print(
            f"  batch {size:>5}: sync {sync:>8,.0f}  hybrid {hybrid:>8,.0f}  hybrid over sync "
            f"{statistics.median(of_size):.3f} ({min(of_size):.3f} to {max(of_size):.3f})"
        )
    drifts = []
    print(f"AUC after one pass, batch {batch_size}; rows' age in steps")
    for number in range(seed, seed + NUM_SEEDS):
        sync_run, hybrid_run = (outcomes[mode, batch_size, number] for mode in UPDATE_MODES)
        drifts.append(hybrid_run.auc - sync_run.auc)
        print(
            f"  seed {number}: sync {sync_run.auc:.5f}  hybrid {hybrid_run.auc:.5f}  drift {drifts[-1]:+.5f}  "
            f"age {hybrid_run.mean_staleness_steps:.2f} on average, {hybrid_run.max_staleness_steps} at most"
        )
    mean_drift, worst_drift = statistics.fmean(drifts), max(drifts, key=abs)
    spread = statistics.stdev(outcomes["sync", batch_size, seed + i].auc for i in range(NUM_SEEDS))
    print(
        f"  drift {mean_drift:+.5f} on average, {worst_drift:+.5f} at worst; sync itself varies by {spread:.5f}"
    )
    hybrid_runs = [outcomes["hybrid", batch_size, seed + i] for i in range(NUM_SEEDS)]
    return [
        _figure("hybrid_over_sync", statistics.median(ratios[SPEED_BATCH_SIZE]), "ratio"),
        _figure(f"hybrid_over_sync_batch_{batch_size}", statistics.median(ratios[batch_size]), "ratio"),
        _figure("hybrid_auc_drift_mean", mean_drift, "AUC"),
        _figure("hybrid_auc_drift_worst", worst_drift, "AUC"),
        _figure(
            "hybrid_staleness_mean_steps",
            statistics.fmean(one.mean_staleness_steps for one in hybrid_runs),
            "steps",
            higher_is_better=False,
        ),
        _figure(
            "hybrid_staleness_max_steps",
            max(one.max_staleness_steps for one in hybrid_runs),
            "steps",
            higher_is_better=False,
        ),
    ]


def _figure(name: str, value: float, unit: str, *, higher_is_better: bool = True) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "higher_is_better": higher_is_better}


def _train_all(
    rank: int, dataset: str, folder: str, runs: list[tuple[str, int, int]]
) -> list[Outcome | None]:
    return [
        _train(rank, PreparedDataset.open(dataset), RunDirectory(f"{folder}/{number}"), *one)
        for number, one in enumerate(runs)
    ]


def _train(
    rank: int, dataset: PreparedDataset, run: RunDirectory, update_mode: str, batch_size: int, seed: int
) -> Outcome | None:
    """Train and evaluate; returns the outcome on the reporting process."""
    num_pipeline_stages = LAYOUT.num_stages - (update_mode == "hybrid")
    config = TrainingConfig(
        batch_size=batch_size,
        num_microbatches=default_microbatches(batch_size, num_stages=num_pipeline_stages),
        num_epochs=1,
        seed=seed,
        update_mode=update_mode,
        checkpoint_interval_steps=10_000,
    )
    loop = _make_loop(rank, dataset, run, config)
    dist.barrier()
    loop.train(TrainingCursor())
    logits = loop.predict_held_out()
    loop.close()
    dist.barrier()
    if logits is None:
        return None
    (steps,) = read_steps(run)
    seen = run.read_json(f"{STALENESS}/0000.json") or {"mean_steps": 0.0, "max_steps": 0}
    return Outcome(
        update_mode=update_mode,
        throughput_samples_per_s=median_throughput_samples_per_s(steps),
        auc=measure_quality(dataset.eval_labels, logits).auc,
        mean_staleness_steps=seen["mean_steps"],
        max_staleness_steps=seen["max_steps"],
    )


def _make_loop(
    rank: int, dataset: PreparedDataset, run: RunDirectory, config: TrainingConfig
) -> TrainingLoop:
    last_layer = len(build_chain(MODEL, dataset.features, seed=0)) - 1
    stages = [Stage(0, 0, "cpu", 1), Stage(1, last_layer, "cpu", 1)]
    layout = LAYOUT.with_servers() if config.has_servers else LAYOUT
    model = build_stage_model(MODEL, dataset.features, config, stages, rank, None, layout=layout)
    runner: StageRunner | ParameterServer
    if rank in layout.servers:
        runner = ParameterServer(list(model.tables.values()), layout=layout, replica=0)
    else:
        runner = StageRunner(
            list(model.layers.values()),
            layout=layout,
            stage=rank - config.has_servers,
            replica=0,
            input_width=model.input_width,
            output_width=model.output_width,
            group=None,
        )
    num_steps = dataset.num_batches(config.batch_size)
    return TrainingLoop(
        runner=runner,
        model=model,
        dataset=dataset,
        config=config,
        run=run,
        group=None,
        ids_group=None,
        metrics=MetricWriter(run, num_steps=num_steps, attempt=0) if runner.is_last else None,
        on_step=lambda step: None,
    )
