import json
import shutil
from pathlib import Path

import pytest

from flows.cli import main
from flows.commands.planning.topology import HELP
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.plans.scheduling_plan import SchedulingPlan
from heterps_core.topology.rank_placement import place_ranks
from heterps_core.topology.rank_traffic import problem_traffic
from tests.flows.new_process import check_starts_light
from tests.heterps_core.plan_files import (
    BATCH_SIZE,
    help_examples,
    layer_document,
    plan_document,
    problem_document,
    write_files,
)
from tests.heterps_core.topology.builders import make_topology, save_topology, topology_to_json
from tests.paths import TESTS

PROBLEMS = TESTS / "golden" / "problems"

TWO_MACHINES = make_topology(
    [["cpu"], ["cpu", "gpu"]], inside_bytes_per_s=[1e9, 1e9], network_bytes_per_s=[1e6, 1e6]
)
"""Device ids: 0, NIC 1; 2, 3, NIC 4."""


@pytest.fixture
def files(tmp_path):
    """A plan of two stages that exchange 1000 bytes a sample, and two machines."""
    layers = [layer_document("embedding", output_bytes_per_sample=1000.0), layer_document("tower")]
    save_topology(TWO_MACHINES, tmp_path / "cluster.json")
    problem = problem_document(layers=layers)
    return [*write_files(tmp_path, problem, plan_document()), str(tmp_path / "cluster.json")]


def golden_files(folder):
    """Copy a problem with its optimal plan of 15 cores and 2 cards, and make a cluster with some more."""
    shutil.copy(PROBLEMS / "five_layers_1.json", folder / "problem.json")
    machines = [["cpu"] * 6, ["gpu_b"], ["cpu"] * 6, ["cpu"] * 6, ["gpu_b"] * 2]
    topology = make_topology(
        machines,
        inside_bytes_per_s=[6e9, 12e9, 6e9, 6e9, 12e9],
        network_bytes_per_s=[1e9, 3e9, 3e9, 1e9, 3e9],
    )
    save_topology(topology, folder / "cluster.json")
    return topology


def test_neighbours_are_put_on_one_machine(files, tmp_path, capsys):
    output = tmp_path / "placement.json"

    assert main(["place", *files, "--output", str(output)]) == 0

    placement = json.loads(output.read_text())
    assert [(rank["machine"], rank["global_id"]) for rank in placement["ranks"]] == [
        ("node1", 2),
        ("node1", 3),
    ]
    # 1000 bytes a sample each way; in plain order the core is the one behind the network.
    num_bytes = 2 * 1000 * BATCH_SIZE
    assert placement["seconds_per_step"] == pytest.approx(num_bytes / 1e9)
    assert placement["plain_order_seconds_per_step"] == pytest.approx(num_bytes / 1e6)
    assert capsys.readouterr().out.splitlines() == [
        "rank  stage  replica  machine  device  local id  global id",
        "   0      0        0  node1    cpu            0          2",
        "   1      1        0  node1    gpu            1          3",
        "",
        "traffic      0.008192 s per step, summed over all pairs of ranks",
        "plain order  8.192000 s per step, each rank on the first free device (+99900.0 %)",
    ]


def test_the_figures_are_those_of_the_placement(tmp_path):
    topology = golden_files(tmp_path)
    problem, plan, cluster, output = (
        tmp_path / f"{name}.json" for name in ("problem", "plan", "cluster", "placement")
    )
    main(["plan", str(problem), "--scheduler", "exact", "--explain", "none", "--output", str(plan)])

    assert main(["place", str(problem), str(plan), str(cluster), "--output", str(output)]) == 0

    traffic = problem_traffic(
        SchedulingProblem.load(problem),
        SchedulingPlan.from_json(json.loads(plan.read_text())).stages,
        num_microbatches=4,
    )
    expected = place_ranks(traffic, topology)
    found = json.loads(output.read_text())
    assert found["seconds_per_step"] == pytest.approx(expected.seconds_per_step)
    assert [rank["rank"] for rank in found["ranks"]] == list(range(17))
    assert [rank["global_id"] for rank in found["ranks"]] == [
        id_ for stage in expected.device_ids for id_ in stage
    ]
    assert found["plain_order_seconds_per_step"] >= found["seconds_per_step"]


def test_every_type_of_which_there_are_too_few_is_named(tmp_path, capsys):
    plan = plan_document((0, 0, "cpu", 4), (1, 1, "gpu", 3))
    paths = write_files(tmp_path, problem_document(), plan)
    save_topology(TWO_MACHINES, tmp_path / "cluster.json")

    assert main(["place", *paths, str(tmp_path / "cluster.json")]) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "the plan needs 4 of 'cpu', but there are 2; 3 of 'gpu', but there are 1" in printed.err


def test_devices_that_the_plan_does_not_name_are_shown(files, tmp_path, capsys):
    only_cores = make_topology([["cpu", "gpu-t4"]], inside_bytes_per_s=[1e9], network_bytes_per_s=[1e9])
    save_topology(only_cores, tmp_path / "cluster.json")

    assert main(["place", *files]) == 2

    err = capsys.readouterr().err
    assert "1 of 'gpu', but there are 0" in err
    assert "1 of 'cpu', 1 of 'gpu-t4'" in err


def without_links(document):
    document["machines"][1]["links"] = []


def with_a_damaged_field(document):
    document["machines"][1]["devices"][0]["local_id"] = -1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_links, "no way from device"),
        (
            with_a_damaged_field,
            "cluster.json: machines[1].devices[0].local_id: must be a whole number from 0",
        ),
        (lambda document: document.pop("machines"), "cluster.json: machines: is missing"),
    ],
)
def test_a_cluster_file_that_cannot_be_used_is_one_line_and_status_2(files, capsys, damage, message):
    document = topology_to_json(TWO_MACHINES)
    damage(document)
    Path(files[2]).write_text(json.dumps(document))

    assert main(["place", *files]) == 2

    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("index", "name", "message"),
    [
        (0, "none.json", "cannot read the problem file"),
        (1, "none.json", "cannot read the plan file"),
        (2, "none.json", "cannot read the cluster file"),
        (2, ".", "cannot read the cluster file"),
    ],
)
def test_a_file_that_is_not_there_is_named(files, tmp_path, capsys, index, name, message):
    files[index] = str(tmp_path / name)

    assert main(["place", *files]) == 2

    assert message in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_told(files, capsys):
    assert main(["place", *files, "--output", "/none/placement.json"]) == 2
    assert "cannot write /none/placement.json" in capsys.readouterr().err


def test_the_examples_of_the_help_work(tmp_path, monkeypatch):
    golden_files(tmp_path)
    monkeypatch.chdir(tmp_path)

    examples = help_examples(HELP)

    assert len(examples) == 3
    for arguments in examples:
        assert main(arguments) == 0, arguments


def test_starts_without_torch_and_optuna(files):
    check_starts_light("place", *files)
