from dataclasses import replace

import numpy as np
import pytest

from heterps_core.planning.cost_model.run_tables import (
    segment_row,
    segment_table,
)
from heterps_core.planning.problem.extra_costs import InstanceSize
from heterps_core.planning.problem.scheduling_problem import StepModel
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem, with_exchange_work
from tests.heterps_core.planning.plain_stage import plain_stage


@pytest.fixture(scope="module")
def problem():
    return make_problem(3, num_layers=5, num_types=3, max_units=40)


def all_runs(problem):
    for last in range(problem.num_layers):
        for first in range(last + 1):
            yield first, last


def test_seconds_equal_the_plain_evaluation(problem):
    table = segment_table(problem)

    found = table.seconds(np.full((15, 3), 7.0))

    for first, last in all_runs(problem):
        for index, name in enumerate(problem.device_types):
            expected = plain_stage(problem, Stage(first, last, name, 7)).seconds
            assert found[segment_row(first, last), index] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("stage_seconds", [0.02, 0.0437, 0.11, 0.3])
def test_least_replicas_equal_counting_up_from_one(problem, stage_seconds):
    found = segment_table(problem).least_replicas(np.array([stage_seconds]))[0]

    for first, last in all_runs(problem):
        for index, (name, unit) in enumerate(problem.device_types.items()):
            parts = [plain_stage(problem, Stage(first, last, name, k)) for k in range(1, 41)]
            enough = [p.seconds <= stage_seconds and p.memory_bytes <= unit.memory_bytes for p in parts]
            expected = enough.index(True) + 1 if any(enough) else np.inf
            assert found[segment_row(first, last), index] == expected


def test_a_stage_time_that_k_replicas_reach_exactly_needs_no_more_than_k(problem):
    table = segment_table(problem)
    counts = np.random.default_rng(0).integers(1, 40, size=(15, 3)).astype(float)
    counts = np.maximum(counts, np.where(np.isfinite(table.memory_replicas), table.memory_replicas, 1))

    for row in range(15):
        for index in range(3):
            x = table.seconds(counts)[row, index]
            found = table.least_replicas(np.array([x]))[0, row, index]
            assert found <= counts[row, index] or np.isinf(table.memory_replicas[row, index])


@pytest.mark.parametrize("fraction", [0.0, 1e-18, 1e-9, 1.0])
def test_one_replica_is_enough_for_exactly_its_own_time(problem, fraction):
    table = replace(
        segment_table(problem),
        compute_parallel_fraction=np.full(3, fraction),
        communication_parallel_fraction=np.full(3, fraction),
        memory_replicas=np.ones((15, 3)),
    )
    own_seconds = table.seconds(np.ones((15, 3)))

    for row, index in np.ndindex(15, 3):
        assert table.least_replicas(own_seconds[row, index : index + 1])[0, row, index] == 1


@pytest.mark.parametrize("seed", range(4))
def test_the_least_replicas_are_the_first_count_that_is_fast_enough_where_one_does_not_communicate(seed):
    problem = make_problem(seed, num_layers=4, num_types=3, max_units=40)
    layers = tuple(
        replace(layer, communication_seconds=dict.fromkeys(problem.device_types, 0.1))
        for layer in problem.layers
    )
    problem = replace(problem, layers=layers, single_replica_communicates=False)
    table = segment_table(problem)
    counts = np.arange(1.0, 41.0)
    seconds = np.array([table.seconds(np.full_like(table.memory_replicas, count)) for count in counts])
    assert (seconds[1] > seconds[0]).any()  # two replicas talk to each other, one to none
    seconds[counts[:, None, None] < table.memory_replicas] = np.inf

    for x in np.quantile(seconds[np.isfinite(seconds)], [0.02, 0.2, 0.5, 0.8, 0.99]):
        is_enough = seconds <= x
        expected = np.where(is_enough.any(axis=0), is_enough.argmax(axis=0) + 1.0, np.inf)
        assert (table.least_replicas(np.array([x]))[0] == expected).all()
    assert (table.fastest_seconds() == seconds.min(axis=0))[np.isfinite(seconds).any(axis=0)].all()


@pytest.mark.parametrize("exchange_work", [False, True])
@pytest.mark.parametrize("step_model", StepModel)
@pytest.mark.parametrize("communicates", [True, False])
@pytest.mark.parametrize("sold_in", [(1,), (4, 16)])
def test_no_more_replicas_than_asked_for_are_charged_less_than_the_least_usd_seconds(
    problem, step_model, communicates, sold_in, exchange_work
):
    if exchange_work:
        problem = with_exchange_work(problem, 3)
    sizes = tuple(
        InstanceSize(name=f"x{units}", units=units, price_usd_per_hour=round(1.5 * units**0.8, 2))
        for units in sold_in
    )
    types = {
        name: replace(unit, price_usd_per_hour=min(size.price_usd_per_hour / size.units for size in sizes))
        for name, unit in problem.device_types.items()
    }
    types = {name: replace(unit, instances=sizes) for name, unit in types.items()} if sold_in[1:] else types
    problem = replace(
        problem, device_types=types, step_model=step_model, single_replica_communicates=communicates
    )
    table = segment_table(problem, num_microbatches=1 if step_model is StepModel.PAPERS else 128)
    counts = np.arange(1.0, 41.0)
    all_counts = np.broadcast_to(counts[:, None, None], (40, 15, 3))
    seconds = np.array([table.seconds(each) for each in all_counts])
    prices = np.array([table.usd_per_hour(each) for each in all_counts])
    even = counts == 2 ** np.round(np.log2(counts))
    for x in (0.0, 0.01, 0.05, 0.3):
        charged = prices * np.maximum(seconds, x)
        least = np.minimum.accumulate(charged[::-1])[::-1]  # of so many replicas or more
        found = np.array([table.least_usd_seconds(each, x) for each in all_counts])
        assert (found <= least * (1 + 1e-12)).all()
        if sold_in == (1,):  # and rows of a micro-batch are divided evenly: then nothing is lost
            assert found[even] == pytest.approx(least[even], rel=1e-12)
    assert np.isinf(table.least_usd_seconds(np.full((15, 3), np.inf), 0.1)).all()


def test_replicas_are_charged_as_the_instances_of_their_own_type_are_sold(problem):
    """One type in fours at 3 USD an hour, one in pairs at 1, one by the unit at 0.7."""
    sizes = {
        0: (InstanceSize(name="fours", units=4, price_usd_per_hour=3.0),),
        1: (InstanceSize(name="pairs", units=2, price_usd_per_hour=1.0),),
    }
    units = [
        replace(unit, instances=sizes.get(index, ()), price_usd_per_hour=(0.75, 0.5, 0.7)[index])
        for index, unit in enumerate(problem.device_types.values())
    ]
    table = segment_table(replace(problem, device_types=dict(zip(problem.device_types, units, strict=True))))

    found = table.usd_per_hour(np.broadcast_to([5.0, 5.0, 5.0], (15, 3)))

    assert found[0] == pytest.approx([2 * 3.0, 3 * 1.0, 5 * 0.7])
    assert (found == found[0]).all()
    assert np.isinf(table.usd_per_hour(np.full((15, 3), np.inf))).all()
