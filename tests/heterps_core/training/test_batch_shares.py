"""Replicas get the rows that they work on in the same time, and learn what equal ones learn."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training import loop as training_loop
from heterps_core.training.batch_shares import MeasuredShares, OwnWork, StepSeconds, shares_by_speed
from heterps_core.training.evaluation import predict_held_out
from heterps_core.training.job import TrainingConfig, TrainingJob
from heterps_core.training.monitor import submit_job
from heterps_core.training.start_model import begin
from heterps_core.training.storage.run_directory import SHARES, RunDirectory
from heterps_core.transport.rank_layout import RankLayout
from tests.heterps_core.training.worker_parts import predicted_rows, training_loop_of
from tests.worker_processes import run_in_processes

LAYOUT = RankLayout(((0, 1), (2,)))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_division_of_the_rows_ends_much_earlier(seed):
    generator = np.random.default_rng(seed)
    num_replicas, num_rows = int(generator.integers(2, 5)), int(generator.integers(12, 25))
    shares = tuple(generator.integers(1, 9, num_replicas).tolist())
    seconds_per_share = generator.uniform(0.2, 4.0, num_replicas)
    measured_s = seconds_per_share * shares

    found = shares_by_speed(shares, measured_s.tolist(), num_rows=num_rows)

    if found != shares:
        assert sum(found) == num_rows
        assert min(found) >= 1
    cuts = itertools.combinations(range(1, num_rows), num_replicas - 1)
    divisions = [np.diff([0, *cut, num_rows]) for cut in cuts]
    best_s = min((division * seconds_per_share).max() for division in divisions)
    taken_s = (np.array(found) * num_rows / sum(found) * seconds_per_share).max()
    # Rounded to whole rows, or near enough before.
    assert taken_s <= max(1.06 * best_s, best_s + seconds_per_share.max())


def test_a_replica_that_is_too_slow_for_any_row_keeps_one():
    assert shares_by_speed((1, 1, 1), [1.0, 1.0, 1e6], num_rows=16) == (8, 7, 1)


def test_speeds_that_differ_by_less_than_measurements_do_change_nothing():
    assert shares_by_speed((1, 1), [1.0, 1.08], num_rows=1000) == (1, 1)
    assert shares_by_speed((1, 1), [1.0, 1.12], num_rows=1000) == (528, 472)


def following(control, shares, *measured):
    return control.following(
        replace(LAYOUT, shares=(shares, (1,))), [StepSeconds(*each) for each in measured], num_rows=64
    )


def test_only_stages_over_several_machines_that_are_known_change():
    measured, unknown = [(0.1, 0.3), (0.3, 0.3), (0.5, 0.5)], [(0.1, 0.3), (), (0.5, 0.5)]

    assert following(MeasuredShares(LAYOUT, "aba"), (1, 1), *measured) == ((48, 16), (1,))
    assert following(MeasuredShares(LAYOUT, "aab"), (1, 1), *measured) == ((1, 1), (1,))
    assert following(MeasuredShares(LAYOUT, "aba"), (1, 1), *unknown) == ((1, 1), (1,))


def test_steps_are_compared_early_then_rarely_and_on_one_machine_never():
    apart, together = MeasuredShares(LAYOUT, "aba"), MeasuredShares(LAYOUT, "aab")

    steps = [step for step in range(1, 1000) if apart.are_compared_after(step, is_drained=False)]
    assert steps == [32, 64, 128, 256, 512]
    assert apart.are_compared_after(7, is_drained=True)
    resumed = MeasuredShares(LAYOUT, "aba", first_step=1001)
    steps = [step for step in range(1001, 2001) if resumed.are_compared_after(step, is_drained=False)]
    assert steps == [1032, 1064, 1128, 1256, 1512]
    assert not any(together.are_compared_after(step, is_drained=True) for step in range(100))


def test_a_replica_with_a_quota_of_processor_time_settles_where_it_has_its_part():
    """It has a third of a core, in bursts: it is slower only where its rows need more than a third of each step."""
    control, shares, seen = MeasuredShares(LAYOUT, "aba"), (1, 1), []
    for _ in range(8):
        fast_s, slow_s = np.array(shares) / sum(shares)
        step_s = max(fast_s, 3 * slow_s)
        slow = (step_s if 3 * slow_s >= fast_s * 1.001 else slow_s, step_s)
        shares, _ = following(control, shares, (fast_s, step_s), slow, (0.1, step_s))
        seen.append(shares)

    assert seen[0] == (48, 16)
    assert shares == (48, 16)
    assert sum(earlier != later for earlier, later in itertools.pairwise(seen)) <= 2


def test_shares_that_settled_change_again_once_steps_take_much_longer():
    control = MeasuredShares(LAYOUT, "aba")

    def shares_after(shares, own_s, step_s):
        return following(control, shares, *((own, step_s) for own in own_s), (0.1, step_s))[0]

    assert shares_after((1, 1), (0.1, 0.3), 0.3) == (48, 16)
    assert shares_after((48, 16), (0.4, 0.4), 0.4) == (1, 1)
    assert shares_after((1, 1), (0.1, 0.3), 0.3) == (1, 1)
    assert shares_after((1, 1), (0.1, 0.4), 0.4) == (51, 13)


def test_waits_and_the_first_step_are_no_work():
    waited_s = 0.0
    work = OwnWork(lambda: waited_s)
    with work.step(), work.waiting():
        waited_s -= 1e6
    assert work.take() == (None, None)
    for _ in range(20):
        with work.step():
            waited_s -= 3.0
    own_s, whole_s = work.take()
    assert own_s == pytest.approx(3.0 + whole_s)
    assert work.take() == (None, None)


MODEL = "deepfm(hidden_widths=32-16, embedding_dim=4, dropout=0.5)"
SECONDS_PER_ROW = 1e-3


def make_job(dataset: Any, stages: tuple[Stage, ...]) -> TrainingJob:
    config = TrainingConfig(
        batch_size=64,
        num_microbatches=2,
        num_epochs=2,
        seed=3,
        dense_optimizer="sgd",
        embedding_optimizer="sgd",
        dense_learning_rate=0.1,
        embedding_learning_rate=1.0,
        checkpoint_interval_steps=50,
    )
    return TrainingJob(run_id="r", model=MODEL, dataset=str(dataset.directory), stages=stages, config=config)


def train_part(rank: int, folder: str) -> dict[str, Any]:
    """Train a worker's part; the second replica of the first stage works longer on each row."""
    training_loop.machine_name = lambda: f"machine {rank}"
    run = RunDirectory(folder)
    job, loop = training_loop_of(rank, run)
    if (loop.place.stage, loop.place.replica) == (0, 1):

        def work_longer(_: object, __: object, leaving: Any) -> None:
            until_s = time.perf_counter() + SECONDS_PER_ROW * len(leaving)
            while time.perf_counter() < until_s:
                pass

        first, *_ = loop.model.layers.values()
        first.register_forward_hook(work_longer)
    loop.train(begin(run, job, loop.model))
    logits = [logits for _, logits in predict_held_out(loop)]
    return {
        "shares": loop.place.layout.shares,
        "logits": dict(zip(predicted_rows(loop), np.concatenate(logits).tolist(), strict=True))
        if logits
        else {},
    }


