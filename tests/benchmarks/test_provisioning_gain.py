from itertools import pairwise

import numpy as np
import pytest

from heterps_core.planning.cost_model.evaluation import evaluate
from heterps_core.plans.scheduling_plan import Stage
from tests.benchmarks import provisioning_gain
from tests.builders import make_problem


def test_every_method_has_its_figures():
    figures = {figure["name"]: figure["value"] for figure in provisioning_gain.run(seed=0, num_cases=2)}

    assert figures["partitions"] > 0
    for method in ("at_floor", "newton", "sta_ratio", "sta_ps_ratio"):
        assert 0 <= figures[f"{method}_share_feasible"] <= 1
        assert figures[f"{method}_worst_excess"] >= figures[f"{method}_median_excess"] >= -1e-9


def test_excess_is_measured_against_whole_counts():
    problem = make_problem(0, num_layers=8, num_types=2, floor_samples_per_s=100)
    [(runs, least_usd), *_] = provisioning_gain.feasible_partitions(problem, np.random.default_rng(0))

    def generous(problem, runs):
        """Far more units than any floor asks for."""
        return tuple(Stage(*run, num_replicas=200) for run in runs)

    excess = provisioning_gain.excess_over(least_usd, problem, runs, generous)

    assert excess == pytest.approx(evaluate(problem, generous(problem, runs)).cost_usd / least_usd - 1)
    assert excess > 0


def test_random_runs_cover_the_chain_and_differ_from_their_neighbours():
    problem = make_problem(0, num_layers=16, num_types=4)
    random = np.random.default_rng(0)

    for _ in range(100):
        runs = provisioning_gain.random_runs(problem, random)
        assert [run.first_layer for run in runs] == [0, *(run.last_layer + 1 for run in runs[:-1])]
        assert runs[-1].last_layer == 15
        assert all(left.device_type != right.device_type for left, right in pairwise(runs))
