"""How a function becomes a step of a flow: a task of Prefect whose result is not kept for other runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

REPEATABLE: dict[str, Any] = {
    "retries": 2,
    "retry_delay_seconds": [2, 10],
    # Steps that fail together are not tried again together.
    "retry_jitter_factor": 0.5,
}
"""Settings of steps that only read, or whose second run leaves what the first would have: not a launch, a training, a
search or a registration. A record waits in the workspace for MLflow; boto3 tries calls of AWS again."""


def step(name: str, **settings: Any) -> Callable[[Callable[_Args, _Result]], Task[_Args, _Result]]:
    """Return the decorator of a step, with further settings of `prefect.task`."""
    return task(name=name, cache_policy=NO_CACHE, **settings)
