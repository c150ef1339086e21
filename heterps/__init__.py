"""HeterPS from Python: `heterps.train(...)` and `heterps.plan(...)`, with results that a notebook shows as tables.

Both take what the commands of the same names take; `heterps.load_champion()` predicts with the model that serves.
What a user can fix is raised as `heterps.HeterpsError`.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterps_core.errors import HeterpsError
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem

if TYPE_CHECKING:
    from heterps_core.planning.search.search_result import SearchResult
    from tasks.click_model import ClickModel
    from tasks.records.past_runs import PastRun

__all__ = ["HeterpsError", "Plan", "Run", "load_champion", "plan", "train"]

PLAN_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The cheapest plan that was found for a problem, with its proof."""

    problem: SchedulingProblem
    result: SearchResult
    """Its `plan` has `stages`, `cost_usd` and `cost_lower_bound_usd`."""

    def __str__(self) -> str:
        from flows.commands.planning.plan import plan_table

        return plan_table(self.problem, self.result)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


@dataclass(frozen=True, slots=True)
class Run:
    """A run, with its figures as they are recorded: `run.record.auc`, `run.record.usd` and others."""

    record: PastRun
    report: str
    """The whole report, as `heterps explain` prints it."""

    def __str__(self) -> str:
        return "\n".join(f"{name:<12}{value}" for name, value in self._facts())

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{name}</th><td>{escape(value)}</td></tr>" for name, value in self._facts())
        return f"<table>{rows}</table><details><summary>report</summary><pre>{escape(self.report)}</pre></details>"

    def _facts(self) -> Iterable[tuple[str, str]]:
        shown = {
            "run": self.record.run_id,
            "model": self.record.model,
            "plan": self.record.plan,
            "USD": self.record.usd,
            "samples/s": self.record.throughput_samples_per_s,
            "AUC": self.record.auc,
            "champion": {None: None, True: "yes", False: "no"}[self.record.was_promoted],
        }
        forms = {"USD": "{:.4f}", "samples/s": "{:,.0f}", "AUC": "{:.4f}"}
        return [
            (name, forms.get(name, "{}").format(each)) for name, each in shown.items() if each is not None
        ]


def plan(
    problem: SchedulingProblem | Path | str,
    *,
    scheduler: str = "exact",
    seed: int = 0,
    seconds: float = PLAN_SECONDS,
) -> Plan:
    """Search the cheapest plan for a problem, or a file of one.

    Args:
        scheduler: A method of `heterps plan`; "exact" proves its plan.
        seed: Of all random choices.
        seconds: Of search and proof; the plan may have a gap to the bound then.

    Raises:
        HeterpsError: The problem is malformed, the method is not known, or no plan exists.
    """
    from heterps_core.planning.search.schedulers import get_scheduler

    method = get_scheduler(scheduler)
    if not isinstance(problem, SchedulingProblem):
        problem = SchedulingProblem.load(Path(problem))
    budget = method.default_budget_evaluations
    return Plan(problem, method.search(problem, budget_evaluations=budget, seed=seed, max_seconds=seconds))


def train(**parameters: Any) -> Run:
    """Run what `heterps train` runs, here and now, print its steps, and return the run.

    Args:
        parameters: By the names of `heterps train --help` with underscores, such as data="clicks", plan_only=True.

    Returns:
        The run; where its day is done already, the one that did it.

    Raises:
        HeterpsError: As the command says in a line.
    """
    # Prefect cannot be loaded where an event loop runs, as in a notebook; a thread has none.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(import_module, "prefect").result()
    from flows.command_line import run_here
    from flows.parameters import TrainParameters
    from infra.workspace import Workspace
    from tasks.records.past_runs import past_trainings
    from tasks.records.run_files import read_report

    run_id = run_here("flows.train_ctr", TrainParameters.of(parameters))
    workspace = Workspace.locate()
    [record] = past_trainings(workspace, most=1, run_id=run_id)
    return Run(record, read_report(workspace, run_id))


def load_champion(version: str | None = None) -> ClickModel:
    """Return the model that serves, whose `predict` takes a pandas DataFrame of the columns that it was trained on.

    Its files are checked against the hash that they were registered with, before anything of them is loaded.
    `mlflow.pyfunc.load_model` checks nothing: it runs the code that the files name.

    Args:
        version: A registered version in place of the champion.

    Raises:
        HeterpsError: There is no champion or no such version yet, or files of it were changed.
    """
    from infra.workspace import Workspace
    from tasks.click_model import ClickModel
    from tasks.records.model_registry import verified_folder, version_to_serve

    workspace = Workspace.locate()
    return ClickModel(verified_folder(workspace, version_to_serve(workspace, version)))
