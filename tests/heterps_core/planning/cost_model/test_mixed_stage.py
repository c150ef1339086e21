"""Stages of two device types: time, price, memory and units against numbers worked out by hand."""

from dataclasses import replace

import pytest

from heterps_core.errors import ConfigurationError, MalformedDocumentError
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.scheduling_problem import (
    LayerCosts,
    SchedulingProblem,
    StepModel,
    UnitType,
)
from heterps_core.planning.simulate.plan_simulation import simulate_plan
from heterps_core.plans.scheduling_plan import Stage

FAST = UnitType(
    price_usd_per_hour=3.0,
    max_units=1,
    memory_bytes=40.0,
    bandwidth_bytes_per_s=1e9,
    compute_parallel_fraction=1.0,
    communication_parallel_fraction=1.0,
)
SLOW = replace(FAST, price_usd_per_hour=1.0, max_units=4)


def one_layer(**changes):
    """100 rows take 10 s on a fast unit and 20 s on a slow one; 90 bytes of tables."""
    layer = LayerCosts(
        name="layer",
        kind="embedding",
        is_sharded=True,
        state_bytes=90.0,
        output_bytes_per_sample=8.0,
        compute_seconds={"fast": 10.0, "slow": 20.0},
        communication_seconds={"fast": 0.0, "slow": 0.0},
    )
    return SchedulingProblem(
        model="by-hand",
        batch_size=100,
        profile_batch_size=100,
        num_samples=3_600,
        num_epochs=1,
        throughput_floor_samples_per_s=0.0,
        layers=(replace(layer, **changes),),
        device_types={"fast": FAST, "slow": SLOW},
        single_replica_communicates=False,
        step_model=StepModel.TRAINER,
        mixes_device_types=True,
    )


def with_units(problem, **changes):
    units = {name: replace(unit, **changes) for name, unit in problem.device_types.items()}
    return replace(problem, device_types=units)


MIXED = Stage(0, 0, "fast", 3, "slow", 2)


def test_replicas_share_the_rows_by_their_speeds():
    # 10 rows/s and twice 5: 20 rows/s for 1 * 3 + 2 * 1 USD/hour. 36 batches of 5 s.
    found = evaluate(one_layer(), [MIXED])

    assert found.throughput_samples_per_s == pytest.approx(20.0)
    assert found.stages[0].rows == (50, 25)
    assert found.price_usd_per_hour == pytest.approx(5.0)
    assert found.stages[0].usd_per_hour_by_type == {"fast": 3.0, "slow": 2.0}
    assert found.cost_usd == pytest.approx(36 * 5 / 3600 * 5.0)
    assert found.violations == ()


def test_all_replicas_of_a_stage_are_peers_in_its_exchanges():
    # A message costs each of the three 0.1 s twice a batch for each of two peers, and B / 4,096 times for requests.
    problem = with_units(one_layer(), exchange_seconds_per_peer=0.1)

    found = evaluate(problem, [MIXED])

    assert found.stages[0].seconds == pytest.approx(5.0 + 2 * 2 * 0.1 + 100 / 4096 * 0.1)


def test_two_thirds_of_the_rows_of_tables_cross_links_among_three_replicas():
    # The fast one looks up 50 of 100 rows, of which two thirds lie elsewhere; 6 s for all on one link.
    problem = one_layer(communication_seconds={"fast": 6.0, "slow": 6.0})

    seconds = {rows: 2 / 3 * 6 * rows / 100 + rows / 10 for rows in range(101)}
    slow = {rows: 2 / 3 * 6 * rows / 100 + rows / 5 for rows in range(101)}
    by_hand = min(max(seconds[rows], slow[-(-(100 - rows) // 2)]) for rows in range(1, 99))
    assert evaluate(problem, [MIXED]).stages[0].seconds == pytest.approx(by_hand)


def test_rows_are_whole():
    # Of 7 rows two take a slow one 0.4 s, and three the fast one 0.3 s; 3.5 and 1.75 would take 0.35 s.
    problem = replace(one_layer(), batch_size=7)

    assert evaluate(problem, [MIXED]).stages[0].seconds == pytest.approx(0.4)


def test_each_replica_holds_as_much_of_the_tables_whatever_its_rows():
    found = evaluate(with_units(one_layer(), memory_bytes=29.0), [MIXED])

    assert [(each.constraint, each.reached) for each in found.violations] == [("memory", 30.0)] * 2


def test_units_count_against_the_cap_of_their_own_type():
    found = evaluate(one_layer(), [Stage(0, 0, "slow", 7, "fast", 2)])

    assert [(each.subject, each.reached) for each in found.violations] == [("fast", 2), ("slow", 5)]


def test_the_simulation_takes_a_stage_of_two_types_for_replicas_of_its_slower_one():
    found = simulate_plan(one_layer(), [MIXED])

    assert found.run.throughput_samples_per_s == pytest.approx(20.0)


def test_a_problem_allows_two_types_in_a_stage_or_refuses_the_plan():
    with pytest.raises(ConfigurationError, match="2 x slow"):
        evaluate(replace(one_layer(), mixes_device_types=False), [MIXED])
    with pytest.raises(MalformedDocumentError, match="delay updates"):
        replace(one_layer(), drains=True)


def test_a_plan_has_the_rows_of_each_replica_as_shares():
    # 100 rows: 50 and twice 25. Of 7 rows two take a slow one 0.4 s, and three the fast one 0.3 s.
    [part], [few] = (
        evaluate(problem, [MIXED]).stages for problem in (one_layer(), replace(one_layer(), batch_size=7))
    )

    assert part.with_shares.shares == (50, 25, 25)
    assert few.with_shares.shares == (3, 2, 2)
    assert part.with_shares.on({"fast": 2, "slow": 1}).shares == (50, 50, 25)
    assert part.with_shares.on({"slow": 2}).shares == ()


def test_a_stage_has_no_cards_beside_cpus():
    problem = one_layer()
    seconds = {"cpu": 1.0, "card": 1.0}
    layer = replace(problem.layers[0], compute_seconds=seconds, communication_seconds=seconds)
    problem = replace(problem, layers=(layer,), device_types={"cpu": SLOW, "card": SLOW})
    with pytest.raises(ConfigurationError, match="must be CPUs, or cards"):
        evaluate(problem, [Stage(0, 0, "cpu", 2, "card", 1)])
