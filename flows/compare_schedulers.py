"""Every search method on the same problems: which plan each finds, how far from the proven bound, in what time.

`python -m flows.compare_schedulers` runs it here, `prefect deployment run compare-schedulers` in the serving process.
"""

from __future__ import annotations

import inspect
import shlex
import sys
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run as current_flow_run

from flows.parameter_checks import check_device_types
from flows.parameters import DEFAULT_DEVICE_TYPES
from flows.service.schedule import COMPARE_SCHEDULERS
from heterps_core.errors import ConfigurationError
from heterps_core.models import CTR_MODELS
from heterps_core.planning.search.schedulers import SCHEDULERS, get_scheduler
from infra.prices.price_catalogue import PriceCatalogue
from infra.workspace import Workspace
from tasks.comparison import Terms, compare, expected_seconds
from tasks.data import prepare_data
from tasks.planning.compared_problems import load_problems, problems_of_models
from tasks.planning.parameter_ranges import check_numbers
from tasks.profiling import check_model_name
from tasks.provisioning import REGION, check_offers, find_offers
from tasks.records.runs import new_run_id, utc_now
from tasks.reports.comparison_report import (
    Origin,
    comparison_markdown,
    comparison_text,
    publish_comparison,
    record_comparison,
    write_markdown,
)
from tasks.reports.reporting import DEFAULT_MLFLOW_URL
from tasks.running.story import tell, tell_block


def check_parameters(
    *,
    models: list[str] | None,
    problem: list[str] | None,
    methods: list[str] | None,
    device_types: list[str],
    output: str | None,
    **numbers: Any,
) -> None:
    """Check the parameters in milliseconds, before any work or record begins.

    Raises:
        UnknownNameError: A name is in no registry; the message lists the known ones.
        ConfigurationError: A file cannot be read or written, or a number is out of its range.
        ProvisioningError: A device type is not sold at the prices at hand.
    """
    check_numbers(numbers)
    for model in models or []:
        check_model_name(model)
    for method in methods or []:
        get_scheduler(method)
    check_device_types(device_types)
    check_offers(device_types, catalogue=PriceCatalogue(), region=REGION)
    load_problems(problem or [])
    if output is not None and (Path(output).is_dir() or not Path(output).absolute().parent.is_dir()):
        raise ConfigurationError(f"output must be a file in a folder that is there, got {output}")


@flow(name=COMPARE_SCHEDULERS)
def compare_schedulers(
    models: list[str] | None = None,
    problem: list[str] | None = None,
    methods: list[str] | None = None,
    device_types: list[str] = DEFAULT_DEVICE_TYPES,
    throughput_floor_samples_per_s: float = 0.0,
    seeds: int = 3,
    budget_evaluations: int = 10_000,
    max_seconds_per_search: float = 20.0,
    output: str | None = None,
) -> str:
    """Compare the search methods on the same problems, with the same evaluations and seeds.

    Args:
        models: Models to plan for a night's job; empty for all, or for none where problem files are given.
        problem: Problem files to compare on; may be given more than once.
        methods: Search methods; empty for all.
        device_types: What the layers of the models may be placed on.
        throughput_floor_samples_per_s: Least throughput of a plan for a model in samples/s; 0 for none.
        seeds: How many seeds each method searches with, from 0.
        budget_evaluations: Plans that each search may rate.
        max_seconds_per_search: A method that takes longer gets a tenth of the evaluations, or its own default.
        output: Markdown file for the tables; empty for none.

    Returns:
        The comparison's id.
    """
    parameters: dict[str, Any] = {
        "models": models,
        "problem": problem,
        "methods": methods,
        "device_types": device_types,
        "throughput_floor_samples_per_s": throughput_floor_samples_per_s,
        "seeds": seeds,
        "budget_evaluations": budget_evaluations,
        "max_seconds_per_search": max_seconds_per_search,
        "output": output,
    }
    check_parameters(**parameters)
    workspace = Workspace.locate().create()
    run_id = new_run_id(current_flow_run.id, now=utc_now())
    tell("comparison", run_id)

    problems, left_out = load_problems(problem or []), {}
    wanted = models or ([] if problem else list(CTR_MODELS))
    if wanted:
        made, left_out = problems_of_models(
            workspace,
            wanted,
            prepare_data(workspace, data=None, schema_file=None),
            find_offers(device_types),
            device_types=device_types,
            throughput_floor_samples_per_s=throughput_floor_samples_per_s,
        )
        problems += made
    if not problems:
        raise ConfigurationError(f"no problem is left to compare on: {'; '.join(left_out.values())}")

    compared_methods = list(dict.fromkeys(methods or sorted(SCHEDULERS)))
    terms = Terms(budget_evaluations=budget_evaluations, num_seeds=seeds, max_seconds=max_seconds_per_search)
    minutes = expected_seconds(problems, compared_methods, terms) / 60
    tell(
        "searches",
        f"{len(problems)} problems x {len(compared_methods)} methods x {seeds} seeds: about {minutes:.1f} minutes",
    )
    comparison = compare(problems, compared_methods, terms, left_out=left_out)

    origin = Origin(run_id=run_id, command=command_line(parameters), finished_at=utc_now())
    markdown = comparison_markdown(comparison, origin)
    tell_block(comparison_text(comparison))
    if output is not None:
        write_markdown(Path(output), markdown)
    publish_comparison(markdown)
    tracked = record_comparison(workspace, comparison, origin, markdown=markdown)
    services = workspace.running_services()
    tell("record", tracked.address(services.mlflow_url if services else DEFAULT_MLFLOW_URL))
    return run_id


def command_line(parameters: dict[str, Any]) -> str:
    """Return the command that compares with these parameters; those with their default value are left out.

    Example:
        >>> command_line({"seeds": 3, "methods": ["exact", "genetic"], "budget_evaluations": 50})
        'python -m flows.compare_schedulers --methods exact genetic --budget-evaluations 50'
    """
    words = ["python", "-m", "flows.compare_schedulers"]
    defaults = inspect.signature(compare_schedulers.fn).parameters
    for name, value in parameters.items():
        if value != defaults[name].default:
            values = value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)


if __name__ == "__main__":
    from flows.command_line import main

    sys.exit(main(compare_schedulers, program="python -m flows.compare_schedulers", check=check_parameters))
