"""DLRMv4-HSTU at its published size: the example's numbers follow from what is published, and its plan is proven."""

import json

import pytest

from heterps_core.device_types import get_device_type
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.optimum import find_optimum
from tests.heterps_core.models.test_tracing import published_flops
from tests.paths import PROJECT

VALUES, WIDTH, UNITS = 4096, 512, 3


@pytest.fixture(scope="module")
def problem():
    path = PROJECT / "docs" / "examples" / "dlrmv4.problem.json"
    return SchedulingProblem.from_json(json.loads(path.read_text()))


def test_a_unit_takes_the_published_operations_at_two_fifths_of_the_published_rate(problem):
    flops = sum(published_flops(VALUES, WIDTH, UNITS))
    for name in problem.device_types:
        hardware = get_device_type(name)
        rate = 0.4 * (hardware.peak_bf16_flops_per_s or hardware.peak_fp32_flops_per_s)
        seconds = [layer.compute_seconds[name] for layer in problem.layers if layer.name.startswith("unit")]
        assert sum(seconds) == pytest.approx(problem.profile_batch_size * flops / rate, rel=2e-3)


def test_tables_and_rows_have_the_published_size(problem):
    embedding = problem.layers[0]
    rows_bytes = problem.profile_batch_size * VALUES * WIDTH * 4
    assert embedding.state_bytes == 600e9
    assert embedding.output_bytes_per_sample == VALUES * WIDTH * 2
    for name, seconds in embedding.compute_seconds.items():
        bandwidth = get_device_type(name).memory_bandwidth_bytes_per_s
        assert seconds == pytest.approx(5 * rows_bytes / bandwidth, rel=1e-4)


def test_a_day_of_it_costs_what_the_documents_say(problem):
    found = find_optimum(problem)

    assert [stage.units for stage in found.stages] == ["16 x gpu-h100-400gbit"]
    assert found.cost_usd == pytest.approx(1870.392, abs=1e-3)
    assert found.cost_lower_bound_usd == found.cost_usd
    assert "1,870.392159 USD (proven" in (PROJECT / "docs" / "COMPARISON.md").read_text()
