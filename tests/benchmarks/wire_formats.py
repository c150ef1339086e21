"""What narrow formats between workers cost in quality and save in bytes and time: the same jobs in each of them.

Two replicas of the first stage, which exchange rows and gradients by messages, and one of the second train the
synthetic stream from scratch, with several seeds; the held-out rows are the same. Speed is that of three workers on
hosts of their own, network namespaces behind links of 10 Mbit/s, so that what crosses them takes most of a step.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint import TrainingCursor
from heterps_core.training.evaluation import judge_trained
from heterps_core.training.job import DELAYED, WIRE_DTYPES, TrainingConfig, TrainingJob, default_microbatches
from heterps_core.training.monitor import submit_job
from heterps_core.training.storage.run_directory import RunDirectory
from tests.benchmarks.measured_clusters import DrawnCluster, make_dataset, measured_in_namespace
from tests.heterps_core.training.worker_parts import training_loop_of
from tests.network_hosts import why_no_hosts
from tests.worker_processes import run_in_processes

STAGES = (Stage(0, 2, "cpu", 2), Stage(3, 7, "cpu", 1))
BATCH_SIZE = 256
NUM_CLICKS = 100_000
BUCKETS_PER_SLOT = 40_000
NUM_SEEDS = 5
NUM_SPEED_ROUNDS = 3
NARROW_MBIT_PER_S = 10.0


def run(*, seed: int = 0, num_cases: int = NUM_SEEDS) -> list[dict[str, Any]]:
    """Train, print a table and return its figures in the form of the benchmark contract; `num_cases` are seeds."""
    aucs: dict[str, list[float]] = {dtype: [] for dtype in WIRE_DTYPES}
    step_bytes: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        speeds = speeds_behind_narrow_links(Path(folder))
        stream = write_click_stream(Path(folder) / "clicks.tsv", num_rows=NUM_CLICKS, seed=seed)
        prepared = Path(folder) / "prepared"
        prepare_dataset(
            stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=BUCKETS_PER_SLOT, out_dir=prepared
        )
        for number in range(seed, seed + num_cases):
            for dtype in WIRE_DTYPES:
                auc, step_bytes[dtype] = trained(prepared, dtype, number, Path(folder) / f"{dtype}-{number}")
                aucs[dtype].append(auc)
            print(
                f"seed {number}: {', '.join(f'{dtype} AUC {aucs[dtype][-1]:.5f}' for dtype in WIRE_DTYPES)}",
                flush=True,
            )
    found = {"float32_step_bytes": (step_bytes["float32"], "bytes", False)}
    for dtype in WIRE_DTYPES[1:]:
        differences = [one - other for one, other in zip(aucs[dtype], aucs["float32"], strict=True)]
        deviation = statistics.stdev(differences) if num_cases > 1 else 0.0
        found |= {
            f"{dtype}_less_float32_auc": (statistics.fmean(differences), "AUC", True),
            f"{dtype}_less_float32_auc_deviation": (deviation, "AUC", False),
            f"{dtype}_over_float32_step_bytes": (step_bytes[dtype] / step_bytes["float32"], "ratio", False),
        }
    for name, speed in speeds.items():
        found[f"{name}_over_float32_speed"] = (speed, "ratio", True)
    for name, (value, unit, _) in found.items():
        print(f"{name:<44}{value:>16.6f} {unit}")
    return [
        {"name": name, "value": round(value, 6), "unit": unit, "higher_is_better": is_better}
        for name, (value, unit, is_better) in found.items()
    ]


def speeds_behind_narrow_links(folder: Path) -> dict[str, float]:
    """Return samples/s in each narrow format over those in float32, median of rounds; none where hosts cannot be."""
    if (reason := why_no_hosts()) is not None:
        print(f"speed is left out: {reason}")
        return {}
    dataset = make_dataset(folder / "narrow")
    cluster = DrawnCluster(
        model="ctrdnn(hidden_widths=128-64)",
        batch_size=512,
        last_layers=(STAGES[0].last_layer, 5),
        replicas=tuple(stage.num_replicas for stage in STAGES),
        mbit_per_s=(NARROW_MBIT_PER_S,) * len(STAGES),
    )
    ratios: dict[str, list[float]] = {dtype: [] for dtype in WIRE_DTYPES[1:]}
    for number in range(NUM_SPEED_ROUNDS):
        speeds = {
            dtype: measured_in_namespace(
                replace(cluster, wire_dtype=dtype), dataset, folder / f"measured-{number}"
            )[DELAYED].samples_per_s
            for dtype in WIRE_DTYPES
        }
        print(", ".join(f"{dtype} {speed:,.0f} samples/s" for dtype, speed in speeds.items()), flush=True)
        for dtype, found in ratios.items():
            found.append(speeds[dtype] / speeds["float32"])
    return {dtype: statistics.median(found) for dtype, found in ratios.items()}


def trained(dataset: Path, wire_dtype: str, seed: int, folder: Path) -> tuple[float, float]:
    """Train one job; returns its AUC on the held-out rows and the bytes that all workers sent in a step."""
    job = TrainingJob(
        run_id=folder.name,
        model="ctrdnn",
        dataset=str(dataset),
        stages=STAGES,
        config=TrainingConfig(
            batch_size=BATCH_SIZE,
            num_microbatches=default_microbatches(BATCH_SIZE, num_stages=len(STAGES)),
            num_epochs=1,
            seed=seed,
            wire_dtype=wire_dtype,
        ),
    )
    submit_job(RunDirectory(str(folder)), job)
    found = run_in_processes(train_part, sum(job.replicas_per_stage), str(folder))
    [auc] = [auc for auc, _ in found if auc is not None]
    return auc, sum(sent_bytes for _, sent_bytes in found)


def train_part(rank: int, folder: str) -> tuple[float | None, float]:
    """Train one worker's part; returns the AUC, of the last stage, and the bytes that it sent in a step."""
    _, loop = training_loop_of(rank, RunDirectory(folder))
    end = loop.train(TrainingCursor())
    sent = loop.runner.sent_bytes + sum(table.sent_bytes for table in loop.model.tables.values())
    judgements = list(judge_trained(loop, None).values())
    return judgements[0].click_quality().auc if judgements else None, sent / end.step
