import json
import time
from pathlib import Path

import numpy as np
import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import get_client

from flows.command_line import main, parser_for
from flows.compare_schedulers import command_line, compare_schedulers
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


def tables_of(markdown):
    """Read Markdown tables back: caption -> method -> column -> cell."""
    tables, caption, header = {}, "", []
    for line in markdown.splitlines():
        if line.startswith("**") and line.endswith("**"):
            caption, header = line.strip("*"), []
            tables[caption] = {}
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not header:
                header = cells
            elif set(cells) != {"---"}:
                tables[caption][cells[0]] = dict(zip(header, cells, strict=True))
    return tables


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.slow
def test_tables_and_record_say_what_the_searches_found(workspace, problem_files, tmp_path):
    output = tmp_path / "COMPARISON.md"

    run_id = compare_schedulers(
        problem=problem_files, methods=METHODS, seeds=2, budget_evaluations=BUDGET, output=str(output)
    )

    overview, gaps = tables_of(output.read_text()).values()
    for method in METHODS:
        missed = [problem_files[1]] * (method == "gpu-only")
        assert overview[method]["with a plan"] == ("2/4" if missed else "4/4")
        for file in problem_files:
            cell = gaps[method][f"{file} (3 layers)"]
            if file in missed:
                assert cell == "-"
                continue
            plan = (
                get_scheduler(method)
                .search(SchedulingProblem.load(Path(file)), budget_evaluations=BUDGET, seed=0)
                .plan
            )
            assert float(cell.strip("%")) == pytest.approx(100 * plan.optimality_gap, abs=0.06)
    assert output.read_text().count("9090.91 samples/s") == 1  # each reason once
    client = MlflowClient(workspace.tracking_uri)
    experiment = client.get_experiment_by_name("compare-schedulers")
    [run] = client.search_runs(
        [experiment.experiment_id], filter_string=f"tags.`heterps.run_id` = '{run_id}'"
    )
    assert (run.data.tags["heterps.kind"], run.info.status) == ("comparison", "FINISHED")
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {"comparison.md", "problems"}
    with get_client(sync_client=True) as prefect:
        # The server is that of all tests.
        published = [artifact.data for artifact in prefect.read_artifacts()]
    assert published.count(output.read_text()) == 1


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.weekly
def test_a_method_with_a_defect_and_one_without_end_are_rows(workspace, problem_files, tmp_path, monkeypatch):
    monkeypatch.setitem(SCHEDULERS, "broken", f"{__name__}:BrokenScheduler")
    monkeypatch.setitem(SCHEDULERS, "slow", f"{__name__}:SlowScheduler")
    monkeypatch.setitem(SCHEDULERS, "endless", f"{__name__}:EndlessScheduler")
    output = tmp_path / "COMPARISON.md"

    compare_schedulers(
        problem=problem_files[:1],
        methods=["broken", "slow", "endless", "cpu-only", "brute-force"],
        seeds=2,
        budget_evaluations=70,
        max_seconds_per_search=1.0,
        output=str(output),
    )

    text = output.read_text()
    overview, _ = tables_of(text).values()
    assert "- **broken**: failed: ZeroDivisionError: a defect\n" in text
    assert "- **slow**: rates 2 plans, as more take long\n" in text
    assert "- **endless**: 70 evaluations took more than 1 s\n" in text
    assert (overview["slow"]["plans rated"], overview["slow"]["with a plan"]) == ("2", "2/2")
    assert overview["endless"]["with a plan"] == overview["broken"]["with a plan"] == "0/2"
    assert overview["cpu-only"]["with a plan"] == "2/2"
    assert overview["brute-force"]["plans rated"] == "8"


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.slow
def test_models_are_planned_for_a_night_and_one_that_cannot_be_made_is_left_out(tmp_path):
    output = tmp_path / "COMPARISON.md"

    compare_schedulers(
        models=["nce", "json:no_such_function"],
        methods=["exact"],
        seeds=1,
        device_types=["cpu-c7i", "gpu-t4"],
        output=str(output),
    )

    text = output.read_text()
    tables = tables_of(text)
    for step in ("the papers' closed form", "the trainer's step"):
        assert tables[f"2 problems by {step}"]["exact"]["with a plan"] == "2/2"
        for conditions in ("no floor", "floor and caps"):
            assert tables[f"Median gap / worst gap by {step}, {conditions}"]["exact"]["nce (5 layers)"] != "-"
    assert list(tables["The cheapest plans found by each step model"]) == [
        *("nce, no floor", "nce, floor and caps")
    ]
    assert "times are estimated for cpu-c7i, gpu-t4, from" in text
    assert "- **json:no_such_function**: " in text


def test_problem_files_may_be_given_in_parts():
    parsed = parser_for(CompareParameters, program="compare").parse_args(
        ["--problem", "a.json", "--problem", "b.json", "c.json", "--device-types", "gpu-t4"]
    )

    assert parsed.problem == ["a.json", "b.json", "c.json"]
    assert parsed.device_types == ["gpu-t4"]


def test_the_command_makes_the_same_comparison_again():
    arguments = ["--problem", "a b.json", "--methods", "exact", "genetic", "--seeds", "2"]

    parsed = vars(parser_for(CompareParameters, program="compare").parse_args(arguments))

    assert command_line(
        CompareParameters.of(parsed)
    ) == f"python -m flows.compare_schedulers {' '.join(arguments)}".replace("a b.json", "'a b.json'")


def test_good_parameters_pass():
    CompareParameters(models=["ctrdnn"], device_types=["cpu-c7i"], seeds=3).check()


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"models": ["ctrdn"]}, UnknownNameError, "Did you mean 'ctrdnn'"),
        ({"methods": ["exakt"]}, UnknownNameError, "Did you mean 'exact'"),
        ({"device_types": ["tpu"]}, UnknownNameError, "cpu-c7i"),
        ({"problem": ["none.json"]}, ConfigurationError, r"cannot read the problem file none\.json"),
        ({"output": "/none/COMPARISON.md"}, ConfigurationError, "a folder that is there"),
        ({"seeds": 0}, ConfigurationError, "seeds must be a whole number, at least 1, got 0"),
        ({"max_seconds_per_search": float("nan")}, ConfigurationError, "max_seconds_per_search"),
    ],
)
def test_a_wrong_parameter_is_told_before_any_work(wrong, error, message):
    with pytest.raises(error, match=message):
        CompareParameters.of(wrong).check()


def test_a_damaged_problem_file_is_named_with_its_field(tmp_path, capsys):
    path = tmp_path / "damaged.json"
    path.write_text('{"schema_version": 1}')

    status = main("flows.compare_schedulers", CompareParameters, ["--problem", str(path)])

    assert status == 2
    assert capsys.readouterr().err == f"error: {path}: model: is missing\n"
