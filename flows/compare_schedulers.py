"""Every search method on the same problems: each plan with its distance from the proven bound and its time.

`python -m flows.compare_schedulers` runs it here, `prefect deployment run compare-schedulers` in the serving process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from flows.parameters import CompareParameters

if __name__ == "__main__":
    # Before Prefect is loaded, so that --help and a wrong value are answered at once.
    from flows.command_line import main

    sys.exit(main("flows.compare_schedulers", CompareParameters))

from prefect import flow
from prefect.runtime import flow_run as current_flow_run

from flows.parameter_model import takes
from flows.service.schedule import COMPARE_SCHEDULERS
from heterps_core.errors import ConfigurationError
from heterps_core.machine import num_cores
from heterps_core.models import PAPER_MODELS
from heterps_core.planning.search.measured_search import MEASURED_METHODS
from heterps_core.planning.search.schedulers import SCHEDULERS
from heterps_core.training.job import default_batch_size
from infra.workspace import Workspace
from tasks.comparison import FoundPlan, Terms, compare, load_problems, problems_of_models, profiled_job
from tasks.data import prepare_data
from tasks.planning.measured_plans import measured_table, search_measured
from tasks.provisioning import find_offers
from tasks.records.mlflow_names import COMPLETED, Kind
from tasks.records.mlflow_views import DEFAULT_MLFLOW_URL
from tasks.records.run_ids import new_run_id, utc_now
from tasks.records.run_record import close_run, note_file
from tasks.records.tracking import record_search
from tasks.running.progress import log_block, log_step
from tasks.running.run_lifecycle import open_run
from tasks.sources import ClickSource


@flow(name=COMPARE_SCHEDULERS, validate_parameters=False)
@takes(CompareParameters)
def compare_schedulers(asked: CompareParameters) -> str:
    """Compare the search methods on the same problems, with the same evaluations and seeds.

    Returns:
        The comparison's id.
    """
    workspace = Workspace.locate().create()
    run_id = new_run_id(current_flow_run.id, now=utc_now())
    log_step("comparison", run_id)

    if asked.reward == "measured":
        _compare_measured(workspace, asked)
        return run_id

    problems = load_problems(asked.problem or [])
    wanted = asked.models or ([] if asked.problem else list(PAPER_MODELS))
    if wanted:
        problems += problems_of_models(
            workspace,
            wanted,
            prepare_data(workspace, ClickSource()),
            find_offers(asked.device_types),
            device_types=asked.device_types,
            throughput_floor_samples_per_s=asked.throughput_floor_samples_per_s,
        )
    if not problems:
        raise ConfigurationError(
            f"a problem must be left to compare on, but none of {', '.join(wanted)} gives one"
        )

    methods = list(dict.fromkeys(asked.methods or sorted(SCHEDULERS)))
    terms = Terms(
        budget_evaluations=asked.budget_evaluations,
        num_seeds=asked.seeds,
        max_seconds=asked.max_seconds_per_search,
    )
    log_step("searches", f"{len(problems)} problems x {len(methods)} methods x {asked.seeds} seeds")
    _record(workspace, compare(problems, methods, terms), run_id=run_id)
    return run_id


def _record(workspace: Workspace, plans: Sequence[FoundPlan], *, run_id: str) -> None:
    """Write a comparison to MLflow, each search as a child run; after its end, so that a kill leaves no run open."""
    run = open_run(
        workspace, run_id=run_id, run_name=f"{Kind.COMPARISON} {run_id}", tags={}, kind=Kind.COMPARISON
    )
    problems = {plan.compared.full_name: plan.compared.problem for plan in plans}
    for plan in plans:
        figures = {"search/cpu_seconds": plan.cpu_seconds}
        record_search(workspace, run, plan.result, plan.settings, name=plan.name, figures=figures)
    for number, problem in enumerate(problems.values()):
        note_file(workspace, run.run_id, f"problems/{number}.json", problem.to_json())
    close_run(workspace, run, status="FINISHED", reason=COMPLETED)
    services = workspace.running_services()
    address = run.address(services.mlflow_url if services else DEFAULT_MLFLOW_URL)
    log_step("compare", f"the {len(plans)} plans below this run, grouped by method: {address}")


def _compare_measured(workspace: Workspace, asked: CompareParameters) -> None:
    """Let the methods propose cuts of each model, and the trainer run them on this machine."""
    clicks = prepare_data(workspace, ClickSource())
    dataset = clicks.open()
    batch_size = default_batch_size(dataset.num_train_rows)
    for model in asked.models or ["ctrdnn"]:
        _, profiled = profiled_job(workspace, model, clicks, asked.device_types)
        log_step("profile", profiled.summary)
        found = search_measured(
            profiled,
            dataset=dataset,
            batch_size=batch_size,
            methods=asked.methods or list(MEASURED_METHODS),
            budget_measurements=asked.budget_measurements,
            num_seeds=asked.seeds,
            num_cores=num_cores(),
        )
        log_block("\n".join(measured_table(model, found, batch_size=batch_size).lines()))
