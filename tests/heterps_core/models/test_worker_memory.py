import json
import subprocess
import sys
from dataclasses import replace

import pytest

from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.device_types import DEVICE_TYPES
from heterps_core.errors import InfeasiblePlanError
from heterps_core.models.model_graph import (
    CARD_BYTES,
    CHECKPOINT_BYTES,
    FREE_SHARE,
    HOST_BYTES,
    ROW_BUFFER_BYTES_PER_SAMPLE,
    WORKER_BYTES,
    reserved_bytes,
)
from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint_writer import COPIED_BYTES, PIECE_BYTES
from tests.builders import make_problem
from tests.heterps_core.profiling.builders import GRAPH
from tests.independent_planner import CandidateStages

NUM_ROWS = 300_000


def peak_bytes_of(code):
    """How far the largest resident size of a fresh process lies above the one before it runs a line."""
    program = (
        "from heterps_core.data.batch import ClickBatch\n"
        "from heterps_core.data.dataset import PreparedDataset\n"
        # Not `ru_maxrss`, which a process inherits from the one that starts it.
        "status = lambda: dict(line.split(':') for line in open('/proc/self/status'))\n"
        "num_bytes = lambda name: int(status()[name].split()[0]) * 1024\n"
        "before = num_bytes('VmRSS')\n"
        f"{code}\nprint(num_bytes('VmHWM') - before)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return int(found.stdout)


@pytest.mark.slow
def test_row_groups_in_memory_take_what_is_reserved_for_them_at_its_peak(tmp_path):
    stream = write_click_stream(tmp_path / "clicks.tsv", num_rows=NUM_ROWS, seed=0)
    prepare_dataset(stream.path, schema=CRITEO_SCHEMA, eval_fraction=0.0, out_dir=tmp_path / "prepared")

    taken = peak_bytes_of(
        f"dataset = PreparedDataset.open({str(tmp_path / 'prepared')!r})\n"
        "for index in range(10): dataset.batch(dataset.batch_rows(0, index, batch_size=4096, seed=0))"
    )

    assert 157 * NUM_ROWS < taken < WORKER_BYTES - 461e6 + ROW_BUFFER_BYTES_PER_SAMPLE * NUM_ROWS


def test_an_idle_worker_fits_into_what_is_reserved_for_it():
    taken = peak_bytes_of("import heterps_core.training.worker")

    assert taken < WORKER_BYTES


def test_a_core_reserves_its_worker_and_a_card_its_context_worked_by_hand():
    core, card = DEVICE_TYPES["cpu-c7i"], DEVICE_TYPES["gpu-t4"]
    activations = 2 * 100 * sum(layer.output_bytes_per_sample for layer in GRAPH.layers)

    of_core, of_card = (
        reserved_bytes(each, GRAPH, batch_size=100, num_samples=1e6, units_per_host=2)
        for each in (core, card)
    )

    # All of this small model may be copied for a checkpoint; of a large one no more than the trainer copies.
    copied = GRAPH.state_bytes
    assert copied < COPIED_BYTES + 2 * PIECE_BYTES <= CHECKPOINT_BYTES
    taken = 0.55e9 + 0.2e9 + copied + activations + HOST_BYTES / 2
    assert of_core == pytest.approx(taken + FREE_SHARE * 4 * 1024**3, abs=1.0)
    assert of_card == pytest.approx(CARD_BYTES + activations + FREE_SHARE * 16 * 1024**3)


def with_reserve(problem, num_bytes):
    units = {name: replace(unit, reserved_bytes=num_bytes) for name, unit in problem.device_types.items()}
    return replace(problem, device_types=units)


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_fills_what_is_reserved(seed):
    problem = make_problem(seed, num_layers=4, num_types=3, scarce=True, floor_samples_per_s=5_000)
    reserved = with_reserve(problem, 1e9)

    found = find_optimum(reserved)

    assert found.cost_usd == pytest.approx(CandidateStages.of(reserved).brute_force_usd(), rel=1e-12)
    assert found.cost_usd >= find_optimum(problem).cost_usd
    for part in evaluate(reserved, found.stages).stages:
        assert part.memory_bytes + 1e9 <= problem.device_types[part.stage.device_type].memory_bytes * (
            1 + 1e-9
        )


def test_a_plan_that_fills_the_reserve_is_a_violation_and_the_error_names_the_reserve():
    problem = make_problem(1, num_layers=2, num_types=1, floor_samples_per_s=0)
    layers = tuple(replace(layer, is_sharded=False, state_bytes=1.5e9) for layer in problem.layers)
    problem = replace(problem, layers=layers)
    stage = Stage(0, 1, "cpu", 1)  # 3 of 4 GB

    assert not evaluate(problem, [stage]).violations
    [violation] = evaluate(with_reserve(problem, 2e9), [stage]).violations

    assert (violation.constraint, violation.required, violation.reached) == ("memory", 2e9, 3e9)
    with pytest.raises(InfeasiblePlanError, match=r"has 1e\+09 \(4e\+09 less 3e\+09 reserved"):
        find_optimum(with_reserve(problem, 3e9))


def test_a_unit_that_does_not_even_hold_a_worker_carries_no_stage():
    problem = make_problem(1, num_layers=2, num_types=1, floor_samples_per_s=0)
    layers = tuple(replace(layer, state_bytes=0.0) for layer in problem.layers)

    with pytest.raises(InfeasiblePlanError, match="memory"):
        find_optimum(with_reserve(replace(problem, layers=layers), 5e9))


def test_a_problem_file_says_what_is_reserved_and_one_without_reserves_nothing():
    problem = make_problem(1, num_layers=2, num_types=1)
    document = json.loads(json.dumps(with_reserve(problem, 1e9).to_json()))

    assert document["device_types"]["cpu"]["reserved_bytes"] == 1e9
    assert SchedulingProblem.from_json(document) == with_reserve(problem, 1e9)
    assert "reserved_bytes" not in problem.to_json()["device_types"]["cpu"]
