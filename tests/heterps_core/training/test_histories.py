"""A training with rows that point to their histories equals one with rows that hold them as lists, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.errors import DataError
from heterps_core.models.chain import build_chain
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.serving.exported_model import ClickPredictor, export_model
from heterps_core.serving.file_prediction import predict_files
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.monitor import submit_job
from heterps_core.training.start_model import begin
from heterps_core.training.storage.run_directory import RunDirectory
from tasks.click_model import ClickModel
from tests.heterps_core.data.history.event_rows import draw_events, draw_rows, fat, schema_of, write
from tests.heterps_core.training.worker_parts import training_loop_of
from tests.worker_processes import run_in_processes

pytestmark = pytest.mark.slow

MODEL = "din(embedding_dim=4)"
JOB = {
    "run_id": "r",
    "model": MODEL,
    "config": TrainingConfig(batch_size=64, num_microbatches=2, num_epochs=2, seed=3),
}
ROWS, EVENTS = draw_rows(1_500, seed=5), draw_events(4_000, seed=5)


def train_part(rank: int, run_folder: str) -> list[float]:
    run = RunDirectory(run_folder)
    job, loop = training_loop_of(rank, run)
    losses: list[float] = []
    if loop.metrics is not None:
        loop.metrics.add = lambda metrics: losses.append(metrics.loss)  # type: ignore[method-assign]
    loop.train(begin(run, job, loop.model))
    return losses


def train(folder: Path, rows: pa.Table, schema: Any) -> list[float]:
    dataset = prepare_dataset(
        write(rows, folder / "rows.parquet", row_group_size=256),
        schema=schema,
        buckets_per_slot=61,
        out_dir=folder / "out" / "prepared",
    )
    run = RunDirectory(str(folder / "run"))
    last = len(build_chain(MODEL, dataset.features, seed=0)) - 1
    stages = (Stage(0, 0, "cpu", 2), Stage(1, last, "cpu", 1))
    submit_job(run, TrainingJob(dataset=str(dataset.directory), stages=stages, **JOB))
    *_, losses = run_in_processes(train_part, 3, str(folder / "run"))
    export_model(run, dataset.manifest, folder / "exported", model=MODEL)
    return losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and predictors of both trainings, and the rows with lists."""
    folder = tmp_path_factory.mktemp("histories")
    rows, schema = fat(ROWS, EVENTS)
    by_pointer = schema_of(write(EVENTS, folder / "events" / "1.parquet").parent)
    losses = [
        train(folder / "fat", rows, schema),
        train(folder / "by_pointer", ROWS, by_pointer),
    ]
    return {
        "losses": losses,
        "predictors": [ClickPredictor(folder / name / "exported") for name in ("fat", "by_pointer")],
        "rows": rows,
        "exported": folder / "by_pointer" / "exported",
    }


def test_losses_are_equal_bit_for_bit(trained):
    in_lists, by_pointer = trained["losses"]

    assert len(in_lists) == 2 * (1_200 // 64)
    assert by_pointer == in_lists


def test_a_served_model_looks_histories_up_by_key_and_time(trained):
    in_lists, by_pointer = trained["predictors"]
    columns = trained["rows"].to_pydict()
    expected = in_lists.predict(columns)

    looked_up = {name: columns[name] for name in ROWS.column_names}
    np.testing.assert_array_equal(by_pointer.predict(looked_up), expected)
    # Whoever keeps the lists may give them.
    np.testing.assert_array_equal(by_pointer.predict(columns), expected)


def test_a_request_without_a_time_sees_the_newest_events(trained):
    in_lists, by_pointer = trained["predictors"]
    now = pa.table({"user": [3, 99], "item": [1, 1], "seen_at": [10**6] * 2, "click": [0, 0]})
    expected = in_lists.predict(fat(now, EVENTS)[0].to_pydict())

    np.testing.assert_array_equal(by_pointer.predict({"user": ["3", "99"], "item": [1, 1]}), expected)
    # As MLflow's server hands over one row of JSON.
    [first] = ClickModel(trained["exported"]).predict({"user": 3, "item": 1})
    assert first == pytest.approx(expected[0], abs=1e-7)
    with_gap = {"user": [3, 99], "item": [1, 1], "seen_at": [None, 10**6]}
    np.testing.assert_array_equal(by_pointer.predict(with_gap), expected)


def test_a_request_with_some_lists_of_a_history_lacks_the_others(trained):
    _, by_pointer = trained["predictors"]

    with pytest.raises(DataError, match="must have the columns past_items"):
        by_pointer.predict({"user": [3], "item": [1], "past_actions": [["buy"]]})


@pytest.mark.parametrize("times", [["1", 2], ["soon", "late"], [b"1", b"2"], [[1], [2]]])
def test_times_that_cannot_be_compared_are_an_error_of_the_request(trained, times):
    _, by_pointer = trained["predictors"]

    with pytest.raises(DataError, match="column seen_at must hold") as caught:
        by_pointer.predict({"user": [3, 99], "item": [1, 1], "seen_at": times})
    assert "\n" not in str(caught.value)


def test_a_file_is_predicted_by_its_keys_and_times(trained, tmp_path):
    in_lists, by_pointer = trained["predictors"]
    rows = write(ROWS.drop_columns(["click"]), tmp_path / "rows.parquet")

    predict_files(by_pointer, [rows], tmp_path / "out.parquet")

    found = pq.read_table(tmp_path / "out.parquet")["probability"].to_numpy()
    np.testing.assert_array_equal(found, in_lists.predict(trained["rows"].to_pydict()))
    write(ROWS.drop_columns(["seen_at"]), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="must have the columns seen_at"):
        predict_files(by_pointer, [rows], tmp_path / "out.parquet")


def test_events_that_are_gone_are_no_error_of_a_row(trained, tmp_path):
    rows = write(ROWS, tmp_path / "rows.parquet")
    events = trained["exported"].parents[1] / "events"
    events.rename(tmp_path / "moved")
    try:
        with pytest.raises(DataError, match="there is no such file or folder") as caught:
            predict_files(ClickPredictor(trained["exported"]), [rows], tmp_path / "out.parquet")
    finally:
        (tmp_path / "moved").rename(events)

    assert caught.value.path == str(events)
