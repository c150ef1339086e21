"""What delayed updates cost in quality: the same jobs trained with both update modes, by the trainer itself.

A pipeline of two stages trains the synthetic stream from scratch, with several seeds and in batches of several
sizes, so in more or fewer steps; the held-out rows are the same. From as many steps on as its AUC is within 0.0005 of
that of `sync`, `delayed` is the default (`STEPS_TO_DELAY`).
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.evaluation import judge_trained
from heterps_core.training.job import (
    UPDATE_MODES,
    TrainingConfig,
    TrainingJob,
    delayed_microbatches,
)
from heterps_core.training.monitor import submit_job
from heterps_core.training.storage.run_directory import RunDirectory
from tests.heterps_core.training.worker_parts import training_loop_of
from tests.worker_processes import run_in_processes

MODEL = "ctrdnn"
STAGES = (Stage(0, 2, "cpu", 1), Stage(3, 7, "cpu", 1))
BATCH_SIZES = (512, 256, 128, 64)
NUM_CLICKS = 200_000
BUCKETS_PER_SLOT = 40_000
NUM_SEEDS = 5


def run(*, seed: int = 0) -> list[dict[str, Any]]:
    """Train, print a table and return its figures in the form of the benchmark contract."""
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        stream = write_click_stream(Path(folder) / "clicks.tsv", num_rows=NUM_CLICKS, seed=seed)
        dataset = prepare_dataset(
            stream.path,
            schema=CRITEO_SCHEMA,
            buckets_per_slot=BUCKETS_PER_SLOT,
            out_dir=Path(folder) / "prepared",
        )
        for batch_size in BATCH_SIZES:
            num_steps = dataset.num_batches(batch_size)
            differences: dict[str, list[float]] = {"auc": [], "log_loss": []}
            print(f"batches of {batch_size}, {num_steps:,} steps")
            for number in range(seed, seed + NUM_SEEDS):
                found = {
                    mode: quality(
                        dataset, batch_size, mode, number, Path(folder) / f"{batch_size}-{mode}-{number}"
                    )
                    for mode in UPDATE_MODES
                }
                shown = (f"{mode} AUC {auc:.5f}, log-loss {loss:.5f}" for mode, (auc, loss) in found.items())
                print(f"  seed {number}: {'; '.join(shown)}")
                differences["auc"].append(found["delayed"][0] - found["sync"][0])
                differences["log_loss"].append(found["delayed"][1] - found["sync"][1])
            for what, values in differences.items():
                figures.append(
                    {
                        "name": f"delayed_less_sync_{what}_{num_steps}_steps",
                        "value": round(statistics.fmean(values), 6),
                        "unit": "nats" if what == "log_loss" else "AUC",
                        "higher_is_better": what == "auc",
                    }
                )
    for entry in figures:
        print(f"{entry['name']:<44}{entry['value']:>10.6f}")
    return figures


def quality(
    dataset: PreparedDataset, batch_size: int, update_mode: str, seed: int, folder: Path
) -> tuple[float, float]:
    """Train one job and return its AUC and log-loss on the held-out rows."""
    job = TrainingJob(
        run_id=folder.name,
        model=MODEL,
        dataset=str(dataset.directory),
        stages=STAGES,
        config=TrainingConfig(
            batch_size=batch_size,
            num_microbatches=delayed_microbatches(batch_size, num_stages=len(STAGES)),
            num_epochs=1,
            seed=seed,
            update_mode=update_mode,
        ),
    )
    submit_job(RunDirectory(str(folder)), job)
    [found] = [part for part in run_in_processes(train_part, len(STAGES), str(folder)) if part is not None]
    return found


def train_part(rank: int, folder: str) -> tuple[float, float] | None:
    """Train one worker's part; returns AUC and log-loss on the worker that reports."""
    _, loop = training_loop_of(rank, RunDirectory(folder))
    loop.train(TrainingCursor())
    judgements = list(judge_trained(loop, None).values())
    if not judgements:
        return None
    found = judgements[0].click_quality()
    return found.auc, found.log_loss
