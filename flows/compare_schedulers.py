"""Every search method on the same problems: which plan each finds, how far from the proven bound, in what time.

`python -m flows.compare_schedulers` runs it here, `prefect deployment run compare-schedulers` in the serving process.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

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
from heterps_core.models import PAPER_MODELS
from heterps_core.planning.search.measured_search import MEASURED_METHODS
from heterps_core.planning.search.schedulers import SCHEDULERS
from heterps_core.profiling.machine import num_cores
from heterps_core.training.job import default_batch_size
from infra.workspace import Workspace
from tasks.comparison import Terms, compare, load_problems, problems_of_models, profiled_job
from tasks.data import prepare_data
from tasks.planning.measured_plans import measured_table, search_measured
from tasks.provisioning import find_offers
from tasks.publishing import publish_comparison
from tasks.recording import record_comparison
from tasks.records.mlflow_views import DEFAULT_MLFLOW_URL
from tasks.records.runs import new_run_id, utc_now
from tasks.reports.comparison_document import comparison_document
from tasks.reports.document import markdown, terminal_text
from tasks.running.progress import log_block, log_step


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

    problems, left_out = load_problems(asked.problem or []), dict[str, str]()
    wanted = asked.models or ([] if asked.problem else list(PAPER_MODELS))
    if wanted:
        made, left_out = problems_of_models(
            workspace,
            wanted,
            prepare_data(workspace, data=None, schema_file=None),
            find_offers(asked.device_types),
            device_types=asked.device_types,
            throughput_floor_samples_per_s=asked.throughput_floor_samples_per_s,
        )
        problems += made
    if not problems:
        raise ConfigurationError(f"no problem is left to compare on: {'; '.join(left_out.values())}")

    compared_methods = list(dict.fromkeys(asked.methods or sorted(SCHEDULERS)))
    terms = Terms(
        budget_evaluations=asked.budget_evaluations,
        num_seeds=asked.seeds,
        max_seconds=asked.max_seconds_per_search,
    )
    log_step("searches", f"{len(problems)} problems x {len(compared_methods)} methods x {asked.seeds} seeds")
    comparison = compare(problems, compared_methods, terms, left_out=left_out)

    command = command_line(asked)
    document = comparison_document(comparison, command=command, finished_at=utc_now())
    text = markdown(document)
    log_block(terminal_text(document))
    if asked.output is not None:
        _write_markdown(Path(asked.output), text)
    publish_comparison(text)
    tracked = record_comparison(workspace, comparison, run_id=run_id, command=command, text=text)
    services = workspace.running_services()
    log_step("record", tracked.address(services.mlflow_url if services else DEFAULT_MLFLOW_URL))
    return run_id


def _compare_measured(workspace: Workspace, asked: CompareParameters) -> None:
    """Let the methods propose cuts of each model, and the trainer run them on this machine."""
    clicks = prepare_data(workspace, data=None, schema_file=None)
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


def command_line(asked: CompareParameters) -> str:
    """Return the command that compares with these parameters; those with their default value are left out.

    Example:
        >>> command_line(CompareParameters(seeds=2, methods=["exact", "genetic"]))
        'python -m flows.compare_schedulers --methods exact genetic --seeds 2'
    """
    words = ["python", "-m", "flows.compare_schedulers"]
    for name, value in asked.model_dump(exclude_defaults=True).items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)


def _write_markdown(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write the comparison to {path}: {error.strerror}") from error
