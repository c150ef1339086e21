"""The trainer's step: its formula written again, and what planning by it finds against trying every plan."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from heterps_core.errors import InfeasiblePlanError
from heterps_core.planning.cost_model import evaluation
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.run_tables import segment_row, segment_table
from heterps_core.planning.cost_model.step_model import num_microbatches_of, step_groups
from heterps_core.planning.problem.extra_costs import ExtraCosts
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem, StepModel
from heterps_core.planning.search.optimum import find_optimum, highest_throughput
from heterps_core.planning.search.schedulers import SCHEDULERS, get_scheduler
from heterps_core.planning.simulate.pipeline_load import pipeline_load
from heterps_core.planning.simulate.pipeline_simulation import simulate
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem, with_exchange_work
from tests.heterps_core.planning.plain_stage import plain_stage
from tests.independent_planner import CandidateStages
from tests.partitions import all_partitions
from tests.tiers import weekly_after


@pytest.fixture
def formula_alone(monkeypatch):
    """Let stages wait for nothing but what the formula counts."""
    no_wait = SimpleNamespace(step_seconds=0.0)
    monkeypatch.setattr(evaluation, "pipeline_load", lambda *_, **__: None)  # which nothing reads then
    monkeypatch.setattr(evaluation, "simulate", lambda load: no_wait)


def trainer_problem(
    seed, *, scarce=False, communicates=False, exchange_work=False, floor_samples_per_s=0.0, **sizes
):
    problem = make_problem(
        seed,
        **({"num_layers": 4, "num_types": 3} | sizes),
        scarce=scarce,
        floor_samples_per_s=floor_samples_per_s,
    )
    if exchange_work:
        problem = with_exchange_work(problem, seed)
    return replace(problem, step_model=StepModel.TRAINER, single_replica_communicates=communicates)


def stage_seconds_by_hand(problem: SchedulingProblem, stage: Stage, num_microbatches: int) -> float:
    unit = problem.device_types[stage.device_type]
    layers = problem.layers[stage.first_layer : stage.last_layer + 1]
    m, samples = num_microbatches, problem.batch_size / problem.profile_batch_size
    most_rows = -(-(problem.batch_size // m) // stage.num_replicas)
    k = problem.batch_size / m / most_rows
    alpha, beta = unit.compute_parallel_fraction, unit.communication_parallel_fraction
    computing = exchanging = summing = handling = reading = gradient_bytes = 0.0
    for layer in layers:
        computing += layer.compute_seconds[stage.device_type]
        reading += layer.reading_seconds.get(stage.device_type, 0.0) * samples / k
        if layer.is_sharded:
            exchanging += layer.communication_seconds[stage.device_type]
            handling += unit.exchange_seconds_per_table
            handling += (
                layer.exchanged_bytes * unit.exchange_seconds_per_byte * (1 - beta + beta * samples / k)
            )
        else:
            summing += layer.communication_seconds[stage.device_type]
            gradient_bytes += layer.exchanged_bytes
    cut_bytes = 0.0
    if stage.first_layer > 0:
        cut_bytes += problem.layers[stage.first_layer - 1].output_bytes_per_sample
    if stage.last_layer < problem.num_layers - 1:
        cut_bytes += layers[-1].output_bytes_per_sample
    across = 2 * problem.profile_batch_size * cut_bytes / unit.bandwidth_bytes_per_s
    num_boundaries = (stage.first_layer > 0) + (stage.last_layer < problem.num_layers - 1)
    on_worker = (
        computing * (m * (1 - alpha) + alpha * samples / k) + m * num_boundaries * unit.boundary_seconds
    )
    on_worker += 2 * problem.batch_size * cut_bytes / k * unit.boundary_seconds_per_byte
    needs_labels = stage.last_layer == problem.num_layers - 1
    if stage.first_layer > 0 and (needs_labels or any(layer.is_sharded for layer in layers)):
        on_worker += unit.later_reading_seconds
        on_worker += problem.batch_size / k * unit.later_reading_seconds_per_sample
    to_others = 1.0 if problem.single_replica_communicates else 1 - 1 / k
    if any(layer.is_sharded for layer in layers):
        requests = problem.batch_size / 4096
        handling += unit.exchange_seconds * (2 + requests / k)
        handling += unit.exchange_seconds_per_peer * (2 * (k - 1) + requests)
    if gradient_bytes:
        handling += (k - 1) * unit.sum_seconds_per_peer
        handling += 2 * to_others * gradient_bytes * unit.sum_seconds_per_byte
    exchange = to_others * exchanging * (1 - beta + beta * samples / k)
    if k > 1 or problem.single_replica_communicates:
        exchange += handling
    on_link = across * samples / k + to_others * summing * samples
    return max(exchange + max(on_worker, on_link), reading)


def all_plans(problem: SchedulingProblem, most_replicas: int):
    """Yield all plans whose stages have at most so many replicas."""
    for runs in all_partitions(problem):
        for counts in product(range(1, most_replicas + 1), repeat=len(runs)):
            yield tuple(Stage(*run, count) for run, count in zip(runs, counts, strict=True))


@pytest.mark.usefixtures("formula_alone")
@pytest.mark.parametrize("exchange_work", [False, True])
@pytest.mark.parametrize("communicates", [False, True])
@pytest.mark.parametrize("seed", weekly_after(1, range(3)))
def test_a_step_takes_as_long_as_its_slowest_stage_by_the_formula(seed, communicates, exchange_work):
    problem = trainer_problem(seed, communicates=communicates, exchange_work=exchange_work)
    random = np.random.default_rng(seed)
    plans = list(all_plans(problem, 3))
    for index in random.choice(len(plans), 200, replace=False).tolist():
        stages = plans[index]
        m = {1: 1, 2: 4, 3: 8, 4: 16}[len(stages)]
        expected = max(stage_seconds_by_hand(problem, stage, m) for stage in stages)

        found = evaluate(problem, stages)

        assert found.num_microbatches == m
        assert problem.batch_size / found.throughput_samples_per_s == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("exchange_work", [False, True])
@pytest.mark.parametrize("communicates", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_least_replicas_are_those_that_trying_every_number_finds(seed, communicates, exchange_work):
    problem = trainer_problem(seed, communicates=communicates, exchange_work=exchange_work)
    names = problem.device_type_names
    table = segment_table(problem, num_microbatches=4)
    limits = np.geomspace(1e-4, 10, 60) * float(
        np.median(table.seconds(np.ones(table.compute_seconds.shape)))
    )
    found = table.least_replicas(limits)
    for first, last, (index, name) in product(range(4), range(4), enumerate(names)):
        if first > last:
            continue
        row = segment_row(first, last)
        counts = range(
            int(min(table.memory_replicas[row, index], 99)), problem.device_types[name].max_units + 1
        )
        seconds = [
            plain_stage(problem, Stage(first, last, name, k), num_microbatches=4).seconds for k in counts
        ]
        for limit, replicas in zip(limits, found[:, row, index], strict=True):
            expected = next((k for k, taken in zip(counts, seconds, strict=True) if taken <= limit), np.inf)
            assert replicas == expected


def cheapest_by_trying_all(problem):
    most = max(unit.max_units for unit in problem.device_types.values())
    evaluations = (evaluate(problem, plan) for plan in all_plans(problem, most))
    return min((found.cost_usd for found in evaluations if not found.violations), default=None)


EXTRA = ExtraCosts(
    startup_seconds=60.0, storage_usd_per_hour=0.5, checkpoint_seconds=5.0, restart_seconds=100.0
)
STEPS = (
    *((False, False, True), (True, False, False), (False, True, True)),
    *((False, False, False), (True, False, True), (False, True, False)),
)
"""Whether a single replica communicates, whether exchanging rows is work, and whether there are extra costs."""


@pytest.mark.usefixtures("formula_alone")
@pytest.mark.parametrize("step", weekly_after(3, STEPS), ids=str)
@pytest.mark.parametrize("seed", weekly_after(1, range(6)))
def test_the_optimum_is_what_trying_every_plan_finds(seed, step):
    communicates, exchange_work, has_extra = step
    extra = EXTRA if has_extra else ExtraCosts()
    problem = trainer_problem(seed, num_types=2, communicates=communicates, exchange_work=exchange_work)
    units = {
        name: replace(unit, max_units=3, instances=(), interruptions_per_hour=0.01 * index)
        for index, (name, unit) in enumerate(problem.device_types.items())
    }
    problem = replace(problem, device_types=units, extra_costs=extra)
    expected = cheapest_by_trying_all(problem)

    if expected is None:
        with pytest.raises(InfeasiblePlanError):
            find_optimum(problem)
        return
    found = find_optimum(problem)

    assert found.cost_lower_bound_usd <= expected * (1 + 1e-9)
    assert found.cost_usd == pytest.approx(expected, rel=1e-9)
    assert not evaluate(problem, found.stages).violations


@pytest.mark.usefixtures("formula_alone")
@pytest.mark.parametrize("seed", range(3))
def test_neighbouring_stages_stand_on_the_only_type_where_its_memory_holds_no_more(seed):
    problem = trainer_problem(seed, num_layers=3, num_types=1, exchange_work=True)
    [(name, unit)] = problem.device_types.items()
    layers = tuple(replace(layer, is_sharded=False, state_bytes=1e9) for layer in problem.layers)
    unit = replace(unit, memory_bytes=2.5e9, max_units=5)
    problem = replace(problem, layers=layers, device_types={name: unit})

    found = find_optimum(problem)

    assert len(found.stages) > 1
    assert found.cost_usd == pytest.approx(cheapest_by_trying_all(problem), rel=1e-9)
    assert found.cost_lower_bound_usd == found.cost_usd


@pytest.mark.usefixtures("formula_alone")
def test_a_floor_out_of_reach_names_the_highest_throughput_that_any_plan_has():
    problem = trainer_problem(1, num_types=2)
    units = {name: replace(unit, max_units=3, instances=()) for name, unit in problem.device_types.items()}
    problem = replace(problem, device_types=units)
    evaluations = (evaluate(problem, plan) for plan in all_plans(problem, 3))
    highest = max(found.throughput_samples_per_s for found in evaluations if not found.violations)

    assert highest_throughput(problem) == pytest.approx(highest, rel=1e-5)
    with pytest.raises(InfeasiblePlanError, match="throughput floor"):
        find_optimum(replace(problem, throughput_floor_samples_per_s=highest * 1.01))


def with_long_sums(problem, factor):
    """Return the problem with all-reduces so many times as long: stages wait for the one that sums."""
    layers = tuple(
        replace(
            layer,
            communication_seconds={
                name: seconds * (1 if layer.is_sharded else factor)
                for name, seconds in layer.communication_seconds.items()
            },
        )
        for layer in problem.layers
    )
    return replace(problem, layers=layers)


@pytest.mark.parametrize("seed", weekly_after(1, range(6)))
def test_a_plan_promises_what_its_simulation_reaches_and_keeps_the_floor(seed):
    problem = with_long_sums(trainer_problem(seed, num_layers=8), 5.0)
    problem = replace(problem, throughput_floor_samples_per_s=0.3 * highest_throughput(problem))

    found = find_optimum(problem)

    stages = found.stages
    count = num_microbatches_of(problem, len(stages))
    # Links that are nearly as slow as the slowest worker delay it only after some twenty steps.
    simulated = simulate(pipeline_load(problem, stages, num_microbatches=count), num_steps=40)
    assert evaluate(problem, stages).throughput_samples_per_s == pytest.approx(
        simulated.throughput_samples_per_s, rel=5e-3
    )
    assert simulated.throughput_samples_per_s >= problem.throughput_floor_samples_per_s * (1 - 1e-9)
    assert found.cost_lower_bound_usd <= found.cost_usd


def test_a_sum_of_gradients_costs_nothing_until_it_takes_longer_than_the_slowest_stage():
    problem = trainer_problem(4, num_layers=6, communicates=True)
    stages = (Stage(0, 1, "cpu", 2), Stage(2, 3, "gpu_a", 1), Stage(4, 5, "gpu_b", 1))
    times = {"cpu": 0.008, "gpu_a": 0.001, "gpu_b": 0.001}

    def seconds(of_sum):
        layers = tuple(
            replace(
                layer,
                is_sharded=False,
                output_bytes_per_sample=0,
                compute_seconds=times,
                communication_seconds=dict.fromkeys(times, of_sum / 2 if 2 <= index <= 3 else 0.0),
            )
            for index, layer in enumerate(problem.layers)
        )
        return problem.batch_size / evaluate(replace(problem, layers=layers), stages).throughput_samples_per_s

    alone = seconds(0.0)
    scale = problem.batch_size / problem.profile_batch_size

    assert seconds(0.99 * alone / scale) == pytest.approx(alone, rel=1e-3)
    assert seconds(1.5 * alone / scale) == pytest.approx(1.5 * alone, rel=1e-3)


def test_the_number_of_microbatches_divides_the_batch_and_rises_with_the_stages():
    problem = trainer_problem(0)
    odd = replace(problem, batch_size=45)

    assert [num_microbatches_of(odd, stages) for stages in range(1, 5)] == [1, 5, 9, 15]
    assert [(group.num_microbatches, group.most_stages) for group in step_groups(odd)] == [
        (1, 1),
        (5, 2),
        (9, 3),
        (15, 4),
    ]


def test_more_replicas_than_a_microbatch_has_rows_are_no_plan():
    problem = replace(trainer_problem(0, num_types=2), batch_size=8)
    first, second = problem.device_type_names
    violations = evaluate(problem, (Stage(0, 1, first, 5), Stage(2, 3, second, 1))).violations

    assert "micro-batch" in {violation.constraint for violation in violations}


@pytest.mark.parametrize("scheduler", sorted(set(SCHEDULERS) - {"brute-force", "cpu-only", "gpu-only"}))
def test_every_scheduler_plans_the_trainers_step_and_knows_how_far_it_is_from_the_optimum(scheduler):
    problem = trainer_problem(2)

    plan = get_scheduler(scheduler).search(problem, budget_evaluations=400, seed=0).plan

    evaluation = evaluate(problem, plan.stages)
    assert plan.cost_usd == pytest.approx(evaluation.cost_usd)
    assert plan.cost_lower_bound_usd == pytest.approx(find_optimum(problem).cost_usd)


@pytest.mark.usefixtures("formula_alone")
@pytest.mark.parametrize("seed", weekly_after(2, range(6)))
def test_the_optimum_is_found_where_more_micro_batches_make_a_stage_faster(seed):
    problem = with_long_sums(trainer_problem(seed, num_layers=3, num_types=2), 30.0)
    units = {name: replace(unit, max_units=4, instances=()) for name, unit in problem.device_types.items()}
    problem = replace(problem, batch_size=(45, 90, 63)[seed % 3], device_types=units)
    few, many = (segment_table(problem, num_microbatches=count) for count in (1, 9))
    replicas = np.full(few.compute_seconds.shape, 4.0)
    evaluations = [evaluate(problem, plan) for plan in all_plans(problem, 4)]
    highest = max(
        each.throughput_samples_per_s for each in evaluations if len(each.stages) > 1 and not each.violations
    )
    problem = replace(problem, throughput_floor_samples_per_s=highest * (1 - 1e-7))

    found = find_optimum(problem)

    assert (many.seconds(replicas) < few.seconds(replicas)).any()
    assert found.cost_usd == pytest.approx(cheapest_by_trying_all(problem), rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_more_replicas_than_some_count_make_a_stage_slower_where_peers_cost_time(seed):
    """The least replicas for each time that 1 to 300 of them reach, which falls with the first and then rises."""
    problem = trainer_problem(seed, exchange_work=True, max_units=300)
    table = segment_table(problem, num_microbatches=4)
    counts = np.arange(1.0, 301.0)
    seconds = np.array([table.seconds(np.full(table.memory_replicas.shape, k)) for k in counts])
    seconds[counts[:, None, None] < table.memory_replicas] = np.inf
    fastest = seconds.argmin(axis=0) + 1.0
    assert ((fastest > table.memory_replicas) & (fastest < 250)).any()
    limits = np.unique(np.concatenate([seconds[:, segment_row(0, 3), 0], seconds.min(axis=0).ravel()]))

    found = table.least_replicas(limits[np.isfinite(limits)])

    is_enough = seconds[None] <= limits[np.isfinite(limits)][:, None, None, None]
    assert (found == np.where(is_enough.any(axis=1), is_enough.argmax(axis=1) + 1.0, np.inf)).all()


@pytest.mark.usefixtures("formula_alone")
@pytest.mark.parametrize("seed", weekly_after(3, range(12)))
def test_an_independent_program_finds_no_cheaper_plan_where_peers_cost_time(seed):
    problem = trainer_problem(seed, exchange_work=True, max_units=(4, 60, 300)[seed % 3])
    everything = CandidateStages.of_every_length(problem).values()
    expected = min(stages.brute_force_usd() for stages in everything)

    found = find_optimum(problem)

    assert found.cost_usd == pytest.approx(expected, rel=1e-9)
    assert found.cost_lower_bound_usd <= expected * (1 + 1e-9)
