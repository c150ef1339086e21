"""Dynamic ids beside hashed ones: collisions, thirty nights whose values drift, and what looking rows up costs.

Each night a tenth of the active values of a column is replaced by new ones, which have effects of their own on the
click. Both models train every night from where they were the night before and are judged on the next day's rows: one
with dynamic ids, one whose hashed tables have twice the rows that the dynamic ones end with.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from heterps_core.data.features import DynamicIds, FeatureSpec
from heterps_core.data.hashing import keys_of_hashes, mix
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import DataSchema
from heterps_core.embeddings.id_index import IdLayout
from heterps_core.embeddings.row_optimizers import RowWiseAdagrad
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.exported_model import export_model
from heterps_core.training.evaluation import judge_trained
from heterps_core.training.job import OptimizerState, StartModel, TrainingConfig, TrainingJob
from heterps_core.training.monitor import submit_job
from heterps_core.training.pipeline.stage_layers import keep_freed_memory
from heterps_core.training.start_model import begin
from heterps_core.training.storage.exported_files import read_description
from heterps_core.training.storage.run_directory import RunDirectory
from tasks.running.start import ACCUMULATORS_KEPT
from tests.heterps_core.training.worker_parts import training_loop_of
from tests.worker_processes import run_in_processes

NUM_NIGHTS = 30
ROWS_PER_NIGHT, JUDGED_ROWS = 20_000, 10_000
NUM_COLUMNS, ACTIVE_VALUES, NEW_VALUES = 4, 2_000, 200
MODEL = "ctrdnn(hidden_widths=32, embedding_dim=8)"
TIME_TO_LIVE_DAYS = 3
FIRST_DAY = 739_000
EFFECT_DEVIATION = 0.8

LOOKED_UP_COLUMNS, BATCH_SIZE, DIMENSION = 26, 4_096, 16
COLUMN_ROWS = 256 * 512
LOAD = 0.75
NUM_BATCHES, NUM_ROUNDS = 8, 8


def run(*, seed: int = 0) -> list[dict[str, Any]]:
    """Measure, print a table and return its figures in the form of the benchmark contract."""
    found: dict[str, tuple[float, str, bool]] = {"collisions_at_load_0.75": (_collisions(), "ids", False)}
    for exponent in (0.8, 1.05, 1.2):
        for name, ratio in _look_up_speeds(exponent, seed=seed).items():
            found[f"{name}_zipf{exponent}"] = (ratio, "ratio", True)
    for name in ("dynamic_over_static_lookup", "dynamic_over_static_trained_lookup"):
        found[name] = found[f"{name}_zipf1.05"]
    with tempfile.TemporaryDirectory() as folder:
        (dynamic,) = run_in_processes(nights, 1, f"{folder}/dynamic", seed, None)
        slot_rows = tuple(2 * rows for rows in dynamic[-1].slot_rows)
        (static,) = run_in_processes(nights, 1, f"{folder}/static", seed, slot_rows)
    differences = [one.auc - other.auc for one, other in zip(dynamic, static, strict=True)]
    rows = [sum(night.slot_rows) for night in dynamic]
    for number, (one, other) in enumerate(zip(dynamic, static, strict=True), start=1):
        print(
            f"night {number}: {sum(one.slot_rows):,} rows, {one.num_ids:,} ids, {one.num_evicted:,} evicted, "
            f"AUC {one.auc:.4f}, hashed into {sum(other.slot_rows):,} rows {other.auc:.4f}"
        )
    found |= {
        "dynamic_minus_static_auc": (statistics.fmean(differences), "AUC", True),
        "dynamic_minus_static_auc_error": (
            statistics.stdev(differences) / len(differences) ** 0.5,
            "AUC",
            False,
        ),
        "dynamic_rows_last_over_tenth_night": (rows[-1] / rows[9], "ratio", False),
    }
    for name, (value, unit, _) in found.items():
        print(f"{name:<48}{value:>12.5f} {unit}")
    return [
        {"name": name, "value": round(value, 6), "unit": unit, "higher_is_better": is_better}
        for name, (value, unit, is_better) in found.items()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Night:
    """What came of one night."""

    auc: float
    slot_rows: tuple[int, ...]
    """For the night after."""

    num_ids: int
    num_evicted: int


def nights(_: int, folder: str, seed: int, slot_rows: tuple[int, ...] | None) -> list[Night]:
    """Train the nights one after the other; with hashed ids where tables of some rows are given."""
    schema = DataSchema(
        name="drifting",
        label_column="click",
        categorical_columns=tuple(f"column_{number}" for number in range(NUM_COLUMNS)),
        dynamic_ids=DynamicIds(time_to_live_days=TIME_TO_LIVE_DAYS) if slot_rows is None else None,
    )
    found: list[Night] = []
    before: Path | None = None
    for number in range(NUM_NIGHTS):
        night = Path(folder) / f"{number}"
        night.mkdir(parents=True)
        _write_rows(night / "train.parquet", night=number, num_rows=ROWS_PER_NIGHT, seed=seed)
        _write_rows(night / "judged.parquet", night=number + 1, num_rows=JUDGED_ROWS, seed=seed + 1_000)
        dataset = prepare_dataset(
            night / "train.parquet",
            schema=schema,
            buckets_per_slot=slot_rows,
            eval_source=night / "judged.parquet",
            out_dir=night / "prepared",
        )
        run_directory = RunDirectory(str(night / "run"))
        job = TrainingJob(
            run_id=f"night-{number}",
            model=MODEL,
            dataset=str(dataset.directory),
            stages=(Stage(0, 3, "cpu", 1),),
            config=TrainingConfig(
                batch_size=64,
                num_microbatches=1,
                num_epochs=1,
                seed=seed + number,
                checkpoint_interval_steps=10_000,
                day_number=FIRST_DAY + number,
            ),
            start_model=None if before is None else _start_model(before),
        )
        submit_job(run_directory, job, start_folder=before)
        _, loop = training_loop_of(0, run_directory)
        loop.train(begin(run_directory, job, loop.model))
        judgement = judge_trained(loop, None)["click"]
        before = night / "exported"
        turnover = export_model(run_directory, dataset.manifest, before, model=MODEL)
        features = FeatureSpec.from_json(read_description(before)["features"])
        slot_rows = features.slot_rows
        found.append(
            Night(
                auc=judgement.click_quality().auc or 0.5,
                slot_rows=slot_rows,
                num_ids=sum(each.num_ids for each in turnover),
                num_evicted=sum(each.num_evicted for each in turnover),
            )
        )
    return found


def _start_model(folder: Path) -> StartModel:
    description = json.loads((folder / "model.json").read_text())
    return StartModel(
        version="1",
        run_id="before",
        weights_sha256=description["weights_sha256"],
        optimizer_state=OptimizerState(**description["optimizer_state"]),
        accumulators_kept=ACCUMULATORS_KEPT,
    )


def _write_rows(path: Path, *, night: int, num_rows: int, seed: int) -> None:
    """Write rows of a night: values 200 n .. 200 n + 1999 of each column are active, some far oftener than others."""
    generator = np.random.default_rng([seed, night])
    logits = np.full(num_rows, -1.0)
    columns: dict[str, Any] = {}
    for column in range(NUM_COLUMNS):
        values = np.arange(night * NEW_VALUES, night * NEW_VALUES + ACTIVE_VALUES)
        # Of each value for good: how often it comes, and what it does.
        uniform = mix(values.astype(np.uint64) + np.uint64(column << 32)) / 2.0**64
        weights = 1.0 / (1.0 + ACTIVE_VALUES * uniform)
        effects = EFFECT_DEVIATION * _normal(mix(values.astype(np.uint64) + np.uint64(column << 40)))
        drawn = generator.choice(ACTIVE_VALUES, num_rows, p=weights / weights.sum())
        logits += effects[drawn]
        columns[f"column_{column}"] = pa.array([f"{value}" for value in values[drawn].tolist()])
    clicks = generator.random(num_rows) < 1.0 / (1.0 + np.exp(-logits))
    columns["click"] = pa.array(clicks.astype(np.int8))
    pq.write_table(pa.table(columns), path, row_group_size=5_000)


def _normal(hashes: Any) -> Any:
    """Return a standard normal number for each hash (Box and Muller)."""
    first, second = (hashes >> np.uint64(32)) / 2.0**32, (hashes & np.uint64(2**32 - 1)) / 2.0**32
    return np.sqrt(-2.0 * np.log(first + 2.0**-33)) * np.cos(2.0 * np.pi * second)


def _collisions() -> float:
    """Return how many of three million ids, with which tables are three quarters full, share a row with another."""
    tables, ids = _tables()
    num_ids = sum(map(len, ids))
    rows = torch.cat([tables["dynamic"].ids.rows(torch.from_numpy(own)) for own in ids])  # type: ignore[union-attr]
    return float(num_ids - len(rows.unique()))


def _tables() -> tuple[dict[str, ShardedTable], list[Any]]:
    """Return a table with dynamic ids, three quarters full, a hashed one of the same size, and the ids by column."""
    features = FeatureSpec(
        num_dense=0,
        slot_rows=(COLUMN_ROWS,) * LOOKED_UP_COLUMNS,
        dynamic_ids=DynamicIds(min_sightings=1),
    )
    sizes: dict[str, Any] = {
        "num_rows": LOOKED_UP_COLUMNS * COLUMN_ROWS,
        "dimension": DIMENSION,
        "optimizer": RowWiseAdagrad(),
        "seed": 0,
        "initial_standard_deviation": 0.1,
    }
    layout = IdLayout.of(features, range(LOOKED_UP_COLUMNS))
    dynamic = ShardedTable(name="dynamic", ids=layout, day=1, **sizes)
    assert dynamic.ids is not None
    ids = [
        keys_of_hashes(_hashes(column), slot=column, hash_bits=features.hash_bits)
        for column in range(LOOKED_UP_COLUMNS)
    ]
    for own in ids:
        dynamic.ids.rows_seen(torch.from_numpy(own), torch.zeros(layout.num_rows, dtype=torch.bool))
    return {"dynamic": dynamic, "static": ShardedTable(name="static", **sizes)}, ids


def _hashes(column: int) -> Any:
    num_values = int(COLUMN_ROWS * LOAD)
    return mix(np.arange(num_values, dtype=np.uint64) + np.uint64(column * num_values))


def _look_up_speeds(exponent: float, *, seed: int) -> dict[str, float]:
    """Return the processor time of look-ups in the static table over the dynamic one's, alone and with training."""
    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tables, ids = _tables()
    generator = np.random.default_rng(seed)
    num_values = len(ids[0])
    weights = np.arange(1, num_values + 1) ** -exponent
    looked_up: dict[str, list[torch.Tensor]] = {name: [] for name in tables}
    for _ in range(NUM_BATCHES):
        dynamic, static = [], []
        for column, own in enumerate(ids):
            drawn = generator.choice(num_values, BATCH_SIZE, p=weights / weights.sum())
            dynamic.append(own[drawn])
            rows = 1 + _hashes(column)[drawn] % np.uint64(COLUMN_ROWS - 1)
            static.append(rows.astype(np.int64) + column * COLUMN_ROWS)
        looked_up["dynamic"].append(torch.from_numpy(np.stack(dynamic, 1)))
        looked_up["static"].append(torch.from_numpy(np.stack(static, 1)))
    gradient = torch.randn(BATCH_SIZE, LOOKED_UP_COLUMNS * DIMENSION)

    def look_up(table: ShardedTable, batch: torch.Tensor) -> None:
        table.lookup(batch)

    def train(table: ShardedTable, batch: torch.Tensor) -> None:
        table.lookup(batch).backward(gradient)  # type: ignore[no-untyped-call]
        table.apply_gradients(learning_rate=0.01)

    found = {}
    for name, what in (("", look_up), ("trained_", train)):
        seconds = {table: _median_seconds(what, tables[table], looked_up[table]) for table in tables}
        found[f"dynamic_over_static_{name}lookup"] = seconds["static"] / seconds["dynamic"]
    torch.set_num_threads(threads)
    return found


def _median_seconds(
    what: Callable[[ShardedTable, torch.Tensor], None], table: ShardedTable, batches: list[torch.Tensor]
) -> float:
    seconds = []
    for _ in range(NUM_ROUNDS):
        for batch in batches:
            started_s = time.process_time()
            what(table, batch)
            seconds.append(time.process_time() - started_s)
    return statistics.median(seconds)
