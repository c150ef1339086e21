import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from heterps_core import cli
from heterps_core.cli import main

PROBLEMS = Path(__file__).parents[1] / "golden" / "problems"
FIVE_LAYERS = str(PROBLEMS / "five_layers_1.json")

PLAN_FIELDS = {
    "schema_version",
    "scheduler",
    "seed",
    "stages",
    "throughput_samples_per_s",
    "price_usd_per_hour",
    "cost_usd",
    "cost_lower_bound_usd",
    "optimality_gap",
    "num_evaluations",
    "search_seconds",
}


def test_writes_the_contracts_fields_and_prints_a_table(tmp_path, capsys):
    output = tmp_path / "plan.json"

    status = main(["plan", FIVE_LAYERS, "--scheduler", "exact", "--seed", "5", "--output", str(output)])

    plan = json.loads(output.read_text())
    assert status == 0
    assert set(plan) >= PLAN_FIELDS
    assert (plan["scheduler"], plan["seed"], plan["optimality_gap"]) == ("exact", 5, 0)
    assert plan["stages"][1] == {
        "first_layer": 2,
        "last_layer": 4,
        "device_type": "gpu_b",
        "num_replicas": 2,
    }
    printed = capsys.readouterr().out
    assert "1.561005 USD" in printed
    assert "0 (proven optimal)" in printed
    assert "<- slowest" in printed


def test_the_budget_reaches_the_search(tmp_path):
    output = tmp_path / "plan.json"

    main(
        ["plan", FIVE_LAYERS, "--scheduler", "bayesian", "--budget-evaluations", "9", "--output", str(output)]
    )

    assert json.loads(output.read_text())["num_evaluations"] == 9


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([str(PROBLEMS / "infeasible.json"), "--scheduler", "exact"], 3, "534101 samples/s, 99.9% below"),
        ([FIVE_LAYERS, "--scheduler", "exakt"], 2, "Did you mean 'exact'?"),
        ([str(PROBLEMS / "none.json"), "--scheduler", "exact"], 2, "cannot read the problem file"),
        ([str(PROBLEMS), "--scheduler", "exact"], 2, "cannot read the problem file"),
        ([str(PROBLEMS / "expected.json"), "--scheduler", "exact"], 2, "schema_version: is missing"),
        ([FIVE_LAYERS, "--scheduler", "exact", "--output", "/none/plan.json"], 2, "cannot write"),
        ([FIVE_LAYERS, "--scheduler", "exact", "--seed", "-1"], 2, "--seed must not be negative"),
        ([FIVE_LAYERS, "--scheduler", "exact", "--budget-evaluations", "0"], 2, "at least 1 evaluation"),
        (
            [FIVE_LAYERS, "--scheduler", "brute-force", "--budget-evaluations", "9"],
            2,
            "3^5 = 243 assignments",
        ),
    ],
)
def test_errors_are_one_line_and_a_status(capsys, arguments, status, message):
    assert main(["plan", *arguments]) == status

    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("heterps: error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_malformed_field_is_named(tmp_path, capsys):
    document = json.loads(Path(FIVE_LAYERS).read_text())
    document["layers"][3]["compute_seconds"]["cpu"] = float("nan")
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(document))

    assert main(["plan", str(path), "--scheduler", "exact"]) == 2
    assert "layers[3].compute_seconds.cpu: must be a finite number, got nan" in capsys.readouterr().err


def test_an_interrupt_ends_with_the_shells_status(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run_plan", interrupted)

    assert main(["plan", FIVE_LAYERS, "--scheduler", "exact"]) == 130
    assert capsys.readouterr().err == "heterps: interrupted\n"


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"]])
def test_help_is_given(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 0
    assert "heterps plan" in capsys.readouterr().out or arguments == ["--help"]


def test_exact_starts_without_torch_and_optuna():
    code = (
        "import sys\n"
        "from heterps_core.cli import main\n"
        "status = main(['plan', sys.argv[1], '--scheduler', 'exact'])\n"
        "print(status, sorted({'torch', 'optuna', 'scipy'} & set(sys.modules)))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, FIVE_LAYERS], capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines()[-1] == "0 []"


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m heterps_core.cli plan {FIVE_LAYERS} --scheduler exact | true"

    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")


ODD_VALUES = [
    None,
    True,
    -1,
    0,
    1,
    0.5,
    1e-18,
    1e18,
    1e300,
    float("nan"),
    float("inf"),
    10**400,
    "",
    "x",
    [],
    {},
]


def damage(document, random):
    """Replace, remove or double one node of a JSON document at random."""
    places = []

    def collect(node):
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                collect(node[key])

    collect(document)
    node, key = places[random.integers(len(places))]
    action = random.integers(8)
    if action == 0:
        del node[key]
    elif action == 1 and isinstance(node, list):
        node.append(node[key])
    else:
        node[key] = ODD_VALUES[random.integers(len(ODD_VALUES))]


@pytest.mark.parametrize("name", ["five_layers_2", "tight_caps_6"])
def test_damaged_files_end_with_a_status_of_the_contract(tmp_path, capsys, name):
    random = np.random.default_rng(0)
    path = tmp_path / "problem.json"
    statuses = []
    for _ in range(400):
        document = json.loads((PROBLEMS / f"{name}.json").read_text())
        for _ in range(random.integers(1, 4)):
            damage(document, random)
        path.write_text(json.dumps(document))
        statuses.append(main(["plan", str(path), "--scheduler", "exact"]))

    assert set(statuses) <= {0, 2, 3}
    # The damage is neither always fatal nor always harmless.
    assert statuses.count(2) > 100
    assert statuses.count(0) > 20
