import os

from heterps_core.data.features import FeatureSpec
from heterps_core.models.chain import build_chain
from heterps_core.plans.scheduling_plan import check_stages_cover_chain
from tests.benchmarks.prediction_error import (
    MODELS,
    REPLICAS,
    Window,
    busy_core_seconds,
    core_seconds_of,
    draw_plans,
    least_disturbed,
)

FEATURES = FeatureSpec(num_dense=3, slot_rows=(20, 30, 40))


def test_every_model_and_all_replica_counts_are_drawn():
    plans = draw_plans(FEATURES, num_plans=20, seed=3)

    assert len(plans) == 20
    assert {plan.model for plan in plans} == set(MODELS)
    assert {plan.replicas for plan in plans} == set(REPLICAS)


def test_plans_can_be_trained():
    for plan in draw_plans(FEATURES, num_plans=20, seed=4):
        check_stages_cover_chain(plan.stages, len(build_chain(plan.model, FEATURES, seed=0)))
        assert plan.config(0).microbatch_size >= max(plan.replicas)


def test_the_seed_decides_which_plans_are_drawn():
    first, again, other = (draw_plans(FEATURES, num_plans=8, seed=seed) for seed in (1, 1, 2))

    assert first == again
    assert first != other


def test_work_of_this_process_shows_in_its_own_and_in_that_of_the_machine():
    before_s, own_before_s = busy_core_seconds(), core_seconds_of([os.getpid()])
    while core_seconds_of([os.getpid()]) < own_before_s + 0.1:
        sum(range(1000))

    assert busy_core_seconds() - before_s > 0.05
    assert core_seconds_of([os.getpid(), os.getpid()]) >= 2 * (own_before_s + 0.1)


def test_windows_count_from_the_least_disturbed_on():
    windows = [Window(others, [0.5, 0.5], 1.0) for others in (0.3, 0.0, 0.2, 0.1)]

    assert [window.others for window in least_disturbed(windows, seconds=1.5)] == [0.0, 0.1]
    assert len(least_disturbed(windows, seconds=9.0)) == 4
