from dataclasses import replace

import pytest

from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.profiling.measuring_process import ProfileRequest
from tasks import profiling
from tasks.profiling import check_model, planned_job
from tests.contracts.own_models import WITH_BATCH_NORM, WITH_DROPOUT
from tests.heterps_core.data.synthetic_rows import prepare, write_parquet


def test_a_dry_run_plans_the_tables_of_production_but_keeps_rows_that_the_schema_gives(tmp_path):
    schema = replace(CRITEO_SCHEMA, table_rows={"C2": 77}, dimensions={"C1": 4})
    dataset = prepare(write_parquet(tmp_path / "rows.parquet", 100), tmp_path / "out", schema=schema)

    planned = planned_job(
        dataset,
        is_dry_run=True,
        batch_size=None,
        planned_samples=10**9,
        planned_rows_per_slot=1_000_000,
    )

    assert planned.features.slot_rows == (1_000_000, 77, *(1_000_000,) * 24)
    assert planned.features.slot_dimensions[:2] == (4, None)
    assert planned.num_samples == 10**9


def test_a_plan_is_for_the_rows_that_are_trained_unless_a_larger_night_is_asked_for(tmp_path):
    dataset = prepare(write_parquet(tmp_path / "rows.parquet", 100), tmp_path / "out")
    nothing = {"batch_size": None, "planned_samples": None, "planned_rows_per_slot": None}

    own = planned_job(dataset, is_dry_run=True, **nothing)
    night = planned_job(dataset, is_dry_run=True, **nothing | {"planned_samples": 10**9})
    rented = planned_job(dataset, is_dry_run=False, **nothing | {"planned_samples": 10**9})

    assert (own.num_samples, own.features) == (dataset.num_train_rows, dataset.features)
    assert (night.num_samples, set(night.features.slot_rows)) == (10**9, {300_000_000})
    assert rented == own
    part = planned_job(dataset, is_dry_run=True, **nothing | {"max_samples": own.num_samples // 4})
    assert part.num_samples == own.num_samples // 4
    assert part.evaluated_share * part.num_samples == pytest.approx(dataset.num_eval_rows)


def test_batch_normalization_is_said_to_follow_the_plan(caplog):
    with caplog.at_level("INFO"):
        check_model(WITH_DROPOUT, CRITEO_SCHEMA)
        assert not caplog.messages
        check_model(WITH_BATCH_NORM, CRITEO_SCHEMA)

    (message,) = caplog.messages
    assert "batch_norm will normalize each replica's rows of a micro-batch" in message


@pytest.mark.parametrize(
    ("batch_size", "microbatch", "measured"), [(64, 64, 64), (512, 256, 512), (4096, 1024, 2048)]
)
def test_a_dry_run_is_measured_at_twice_the_microbatch_of_two_stages(batch_size, microbatch, measured):
    request = ProfileRequest(model="lr", features=CRITEO_SCHEMA.features((2,) * 26), batch_size=microbatch)

    assert profiling.dry_run_request(request, batch_size).batch_size == measured
