"""What delayed updates cost in quality: the same jobs trained with both update modes, by the trainer itself.

Pipelines of two and of three stages train the synthetic stream from scratch, with one seed after another; the
held-out rows are the same for both modes. `delayed` is the default where its AUC is within 0.0005 of that of `sync`.
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
from heterps_core.judging.quality import measure_quality
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.job import (
    UPDATE_MODES,
    TrainingConfig,
    TrainingJob,
    default_batch_size,
    delayed_microbatches,
)
from heterps_core.training.monitor import submit_job
from heterps_core.training.storage.run_directory import RunDirectory
from tests.heterps_core.training.worker_parts import training_loop_of
from tests.worker_processes import run_in_processes

MODEL = "ctrdnn"
FIRST_LAYERS = {"two_stages": (0, 3), "three_stages": (0, 1, 3)}
NUM_LAYERS = 8
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
        for name, first_layers in FIRST_LAYERS.items():
            differences = {"auc": [], "log_loss": []}
            print(f"{name}: layers from {first_layers}")
            for number in range(seed, seed + NUM_SEEDS):
                found = {
                    mode: quality(
                        dataset, first_layers, mode, number, Path(folder) / f"{name}-{mode}-{number}"
                    )
                    for mode in UPDATE_MODES
                }
                print(
                    f"  seed {number}: "
                    + ", ".join(f"{m} AUC {a:.5f} log-loss {b:.5f}" for m, (a, b) in found.items())
                )
                differences["auc"].append(found["delayed"][0] - found["sync"][0])
                differences["log_loss"].append(found["delayed"][1] - found["sync"][1])
            for what, values in differences.items():
                figures.append(
                    {
                        "name": f"{name}_delayed_less_sync_{what}",
                        "value": round(statistics.fmean(values), 6),
                        "unit": "nats" if what == "log_loss" else "AUC",
                        "higher_is_better": what == "auc",
                    }
                )
    for entry in figures:
        print(f"{entry['name']:<44}{entry['value']:>10.6f}")
    return figures


def quality(
    dataset: PreparedDataset, first_layers: tuple[int, ...], update_mode: str, seed: int, folder: Path
) -> tuple[float, float]:
    """Train one job and return its AUC and log-loss on the held-out rows."""
    lasts = [*(first - 1 for first in first_layers[1:]), NUM_LAYERS - 1]
    stages = tuple(Stage(first, last, "cpu", 1) for first, last in zip(first_layers, lasts, strict=True))
    batch_size = default_batch_size(dataset.num_train_rows)
    job = TrainingJob(
        run_id=folder.name,
        model=MODEL,
        dataset=str(dataset.directory),
        stages=stages,
        config=TrainingConfig(
            batch_size=batch_size,
            num_microbatches=delayed_microbatches(batch_size, num_stages=len(stages)),
            num_epochs=1,
            seed=seed,
            update_mode=update_mode,
        ),
    )
    submit_job(RunDirectory(str(folder)), job)
    [found] = [part for part in run_in_processes(train_part, len(stages), str(folder)) if part is not None]
    return found


def train_part(rank: int, folder: str) -> tuple[float, float] | None:
    """Train one worker's part; returns AUC and log-loss on the worker that reports."""
    _, loop = training_loop_of(rank, RunDirectory(folder))
    loop.train(TrainingCursor())
    logits = loop.predict_held_out()
    if logits is None:
        return None
    found = measure_quality(loop.dataset.eval_labels, logits)
    return found.auc, found.log_loss
