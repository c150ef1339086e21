"""How often a run that loses its machines goes on by itself."""

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from heterps_core.errors import TrainingError
from heterps_core.training.outcome import MachinesLost
from heterps_core.training.storage.run_directory import RunDirectory
from infra.workspace import Workspace
from tasks.running.losses import (
    _read_losses,
    note_decision,
    note_loss,
    restarts_of,
    restarts_text,
    slowness_of,
)
from tests.tasks.builders import bought, cluster_of, fleet_run

NOW = datetime(2026, 11, 22, 4, 0, tzinfo=UTC)


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path).create()


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(str(tmp_path / "run"))
    directory.write_json("checkpoints/00000200/manifest.json", {})
    progress = {"phase": "training", "step": 250, "num_steps": 900, "num_samples": 1, "loss": 0.5}
    directory.write_json("progress.json", {**progress, "elapsed_s": 1.0, "attempt": 0})
    return directory


def lose(workspace, run, number, *, minutes=0, signature=None, is_noticed=False, slowness=1.0):
    """Lose launch `number` of the run."""
    launch_id = "r1" if number == 1 else f"r1.{number}"
    return note_loss(
        replace(fleet_run(workspace), directory=run),
        MachinesLost(message=f"loss {number}", signature=signature, is_noticed=is_noticed),
        cluster=replace(cluster_of(bought(2, price_usd_per_hour=0.9)), run_id=launch_id),
        interruptions_per_hour=0.0,
        now=NOW + timedelta(minutes=minutes),
        slowness=slowness,
    )


def test_a_loss_says_how_many_steps_it_costs_and_from_where_the_run_goes_on(workspace, run):
    loss = lose(workspace, run, 1)

    assert loss.summary == "loss 1: 50 steps are lost, and the run goes on from step 200"
    assert _read_losses(workspace, "r1") == [loss]


def test_steps_are_lost_once_where_a_second_loss_comes_before_any_is_trained_again(workspace, run):
    first, second = lose(workspace, run, 1), lose(workspace, run, 2)

    assert (first.lost_steps, second.lost_steps) == (50, 0)

    progress = run.require_json("progress.json")
    run.write_json("progress.json", {**progress, "step": 240, "attempt": 1})
    assert lose(workspace, run, 3, minutes=90).lost_steps == 40


def test_a_fleet_that_has_just_begun_is_as_slow_against_its_plan_as_the_one_before(workspace, run):
    def slowness():
        return slowness_of(workspace, "r1", run, planned_samples_per_s=100.0)

    progress = run.require_json("progress.json")
    assert slowness() == 1.0
    run.write_json("progress.json", {**progress, "elapsed_s": 60.0, "num_samples": 2_000})
    assert slowness() == 3.0  # 100 a second for 60 s were planned

    lose(workspace, run, 1, slowness=slowness())
    assert slowness_of(workspace, "r1", run, planned_samples_per_s=50.0) == 3.0
    run.write_json("progress.json", {**progress, "attempt": 1, "elapsed_s": 29.0, "num_samples": 2_900})
    assert slowness() == 3.0
    run.write_json("progress.json", {**progress, "attempt": 1, "elapsed_s": 40.0, "num_samples": 2_000})
    assert slowness() == 2.0


def test_how_the_run_goes_on_stands_beside_its_last_loss(workspace, run):
    lose(workspace, run, 1)
    lose(workspace, run, 2)

    note_decision(workspace, "r1", "shrink, of shrink 1 USD", is_of_other_size=True)

    first, second = _read_losses(workspace, "r1")
    assert (first.decision, first.is_of_other_size) == ("", False)
    assert (second.decision, second.is_of_other_size) == ("shrink, of shrink 1 USD", True)


def write_steps(run, attempt, step, *, seconds_behind_loss):
    """Write the file of a step as its worker does, so many seconds after the loss."""
    name = f"steps/{attempt:03d}-{step:08d}.json"
    run.write_json(name, [])
    at_s = NOW.timestamp() + seconds_behind_loss
    os.utime(Path(run.location) / name, (at_s, at_s))


def test_a_loss_costs_the_fleets_price_until_its_last_step_is_trained_again(workspace, run):
    lose(workspace, run, 1)
    write_steps(run, 0, 201, seconds_behind_loss=-9.0)
    write_steps(run, 0, 249, seconds_behind_loss=-3.0)
    write_steps(run, 1, 201, seconds_behind_loss=5.0)
    write_steps(run, 1, 230, seconds_behind_loss=6.0)
    write_steps(run, 1, 250, seconds_behind_loss=7.0)
    write_steps(run, 1, 280, seconds_behind_loss=8.0)

    [restart] = restarts_of(workspace, "r1", run)

    assert restart.seconds == pytest.approx(10.0)
    assert restart.usd == pytest.approx(1.8 * 10 / 3_600)


def test_what_is_not_trained_again_has_no_cost_yet(workspace, run):
    lose(workspace, run, 1)
    write_steps(run, 0, 249, seconds_behind_loss=-3.0)

    [restart] = restarts_of(workspace, "r1", run)

    assert (restart.seconds, restart.usd) == (None, None)


def test_the_loss_after_the_last_restart_of_an_hour_ends_the_run_and_is_reported(workspace, run):
    lose(workspace, run, 1, is_noticed=True)
    lose(workspace, run, 2, minutes=20)
    assert restarts_text(workspace, "r1") == "machines or workers were lost 2 times, 1 with notice"

    with pytest.raises(
        TrainingError,
        match=r"may restart 2 times in an hour, but r1 has lost .* 3 times.*resume_run_id=r1.*loss 3",
    ):
        lose(workspace, run, 3, minutes=59)

    assert restarts_text(workspace, "r1") == (
        "machines or workers were lost 3 times, 1 with notice; the restarts of an hour were used up at "
        "2026-11-22T04:59:00+00:00"
    )


def test_losses_of_the_hour_before_no_longer_count(workspace, run):
    for number in range(1, 8):
        lose(workspace, run, number, minutes=31 * number)

    assert len(_read_losses(workspace, "r1")) == 7


def test_the_same_fault_of_two_launches_is_not_tried_a_third_time(workspace, run):
    lose(workspace, run, 1, signature="ValueError at stage 1 after step 4")
    lose(workspace, run, 2, signature="ValueError at stage 1 after step 12")

    with pytest.raises(
        TrainingError, match=r"comes again is not tried again, and launch r1\.3 ended as the one before"
    ):
        lose(workspace, run, 3, minutes=90, signature="ValueError at stage 1 after step 12")


def test_a_run_that_was_asked_to_stop_does_not_go_on(workspace, run):
    run.request_stop()

    with pytest.raises(
        TrainingError, match=r"asked to stop.*resume_run_id=r1 to go on from step 200: loss 1"
    ):
        lose(workspace, run, 1)

    assert _read_losses(workspace, "r1") == []


def test_a_notice_that_asked_for_the_stop_lets_it_go_on(workspace, run):
    run.request_stop()
    run.write_json(
        "nodes/stage0-node0/leaving.json",
        {"kind": "spot interruption", "at": "2026-11-22T04:02:00Z", "noticed_at_s": 1.0},
    )

    lose(workspace, run, 1)

    assert len(_read_losses(workspace, "r1")) == 1
