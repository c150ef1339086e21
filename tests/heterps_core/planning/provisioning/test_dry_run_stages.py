import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.planning.provisioning.dry_run_stages import dry_run_replicas, dry_run_stages
from heterps_core.plans.scheduling_plan import Stage


@pytest.mark.parametrize(
    ("planned", "num_cores", "local"),
    [
        ([1], 8, (1,)),  # never more than planned
        ([3, 1], 2, (1, 1)),
        ([2, 1], 3, (2, 1)),
        ([1, 2], 3, (1, 2)),
        ([40, 10, 2], 8, (6, 1, 1)),
        ([5, 5, 5], 2, (1, 1, 1)),  # a stage without a worker could not be tried in a dry run
    ],
)
def test_a_dry_run_keeps_the_proportions_within_the_cores(planned, num_cores, local):
    assert dry_run_replicas(planned, num_cores=num_cores) == local


def test_refuses_to_dry_run_a_stage_without_replicas():
    with pytest.raises(ConfigurationError, match="at least 1 replica"):
        dry_run_replicas([1, 0], num_cores=2)


def test_a_dry_run_keeps_the_cut_and_shares_the_cores():
    planned = (Stage(0, 0, "cpu-c7i", 9), Stage(1, 2, "gpu-t4", 1))

    assert dry_run_stages(planned, num_cores=3) == (Stage(0, 0, "cpu-c7i", 2), Stage(1, 2, "gpu-t4", 1))
