"""A table that no memory limit lets a process hold is profiled, trained, kept, judged and exported nevertheless."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.measuring_process import ProfileRequest, measure_in_fresh_process
from heterps_core.serving.exported_model import ClickPredictor, export_model
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.storage.exported_files import WEIGHTS
from heterps_core.training.storage.run_directory import RunDirectory
from tests.heterps_core.serving.builders import raw_columns
from tests.heterps_core.training.node_processes import train
from tests.memory_group import memory_group

ROWS_PER_SLOT = 1_600_000
TABLE_BYTES = 26 * ROWS_PER_SLOT * (8 + 1) * 4
"""Eight weights and Adagrad's sum for each row: 1.5 GB."""

LIMIT_BYTES = 1_400_000_000
"""Of all processes together. They take 1.25 GB while layers are measured, of which tables are 0.5."""

MODEL = "ctrdnn(hidden_widths=16, embedding_dim=8)"


pytestmark = [pytest.mark.root, pytest.mark.weekly]


def pass_a_night(folder: Path) -> None:
    """Prepare rows, measure layers, train with checkpoints, judge, export and predict."""
    stream = write_click_stream(folder / "clicks.tsv", num_rows=3_000, seed=1)
    dataset = prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=ROWS_PER_SLOT, out_dir=folder / "prepared"
    )
    config = TrainingConfig(
        batch_size=64,
        num_microbatches=1,
        num_epochs=1,
        seed=3,
        checkpoint_interval_steps=20,
        embedding_memory_bytes=50_000_000,
    )
    (profile,) = measure_in_fresh_process(
        ProfileRequest(model=MODEL, features=dataset.features, batch_size=64, budget_s=0.2)
    )
    run = RunDirectory(str(folder / "run"))
    job = TrainingJob(
        run_id="test",
        model=MODEL,
        dataset=str(dataset.directory),
        stages=(Stage(0, len(profile.timings) - 1, "cpu", 1),),
        config=config,
    )
    training = train(run, job)
    export_model(run, dataset.manifest, folder / "exported", model=MODEL)
    predicted = ClickPredictor(folder / "exported").predict(raw_columns(stream.path, slice(100)))
    assert training.is_complete
    assert training.judgements
    assert len(predicted) == 100


def test_a_night_with_a_table_larger_than_the_memory_of_all_its_processes_ends(disk_folder):
    assert TABLE_BYTES > LIMIT_BYTES
    code = f"import pathlib, {__name__} as night; night.pass_a_night(pathlib.Path({str(disk_folder)!r}))"
    with memory_group(LIMIT_BYTES) as group:
        night = subprocess.run(
            [sys.executable, "-c", code],
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
            capture_output=True,
            text=True,
            check=False,
        )

    assert night.returncode == 0, night.stderr
    assert (disk_folder / "exported" / WEIGHTS).stat().st_size > TABLE_BYTES * 8 / 9
