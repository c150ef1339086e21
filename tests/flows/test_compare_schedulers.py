import json
import time
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient

from flows.command_line import _parser_for, main
from flows.compare_schedulers import compare_schedulers
from flows.parameters import CompareParameters
from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.search.schedulers import SCHEDULERS, get_scheduler
from heterps_core.planning.search.schedulers.base import ProposingScheduler
from infra.workspace import Workspace
from tests.tasks.builders import make_problem

METHODS = ["exact", "gpu-only", "brute-force"]
BUDGET = 64


class BrokenScheduler(ProposingScheduler):
    """A method with a defect."""

    name = "broken"
    default_budget_evaluations = 10

    def propose(self, problem, *, budget_evaluations, seed):
        raise ZeroDivisionError("a defect")
        yield


class SlowScheduler(ProposingScheduler):
    """A method that takes a fifth of a second for each plan, and so takes two by default."""

    name = "slow"
    default_budget_evaluations = 2

    def propose(self, problem, *, budget_evaluations, seed):
        while True:
            time.sleep(0.2)
            yield np.zeros((1, problem.num_layers), dtype=np.int64)


class EndlessScheduler(SlowScheduler):
    """The same, made for more plans."""

    name = "endless"
    default_budget_evaluations = 1_000


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def workspace(home, monkeypatch):
    """One workspace for all tests here, as MLflow takes seconds to write its tables."""
    monkeypatch.setenv("HETERPS_HOME", str(home))
    return Workspace(root=home)


@pytest.fixture(scope="module")
def problem_files(tmp_path_factory):
    """By hand: 8 gpu units reach 9,091 samples/s, so the second floor is beyond gpu-only."""
    folder = tmp_path_factory.mktemp("problems")
    for name, floor in {"easy": 1_000.0, "fast": 9_500.0}.items():
        problem = make_problem(throughput_floor_samples_per_s=floor)
        (folder / f"{name}.json").write_text(json.dumps(problem.to_json()))
    return [str(folder / "easy.json"), str(folder / "fast.json")]


def searches_of(workspace, run_id):
    """Return the comparison's run, and its searches by method, problem and seed."""
    client = MlflowClient(workspace.tracking_uri)
    experiment = client.get_experiment_by_name("compare-schedulers")
    runs = client.search_runs([experiment.experiment_id], f"tags.`heterps.run_id` = '{run_id}'")
    [parent] = [run for run in runs if run.data.tags["heterps.kind"] == "comparison"]
    return parent, {
        (run.data.params["method"], run.data.params["model"], int(run.data.params["seed"])): run
        for run in runs
        if run is not parent
    }


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.slow
def test_each_search_is_a_run_with_its_plan_and_gap(workspace, problem_files, caplog):
    run_id = compare_schedulers(problem=problem_files, methods=METHODS, seeds=2, budget_evaluations=BUDGET)

    parent, found = searches_of(workspace, run_id)
    assert parent.info.status == "FINISHED"
    assert len(found) == 10  # three methods, two files and two seeds, less the two without a plan
    for (method, file, seed), run in found.items():
        problem = SchedulingProblem.load(Path(file))
        plan = get_scheduler(method).search(problem, budget_evaluations=BUDGET, seed=seed).plan
        assert run.data.metrics["search/optimality_gap"] == pytest.approx(plan.optimality_gap)
        assert run.data.metrics["predicted/cost_usd"] == pytest.approx(plan.cost_usd)
        assert (run.data.params["conditions"], run.info.status) == ("as given", "FINISHED")
    assert caplog.text.count("gpu-only, ") == caplog.text.count("9090.91 samples/s") == 1  # each reason once


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.weekly
def test_a_method_with_a_defect_and_one_without_end_are_logged(workspace, problem_files, monkeypatch, caplog):
    monkeypatch.setitem(SCHEDULERS, "broken", f"{__name__}:BrokenScheduler")
    monkeypatch.setitem(SCHEDULERS, "slow", f"{__name__}:SlowScheduler")
    monkeypatch.setitem(SCHEDULERS, "endless", f"{__name__}:EndlessScheduler")

    run_id = compare_schedulers(
        problem=problem_files[:1],
        methods=["broken", "slow", "endless", "cpu-only", "brute-force"],
        seeds=2,
        budget_evaluations=70,
        max_seconds_per_search=1.0,
    )

    _, found = searches_of(workspace, run_id)
    assert {method for method, *_ in found} == {"slow", "cpu-only", "brute-force"}
    num_rated = {method: run.data.metrics["search/num_evaluations"] for (method, *_), run in found.items()}
    assert (num_rated["slow"], num_rated["brute-force"]) == (2, 18)
    assert "failed: ZeroDivisionError: a defect" in caplog.text
    assert "70 evaluations took more than 1 s" in caplog.text


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.slow
@pytest.mark.weekly
def test_models_are_planned_for_a_night_and_one_that_cannot_be_made_is_left_out(workspace, caplog):
    run_id = compare_schedulers(
        models=["nce", "json:no_such_function"],
        methods=["exact"],
        seeds=1,
        device_types=["cpu-c7i", "gpu-t4"],
    )

    parent, _ = searches_of(workspace, run_id)
    children = MlflowClient(workspace.tracking_uri).search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    )
    kinds = {(run.data.params["conditions"], run.data.params["step_model"]) for run in children}
    assert len(kinds) == len(children) == 4
    assert "json:no_such_function: " in caplog.text


def test_problem_files_may_be_given_in_parts():
    parsed = _parser_for(CompareParameters, program="compare").parse_args(
        ["--problem", "a.json", "--problem", "b.json", "c.json", "--device-types", "gpu-t4"]
    )

    assert parsed.problem == ["a.json", "b.json", "c.json"]
    assert parsed.device_types == ["gpu-t4"]


def test_good_parameters_pass():
    CompareParameters(models=["ctrdnn"], device_types=["cpu-c7i"], seeds=3).check()


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"models": ["ctrdn"]}, UnknownNameError, "Did you mean 'ctrdnn'"),
        ({"methods": ["exakt"]}, UnknownNameError, "Did you mean 'exact'"),
        ({"device_types": ["tpu"]}, UnknownNameError, "near are: gpu-t4"),
        ({"problem": ["none.json"]}, ConfigurationError, r"cannot read the problem file none\.json"),
        ({"output": "table.md"}, ConfigurationError, "output was removed: MLflow shows"),
        ({"seeds": 0}, ConfigurationError, "seeds must be a whole number, at least 1, got 0"),
        ({"max_seconds_per_search": float("nan")}, ConfigurationError, "max_seconds_per_search"),
    ],
)
def test_a_wrong_parameter_is_reported_before_any_work(wrong, error, message):
    with pytest.raises(error, match=message):
        CompareParameters.of(wrong).check()


def test_a_damaged_problem_file_is_named_with_its_field(tmp_path, capsys):
    path = tmp_path / "damaged.json"
    path.write_text('{"schema_version": 1}')

    status = main("flows.compare_schedulers", CompareParameters, ["--problem", str(path)])

    assert status == 2
    assert capsys.readouterr().err == f"error: {path}: model: is missing\n"
