from dataclasses import replace

import pytest

from heterps_core.planning.cost_model.evaluation import StageEvaluation
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.training_run import SweepFigures
from tasks.reports.stage_outcomes import seconds_by_stage, stage_outcomes, stage_series
from tests.tasks.report_builders import make_bill, make_training

STAGES = (Stage(0, 0, "cpu-c7i", 2), Stage(1, 2, "gpu-t4", 1))


def outcomes(**training):
    return stage_outcomes(
        STAGES,
        (0.016, 0.008),
        make_training(**training),
        (make_bill(),),
        batch_size=100,
    )


def test_figures_of_a_stage_by_hand():
    cpu, gpu = outcomes()

    # A step of 25 ms, of which the workers of the stages waited 20 and 60 %.
    assert cpu.measured_seconds == pytest.approx(0.020)
    assert gpu.measured_seconds == pytest.approx(0.010)
    # Half a minute at 0.36 USD/hour.
    assert cpu.billed_usd == pytest.approx(0.003)


def test_a_stage_whose_workers_did_not_tell_is_not_measured():
    _, gpu = outcomes(idle_shares={0: 0.2})

    assert gpu.measured_seconds is None
    assert gpu.predicted_seconds == 0.008


def test_figures_of_stages_are_series_over_their_index_without_those_that_are_missing():
    series = stage_series(outcomes(idle_shares={1: 0.6}))

    assert series["stage/predicted_step_seconds"] == [(0, 0.016), (1, 0.008)]
    assert series["stage/measured_step_seconds"] == [(1, pytest.approx(0.010))]


def test_a_stage_with_tables_on_disk_tells_what_they_took():
    training = replace(
        make_training(),
        sweeps={0: SweepFigures(hit_share=0.6, rows_per_step=200.0, disk_bytes_per_sample=5_000.0)},
    )
    found = stage_outcomes(STAGES, (0.016, 0.008), training, (make_bill(),), batch_size=100)

    series = stage_series(found)

    assert series["stage/hit_share"] == [(0, 0.6)]
    assert series["stage/cold_rows_per_step"] == [(0, 200.0)]
    assert series["stage/disk_bytes_per_sample"] == [(0, 5_000.0)]


def test_workers_of_a_dry_run_communicate_after_computing_and_rented_ones_meanwhile():
    part = StageEvaluation(
        stage=STAGES[0],
        compute_seconds=0.003,
        communication_seconds=0.002,
        exchange_seconds=0.0,
        memory_bytes=0.0,
        price_usd_per_hour=1.0,
    )

    assert seconds_by_stage([part], is_dry_run=True) == (pytest.approx(0.005),)
    assert seconds_by_stage([part], is_dry_run=False) == (pytest.approx(0.003),)
