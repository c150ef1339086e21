"""How a dry run shares the cores of one machine among the stages of a plan: the same cut with fewer replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from heterps_core.errors import ConfigurationError
from heterps_core.plans.scheduling_plan import Stage


def dry_run_stages(stages: Sequence[Stage], *, num_cores: int) -> tuple[Stage, ...]:
    """Return the same stages with replicas in proportion, as many as the cores allow.

    Example:
        >>> dry_run_stages([Stage(0, 0, "cpu-c7i", 9), Stage(1, 3, "gpu-t4", 1)], num_cores=3)
        (Stage(first_layer=0, last_layer=0, device_type='cpu-c7i', num_replicas=2), \
Stage(first_layer=1, last_layer=3, device_type='gpu-t4', num_replicas=1))
    """
    replicas = dry_run_replicas([stage.num_replicas for stage in stages], num_cores=num_cores)
    return tuple(replace(stage, num_replicas=count) for stage, count in zip(stages, replicas, strict=True))


def dry_run_replicas(num_replicas: Sequence[int], *, num_cores: int) -> tuple[int, ...]:
    """Return replica counts in the proportions of a plan that this machine can run at once.

    Every stage keeps at least one replica, also where there are more stages than cores. The cores left
    over go one by one to the stage that is furthest behind its share: the one with the largest
    num_replicas / (replicas in the dry run + 1), the first of equals; no stage gets more than it has in the plan.

    Example:
        >>> dry_run_replicas([40, 10, 2], num_cores=8)
        (6, 1, 1)
        >>> dry_run_replicas([3, 1], num_cores=2)
        (1, 1)
    """
    if not num_replicas or min(num_replicas) < 1 or num_cores < 1:
        raise ConfigurationError(
            f"a dry run needs stages with at least 1 replica each and at least 1 core, "
            f"got replicas {list(num_replicas)} and {num_cores} cores"
        )
    local = [1] * len(num_replicas)
    for _ in range(min(num_cores, sum(num_replicas)) - len(local)):
        behind = [
            planned / (given + 1) if given < planned else 0.0
            for planned, given in zip(num_replicas, local, strict=True)
        ]
        local[behind.index(max(behind))] += 1
    return tuple(local)
