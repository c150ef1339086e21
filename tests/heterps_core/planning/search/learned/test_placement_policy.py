from dataclasses import replace

import numpy as np
import pytest
import torch

from heterps_core.planning.problem.scheduling_problem import StepModel
from heterps_core.planning.search.learned.placement_policy import (
    PlacementPolicy,
    placement_logits,
    policy_features,
)
from tests.benchmarks.research.policy_training import draw
from tests.builders import make_problem

PROBLEM = make_problem(3, num_layers=9, num_types=4)


def with_units(problem, **factors):
    """The problem with every value of some field of its device types multiplied."""
    units = {
        name: replace(unit, **{field: getattr(unit, field) * factor for field, factor in factors.items()})
        for name, unit in problem.device_types.items()
    }
    return replace(problem, device_types=units)


def test_every_row_of_the_table_is_a_distribution():
    tables = np.exp(placement_logits(PROBLEM))

    assert tables.shape == (9, 5, 4)
    np.testing.assert_allclose(tables.sum(axis=2), 1.0, rtol=1e-5)


def test_the_order_of_the_device_types_does_not_matter():
    order = [2, 0, 3, 1]
    names = list(PROBLEM.device_types)
    turned = replace(
        PROBLEM, device_types={names[index]: PROBLEM.device_types[names[index]] for index in order}
    )

    tables, of_turned = placement_logits(PROBLEM), placement_logits(turned)

    np.testing.assert_allclose(of_turned, tables[:, [*order, 4]][:, :, order], atol=1e-4)


def test_the_unit_of_money_does_not_matter():
    np.testing.assert_allclose(
        policy_features(with_units(PROBLEM, price_usd_per_hour=7.0)), policy_features(PROBLEM), atol=1e-5
    )


def test_the_unit_of_time_does_not_matter():
    layers = tuple(
        replace(
            layer,
            compute_seconds={name: 5 * value for name, value in layer.compute_seconds.items()},
            communication_seconds={name: 5 * value for name, value in layer.communication_seconds.items()},
        )
        for layer in PROBLEM.layers
    )
    slower = replace(
        with_units(PROBLEM, bandwidth_bytes_per_s=0.2),
        layers=layers,
        throughput_floor_samples_per_s=PROBLEM.throughput_floor_samples_per_s / 5,
    )

    np.testing.assert_allclose(policy_features(slower), policy_features(PROBLEM), atol=1e-4)


@pytest.mark.parametrize("seed", range(30))
def test_features_are_finite_for_every_kind_of_problem(seed):
    assert torch.isfinite(policy_features(draw(seed))).all()


@pytest.mark.parametrize("step_model", StepModel)
def test_one_layer_of_no_work_on_one_type_has_a_table(step_model):
    problem = make_problem(0, num_layers=2, num_types=1)
    idle = replace(problem.layers[0], compute_seconds={"cpu": 0.0}, communication_seconds={"cpu": 0.0})
    problem = replace(problem, layers=(idle, problem.layers[1]), step_model=step_model)

    np.testing.assert_allclose(placement_logits(problem), 0.0)


def test_an_untrained_policy_depends_on_what_lies_on_both_sides_of_a_layer():
    torch.manual_seed(0)
    features = policy_features(PROBLEM)[None].requires_grad_()
    policy = PlacementPolicy(features.shape[3], 8)

    policy(features)[0, 4, 0, 1].backward()

    slopes = features.grad.abs().sum(dim=(0, 2, 3))
    assert (slopes > 0).all()
