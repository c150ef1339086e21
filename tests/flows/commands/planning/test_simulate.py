import json
import shutil

import pytest

from flows.cli import main
from flows.commands.planning import simulate as command
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.planning.simulate.pipeline_load import pipeline_load
from heterps_core.planning.simulate.pipeline_simulation import simulate
from heterps_core.plans.scheduling_plan import SchedulingPlan
from tests.flows.new_process import check_starts_light
from tests.heterps_core.plan_files import (
    BATCH_SIZE,
    help_examples,
    layer_document,
    plan_document,
    problem_document,
    write_files,
)
from tests.paths import TESTS

PROBLEMS = TESTS / "golden" / "problems"


def simulated(folder, problem, plan, *arguments):
    """Run the command and return what it wrote."""
    output = folder / "simulation.json"
    assert main(["simulate", *write_files(folder, problem, plan), *arguments, "--output", str(output)]) == 0
    return json.loads(output.read_text())


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 16])
def test_two_equal_stages_lose_the_bubble_exactly(tmp_path, num_microbatches):
    m = num_microbatches

    found = simulated(tmp_path, problem_document(), plan_document(), "--micro-batches", str(m))

    # (S - 1) / (m + S - 1) of the time is lost: a step of 1 s takes (m + 1) / m.
    assert found["planned"]["throughput_samples_per_s"] == BATCH_SIZE
    assert found["simulated"]["throughput_samples_per_s"] == pytest.approx(BATCH_SIZE * m / (m + 1))
    assert found["simulated"]["step_seconds"] == pytest.approx((m + 1) / m)
    assert found["stages"][0]["waiting_for_data"] == pytest.approx(1 / (m + 1))
    # An hour of two units at 1 USD, longer by the bubble.
    assert found["planned"]["cost_usd"] == pytest.approx(2.0)
    assert found["simulated"]["cost_usd"] == pytest.approx(2.0 * (m + 1) / m)


def test_people_read_speed_cost_and_what_limits_the_plan(tmp_path, capsys):
    files = write_files(tmp_path, problem_document(throughput_floor_samples_per_s=4000.0), plan_document())

    assert main(["simulate", *files]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 20
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert rows["planned"] == ["planned", "4,096.0", "1,000.000", "1.000", "2.000000"]
    assert rows["simulated"] == ["simulated", "3,276.8", "-20.0", "%", "1,250.000", "1.250", "2.500000"]
    assert rows["0"] == ["0", "0..0", "cpu", "1", "80.0", "%", "20.0", "%", "0.0", "%", "0.0", "%"]
    text = " ".join(" ".join(lines).split())
    assert "simulated: steps of 4,096 rows in 4 micro-batches of 1,024 rows" in text
    assert "floor 4,000.0 samples/s: missed by 18.1 % in simulation" in text
    assert "2.0000 USD/hour; compute grows with the hours" in text


def test_the_figures_are_those_of_the_simulation(tmp_path):
    plan_path = tmp_path / "plan.json"
    problem_path = PROBLEMS / "five_layers_1.json"
    main(["plan", str(problem_path), "--scheduler", "exact", "--explain", "none", "--output", str(plan_path)])
    output = tmp_path / "simulation.json"
    arguments = [str(problem_path), str(plan_path), "--micro-batches", "7", "--output", str(output)]

    assert main(["simulate", *arguments]) == 0

    load = pipeline_load(
        SchedulingProblem.load(problem_path),
        SchedulingPlan.from_json(json.loads(plan_path.read_text())).stages,
        num_microbatches=7,
    )
    run = simulate(load)
    found = json.loads(output.read_text())
    assert found["simulated"]["step_seconds"] == run.step_seconds
    for stage, use in zip(found["stages"], run.stages, strict=True):
        assert (stage["computing"], stage["waiting_for_link"]) == (use.computing, use.waiting_for_link)


def test_the_share_of_links_is_reported_apart_from_computing(tmp_path):
    layers = [
        layer_document("embedding", is_sharded=True, communication_seconds=1.0),
        layer_document("tower"),
    ]

    alone = simulated(tmp_path, problem_document(), plan_document((0, 1, "cpu", 1)))
    linked = simulated(tmp_path, problem_document(layers=layers), plan_document((0, 1, "cpu", 1)))

    assert (alone["num_microbatches"], alone["stages"][0]["computing"]) == (1, pytest.approx(1.0))
    assert alone["simulated"]["step_seconds"] == pytest.approx(2.0)
    # A pull of 1 s on the lane in, 2 s of computing, a push of 1 s on the lane out.
    assert linked["stages"][0]["waiting_for_link"] == pytest.approx(0.5)


def test_a_plan_that_was_made_for_other_times_is_reported(tmp_path, capsys):
    files = write_files(tmp_path, problem_document(), plan_document(throughput_samples_per_s=9999.0))

    assert main(["simulate", *files]) == 0

    assert "the plan file promises 9,999.0 samples/s" in capsys.readouterr().out


def test_costs_that_do_not_grow_are_named(tmp_path, capsys):
    extra_costs = {"startup_seconds": 360.0, "storage_usd_per_hour": 0.5}

    found = simulated(tmp_path, problem_document(extra_costs=extra_costs), plan_document())

    # 2.5 USD/hour for the run and a tenth of an hour of start-up.
    assert found["planned"]["cost_usd"] == pytest.approx(2.5 * 1.1)
    assert found["simulated"]["cost_usd"] == pytest.approx(2.5 * 1.35)
    assert "compute, storage grow with the hours; start-up and teardown does not" in capsys.readouterr().out


def test_the_examples_of_the_help_work(tmp_path, monkeypatch):
    shutil.copy(PROBLEMS / "five_layers_1.json", tmp_path / "problem.json")
    monkeypatch.chdir(tmp_path)

    examples = help_examples(command.__doc__)

    assert len(examples) == 3
    for arguments in examples:
        assert main(arguments) == 0, arguments


def test_starts_without_torch_and_optuna(tmp_path):
    check_starts_light("simulate", *write_files(tmp_path, problem_document(), plan_document()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--micro-batches", "0"], "must be cut into 1 to 4096 micro-batches, got 0"),
        (["--micro-batches", "4097"], "must be cut into 1 to 4096 micro-batches, got 4097"),
        (["--output", "/none/simulation.json"], "cannot write"),
    ],
)
def test_errors_are_one_line_and_status_2(tmp_path, capsys, arguments, message):
    assert main(["simulate", *write_files(tmp_path, problem_document(), plan_document()), *arguments]) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("heterps: error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