@pytest.mark.slow
def test_a_replica_that_proves_slower_gets_fewer_rows_and_all_learn_what_one_process_learns(tmp_path):
    stream = write_click_stream(tmp_path / "clicks.tsv", num_rows=3000, seed=1)
    dataset = prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=97, out_dir=tmp_path / "prepared"
    )
    parts = {}
    for name, stages in {
        "alone": (Stage(0, 10, "cpu", 1),),
        "cut": (Stage(0, 1, "cpu", 2), Stage(2, 4, "cpu", 1), Stage(5, 10, "cpu", 2)),
    }.items():
        job = make_job(dataset, stages)
        submit_job(RunDirectory(str(tmp_path / name)), job)
        parts[name] = run_in_processes(train_part, sum(job.replicas_per_stage), str(tmp_path / name))

    shares = {part["shares"] for part in parts["cut"]}
    assert len(shares) == 1
    (fast, slow), _, (_, _) = of_all = shares.pop()
    assert [tuple(each) for each in RunDirectory(str(tmp_path / "cut")).read_json(SHARES)] == list(of_all)
    assert slow < fast
    logits = {
        name: [
            logit for _, logit in sorted({k: v for part in found for k, v in part["logits"].items()}.items())
        ]
        for name, found in parts.items()
    }
    assert len(logits["cut"]) == dataset.num_eval_rows
    np.testing.assert_allclose(logits["cut"], logits["alone"], atol=5e-6)
