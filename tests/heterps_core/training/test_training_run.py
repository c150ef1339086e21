"""Throughput from the ends of steps, worked by hand."""

from dataclasses import asdict

import pytest

from heterps_core.embeddings.swept.sweep_memory import SweepCounts
from heterps_core.errors import TrainingError
from heterps_core.training.step_metrics import ProcessReport, StepMetrics, write_process_report
from heterps_core.training.storage.run_directory import RunDirectory
from heterps_core.training.training_run import (
    SweepFigures,
    _sweep_figures,
    _throughputs_samples_per_s,
    read_training_run,
)


def make_steps(ends_s: list[float]) -> list[StepMetrics]:
    return [
        StepMetrics(step=number, epoch=0, num_samples=100, loss=0.5, elapsed_s=end_s)
        for number, end_s in enumerate(ends_s, start=1)
    ]


def test_warm_up_steps_do_not_count_and_pauses_do():
    # Ten steps: the first is warm-up. From the end of step 2 at 5 s, eight steps end at 15 s: 7 of 1 s, one of 3 s.
    steps = make_steps([4.0, 5.0, 6.0, 7.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0])

    assert _throughputs_samples_per_s(steps) == pytest.approx((800 / 10, 100.0))


@pytest.mark.parametrize("ends_s", [[], [1.0]])
def test_too_few_steps_have_no_throughput(ends_s):
    assert _throughputs_samples_per_s(make_steps(ends_s)) == (None, None)


def test_a_run_without_result_is_not_finished(tmp_path):
    with pytest.raises(TrainingError, match=r"must have result\.json"):
        read_training_run(RunDirectory(str(tmp_path)))


@pytest.fixture
def run(tmp_path):
    """A run of two attempts: steps 1 to 4 end each second, then 3 to 6 do, as a checkpoint held two steps."""
    run = RunDirectory(str(tmp_path))
    run.write_json("result.json", {"is_complete": True, "judgements": {}})
    run.write_json("job.json", {"worker_bytes": [100, 200]})
    steps = {1: make_steps([1.0, 2.0, 3.0, 4.0]), 2: make_steps([0.0, 0.0, 1.0, 2.0, 3.0, 4.0])[2:]}
    for attempt, of_attempt in steps.items():
        run.write_json(f"steps/{attempt:03d}-00000001.json", [asdict(step) for step in of_attempt])
    peaks = [(0, 70, 5.0), (0, 50, 7.0), (1, None, 0.0), (2, 90, 0.0), (None, 999, 0.0)]
    for number, (stage, peak_bytes, sent) in enumerate(peaks):
        report = ProcessReport(stage=stage, peak_bytes=peak_bytes, sent_bytes_per_step=sent)
        write_process_report(run, f"rank-{number:05d}", report)
    return run


def test_memory_is_what_was_counted_for_a_worker_and_the_most_that_one_of_its_stage_had(run):
    """Nothing is said of stage 1, whose peak is not known, of stage 2, which the job has not, and of a node."""
    assert read_training_run(run).memory_bytes == {0: (100, 70)}


def test_steps_that_were_done_again_count_once_as_they_were_done_last(run):
    found = read_training_run(run)

    assert (found.num_attempts, found.num_repeated_steps) == (2, 2)
    assert [(metrics.step, metrics.elapsed_s) for metrics in found.steps] == [
        (1, 1.0),
        (2, 2.0),
        (3, 1.0),
        (4, 2.0),
        (5, 3.0),
        (6, 4.0),
    ]
    assert (found.trained_seconds, found.repeated_seconds) == (8.0, 2.0)
    assert found.sent_bytes_per_step == 12.0


def test_the_last_shares_are_those_of_stages_where_they_differ(run):
    assert read_training_run(run).shares == {}
    run.write_json("shares.json", [[48, 16], [1, 1]])

    assert read_training_run(run).shares == {0: (0.75, 0.25)}


def test_what_tables_take_of_disks_is_reported_for_all_workers_of_a_stage_together():
    """By hand: 2 steps of 100 samples; 300 of 1,000 rows fetched, and 5,000 bytes moved."""
    reports = [
        ProcessReport(stage=0, sweeps=SweepCounts(rows_asked=600, rows_fetched=100, bytes_read=2_000)),
        ProcessReport(
            stage=0,
            sweeps=SweepCounts(rows_asked=400, rows_fetched=200, bytes_read=2_000, bytes_written=1_000),
        ),
        ProcessReport(stage=1),
        ProcessReport(),
    ]

    found = _sweep_figures(reports, make_steps([1.0, 2.0]))

    assert found == {
        0: SweepFigures(hit_share=pytest.approx(0.7), rows_per_step=150.0, disk_bytes_per_sample=25.0)
    }
