"""How a function becomes a step of a flow: a task of Prefect whose result is not kept for other runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, update_wrapper
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from prefect import Task

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


class Step(Generic[_Args, _Result]):
    """A function that runs as a task of Prefect, which is loaded at the first call: parameters are checked before.

    Args:
        fn: The function, also for callers without a flow.
        settings: Of `prefect.task`.
    """

    def __init__(self, fn: Callable[_Args, _Result], **settings: Any) -> None:
        update_wrapper(self, fn)
        self.fn, self._settings = fn, settings

    def __call__(self, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        """Run the task, and return its result."""
        return self.task(*args, **kwargs)

    @cached_property
    def task(self) -> Task[_Args, _Result]:
        """The task of Prefect."""
        from prefect import task
        from prefect.cache_policies import NO_CACHE

        return task(cache_policy=NO_CACHE, **self._settings)(self.fn)


def step(name: str, **settings: Any) -> Callable[[Callable[_Args, _Result]], Step[_Args, _Result]]:
    """Return the decorator of a step, with further settings of `prefect.task`."""
    return lambda fn: Step(fn, name=name, **settings)
