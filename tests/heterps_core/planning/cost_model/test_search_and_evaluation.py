"""A search's tables of all stages, and the evaluation of one plan: the same times and charges, term by term."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.cost_model.objective import objective_of
from heterps_core.planning.cost_model.run_tables import rows_of_stages, segment_table
from heterps_core.planning.cost_model.step_model import num_microbatches_of
from heterps_core.planning.problem.extra_costs import ExtraCosts, InstanceSize
from heterps_core.planning.problem.scheduling_problem import StepModel
from heterps_core.planning.provisioning.replica_balance import FixedStages
from heterps_core.planning.simulate.pipeline_load import pipeline_load
from heterps_core.planning.simulate.row_routes import stage_durations
from heterps_core.plans.scheduling_plan import Stage
from tests.builders import make_problem, with_disks
from tests.heterps_core.planning.plain_stage import plain_stage

SAME = 1e-12
EXTRA = ExtraCosts(
    startup_seconds=90.0,
    teardown_seconds=20.0,
    search_and_profiling_usd=0.1,
    storage_usd_per_hour=0.3,
    checkpoint_seconds=4.0,
    restart_seconds=60.0,
)


def drawn_problem(seed, step_model, *, drains, communicates):
    """Return a problem with every term: tables on disk, instances, interruptions, start-up and storage."""
    problem = with_disks(make_problem(seed, num_layers=6, num_types=3), bytes_per_unit=40e9, bytes_per_s=5e8)
    table = replace(
        problem.layers[0],
        is_sharded=True,
        state_bytes=20e9,
        cold_bytes_per_sample=(6e3, 4e3, 2e3),
        reading_seconds={problem.device_type_names[0]: 2 * max(problem.layers[0].compute_seconds.values())},
    )
    units = {
        name: replace(
            unit,
            memory_bytes=4e9,
            interruptions_per_hour=0.01 * index,
            instances=(InstanceSize(name="x4", units=4, price_usd_per_hour=4 * unit.price_usd_per_hour),),
        )
        for index, (name, unit) in enumerate(problem.device_types.items())
    }
    return replace(
        problem,
        layers=(table, *problem.layers[1:]),
        device_types=units,
        extra_costs=EXTRA,
        step_model=step_model,
        drains=drains,
        single_replica_communicates=communicates,
    )


def drawn_plans(problem, seed, num_plans):
    """Yield plans of one to four stages, of counts of replicas that do not divide a batch as a rule."""
    random = np.random.default_rng(seed)
    names = problem.device_type_names
    for _ in range(num_plans):
        cuts = sorted(random.choice(np.arange(1, 6), size=random.integers(0, 4), replace=False).tolist())
        types = [int(random.integers(3))]
        for _ in cuts:
            types.append((types[-1] + int(random.integers(1, 3))) % 3)
        yield tuple(
            Stage(first, stop - 1, names[index], int(random.integers(1, 40)))
            for (first, stop), index in zip(pairwise([0, *cuts, 6]), types, strict=True)
        )


CASES = [
    (StepModel.PAPERS, False),
    (StepModel.TRAINER, False),
    (StepModel.TRAINER, True),
]


@pytest.mark.parametrize("communicates", [False, True])
@pytest.mark.parametrize(("step_model", "drains"), CASES)
def test_each_stage_takes_as_long_in_the_tables_of_a_search_as_in_the_evaluation(
    step_model, drains, communicates
):
    num_swept = num_uneven = 0
    for seed in range(3):
        problem = drawn_problem(seed, step_model, drains=drains, communicates=communicates)
        for stages in drawn_plans(problem, seed, 30):
            m = num_microbatches_of(problem, len(stages))
            replicas = np.array([float(stage.num_replicas) for stage in stages])
            table = segment_table(problem, num_microbatches=m).take(rows_of_stages(problem, stages))
            working, sweeps = table.sweeping(replicas, problem.hot_shares)
            terms = working.terms(working.pacing(replicas))

            parts = evaluate(problem, stages).stages

            plain = [plain_stage(problem, stage, num_microbatches=m) for stage in stages]
            for found in (parts, plain):
                same_terms(terms.compute, [part.compute_seconds for part in found])
                same_terms(terms.exchange, [part.exchange_seconds for part in found])
                same_terms(terms.drained, [part.drained_seconds for part in found])
                same_terms(terms.reading, [part.reading_seconds for part in found])
                same_terms(
                    terms.exchange + terms.across + terms.gradient_sum,
                    [part.communication_seconds for part in found],
                )
            fits = np.isfinite(table.seconds(replicas))
            same_terms(table.seconds(replicas)[fits], np.array([part.seconds for part in parts])[fits])
            same_terms(table.usd_per_hour(replicas), [part.price_usd_per_hour for part in parts])
            assert [part.sweep for part in parts] == sweeps
            same_terms(
                [0.0 if sweep is None else sweep.seconds for sweep in sweeps],
                [part.sweep_seconds or 0.0 for part in plain],
            )
            num_swept += sum(sweep is not None for sweep in sweeps)
            num_uneven += np.count_nonzero(table.pacing(replicas) < replicas)
    assert num_swept > 20
    assert num_uneven > 20 or step_model is StepModel.PAPERS


def same_terms(found, expected):
    found = np.broadcast_to(found, np.shape(expected))
    assert found == pytest.approx(np.asarray(expected), rel=SAME, abs=0)


@pytest.mark.parametrize(("step_model", "drains"), CASES)
def test_a_plan_is_charged_as_much_by_the_objective_of_a_search_as_by_its_evaluation(step_model, drains):
    for seed in range(3):
        problem = drawn_problem(seed, step_model, drains=drains, communicates=False)
        objective = objective_of(problem)
        for stages in drawn_plans(problem, seed, 30):
            rows = rows_of_stages(problem, stages)
            table = segment_table(problem, num_microbatches=num_microbatches_of(problem, len(stages)))
            fixed = FixedStages(table=table.take(rows), objective=objective)
            replicas = np.array([float(stage.num_replicas) for stage in stages])

            found = evaluate(problem, stages)

            product = objective.product(
                problem.batch_size / found.throughput_samples_per_s,
                float(fixed.table.usd_per_hour(replicas).sum()),
                float(replicas @ fixed.table.interruptions_per_hour),
            )
            assert objective.cost_usd(product) == pytest.approx(found.cost_usd, rel=SAME)


def test_the_replica_with_most_rows_computes_as_long_in_the_simulation_as_in_the_evaluation():
    num_swept = 0
    for seed in range(3):
        problem = drawn_problem(seed, StepModel.TRAINER, drains=True, communicates=False)
        for stages in drawn_plans(problem, seed, 30):
            m = num_microbatches_of(problem, len(stages))
            load = pipeline_load(problem, stages, num_microbatches=m)
            durations = stage_durations(load, num_rows=problem.batch_size // m)

            parts = evaluate(problem, stages).stages

            for duration, part in zip(durations, parts, strict=True):
                passes = duration.pass_seconds["forward"] + duration.pass_seconds["backward"]
                slowest = (passes + duration.weight_gradient_seconds).max()
                assert m * slowest == pytest.approx(part.compute_seconds, rel=SAME)
                num_swept += part.sweep is not None
    assert num_swept > 20
