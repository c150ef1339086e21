"""A run in MLflow by its ids, and the parameters that every run has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from heterps_core.plans.scheduling_plan import Stage

EndStatus = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """An MLflow run by its ids."""

    mlflow_run_id: str
    experiment_id: str
    run_id: str | None = None
    """Of the flow run, where the process that opened it is still the one that writes."""

    def address(self, mlflow_url: str) -> str:
        """Return the page of this run in an MLflow UI at `mlflow_url`."""
        return f"{mlflow_url}/#/experiments/{self.experiment_id}/runs/{self.mlflow_run_id}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The parameters that every run has, parent or child, so that columns line up."""

    method: str
    """Name of the scheduler."""

    model: str
    device_types: str
    """In the order of the stages, for instance "cpu-c7i | gpu-t4"."""

    replicas: str
    """In the order of the stages, for instance "4 | 1"."""

    market: str
    batch_size: int
    seed: int

    @classmethod
    def of_plan(
        cls, stages: Sequence[Stage], *, method: str, model: str, market: str, batch_size: int, seed: int
    ) -> RunSettings:
        """Describe a plan."""
        return cls(
            method=method,
            model=model,
            device_types=" | ".join(stage.device_type for stage in stages),
            replicas=" | ".join(str(stage.num_replicas) for stage in stages),
            market=market,
            batch_size=batch_size,
            seed=seed,
        )
