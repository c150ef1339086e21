"""What search methods are compared on: a night's job for each model, or problem files as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heterps_core.errors import ConfigurationError, HeterpsError
from heterps_core.hardware import InstanceOffer, Market
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.training.job import NIGHT_SAMPLES, PRODUCTION_ROWS_PER_SLOT
from infra.workspace import Workspace
from tasks.data import PreparedClicks
from tasks.planning.planned_job import PlannedJob, planned_job
from tasks.profiling import ProfiledModel, profile_layers
from tasks.running.progress import log_step
from tasks.scheduling import make_problem


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedProblem:
    """A problem that the methods are compared on."""

    name: str
    """Of the model, or the file as it was given."""

    problem: SchedulingProblem
    estimated_device_types: tuple[str, ...] = ()
    """Whose times are a roofline and not a measurement; not known of a file."""

    market: str = ""
    """Of its prices; not known of a file."""


def load_problems(files: Sequence[str]) -> list[ComparedProblem]:
    """Read problem files.

    Raises:
        ConfigurationError: A file cannot be read or is no problem; the message names the file and the field.
    """
    problems = []
    for file in dict.fromkeys(files):
        try:
            problems.append(ComparedProblem(name=file, problem=SchedulingProblem.load(Path(file))))
        except ConfigurationError as error:
            raise ConfigurationError(str(error) if file in str(error) else f"{file}: {error}") from error
    return problems


def problems_of_models(
    workspace: Workspace,
    models: Sequence[str],
    clicks: PreparedClicks,
    offers: Sequence[InstanceOffer],
    *,
    device_types: Sequence[str],
    throughput_floor_samples_per_s: float,
) -> tuple[list[ComparedProblem], dict[str, str]]:
    """Make the problem of a night's job for each model; return them, and what cannot be made with the reason."""
    problems: list[ComparedProblem] = []
    left_out: dict[str, str] = {}
    for model in dict.fromkeys(models):
        try:
            job, profiled = profiled_job(workspace, model, clicks, device_types)
            problem = make_problem(
                profiled,
                offers,
                job,
                device_types=device_types,
                num_epochs=1,
                throughput_floor_samples_per_s=throughput_floor_samples_per_s,
            )
        except HeterpsError as error:
            left_out[model] = reason_in_one_line(error)
            log_step("left out", f"{model}: {left_out[model]}")
            continue
        log_step("profile", profiled.summary)
        problems.append(
            ComparedProblem(
                name=model,
                problem=problem,
                estimated_device_types=profiled.estimated_device_types,
                market=Market.ON_DEMAND,
            )
        )
    return problems, left_out


def reason_in_one_line(error: Exception) -> str:
    """Return an error without the way out that it ends with, which is not for what is only compared."""
    if not isinstance(error, HeterpsError):
        return f"failed: {type(error).__name__}: {' '.join(str(error).split())}"
    return " ".join(str(error).partition(";")[0].split())


def profiled_job(
    workspace: Workspace, model: str, clicks: PreparedClicks, device_types: Sequence[str]
) -> tuple[PlannedJob, ProfiledModel]:
    """Return a night's job, and the model's layers measured here and estimated for device types."""
    job = planned_job(
        clicks.open(),
        is_dry_run=True,
        batch_size=None,
        planned_samples=NIGHT_SAMPLES,
        planned_rows_per_slot=PRODUCTION_ROWS_PER_SLOT,
    )
    profiled = profile_layers(
        workspace, clicks, job, model=model, batch_size=job.batch_size, device_types=device_types
    )
    return job, profiled
