import pytest

from heterps_core.plans.scheduling_plan import Stage, dry_run_stages


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
    stages = [Stage(index, index, "cpu-c7i", count) for index, count in enumerate(planned)]

    found = dry_run_stages(stages, num_cores=num_cores)

    assert tuple(stage.num_replicas for stage in found) == local


def test_a_dry_run_keeps_the_cut_and_shares_the_cores():
    planned = (Stage(0, 0, "cpu-c7i", 9), Stage(1, 2, "gpu-t4", 1))

    assert dry_run_stages(planned, num_cores=3) == (Stage(0, 0, "cpu-c7i", 2), Stage(1, 2, "gpu-t4", 1))
