import numpy as np
import pytest

from heterps_core.measurement.placed_plan import stages_of_assignment
from tests.benchmarks.tapp_measured import CASES, shown
from tests.benchmarks.unlike_devices import cut_seconds, joined_layers, layer_seconds, planned_assignment
from tests.builders import make_problem


def test_a_block_has_the_times_of_its_layers_and_the_output_of_the_last():
    problem = make_problem(0, num_layers=5, num_types=2)

    first, second = joined_layers(problem, [2, 3])

    layers = problem.layers
    assert first.compute_seconds["cpu"] == layers[0].compute_seconds["cpu"] + layers[1].compute_seconds["cpu"]
    assert second.state_bytes == sum(layer.state_bytes for layer in layers[2:])
    assert (first.name, second.name) == ("layer_0", "layer_2")
    assert second.output_bytes_per_sample == layers[4].output_bytes_per_sample


def test_times_are_those_of_a_whole_batch():
    problem = make_problem(0, num_layers=3, num_types=2)

    seconds, cuts = layer_seconds(problem), cut_seconds(problem)

    # Batches of 4096 samples, profiled with 512; activations forward and gradients back at the slower end's speed.
    assert seconds[2, 0] == pytest.approx(8 * problem.layers[2].compute_seconds["cpu"])
    slower = min(unit.bandwidth_bytes_per_s for unit in problem.device_types.values())
    assert cuts == pytest.approx(
        [2 * 4096 * layer.output_bytes_per_sample / slower for layer in problem.layers[:2]]
    )


def test_the_planner_names_a_device_for_every_layer():
    problem = make_problem(3, num_layers=6, num_types=2, max_units=100)

    assignment = planned_assignment(problem)

    assert len(assignment) == 6
    assert set(assignment) <= {0, 1}


def test_plans_are_shown_in_short():
    assert shown(stages_of_assignment([0, 0, 1], ["fast", "slow"])) == "fast 0-1 | slow 2-2"


def test_the_published_ratios_are_those_of_the_abstract():
    # Mao et al. 2021: 1.37 times faster than BSP on average.
    assert np.mean([case.published["bsp"] for case in CASES.values()]) == pytest.approx(1.37, abs=0.01)
