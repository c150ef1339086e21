"""From a real profile to a plan by two commands, and what the first says when it cannot."""

import json

import pytest

from flows.cli import main
from heterps_core.errors import ConfigurationError
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from heterps_core.profiling.import_command import parse_device
from heterps_core.profiling.profiles.layer_profile import LayerProfile
from tests.paths import TESTS

ALEXNET = TESTS / "golden" / "pipedream" / "alexnet.graph.txt"
IMPORT = ["import-profile", str(ALEXNET), "--format", "pipedream"]
DEVICES = ["--device", "gpu-v100=3.06:16", "--device", "gpu-t4=0.526:32"]


def test_a_profile_that_nobody_here_measured_is_planned(tmp_path, capsys):
    path = tmp_path / "problem.json"

    options = ["--batch-size", "1024", "--throughput-floor", "2500", "--output", str(path)]
    assert main([*IMPORT, *DEVICES, *options]) == 0
    shown = capsys.readouterr().out
    assert main(["plan", str(path), "--scheduler", "exact"]) == 0
    planned = capsys.readouterr().out

    assert (
        "alexnet: 21 layers, 256 samples, 0.733 GB of state; alexnet.graph.txt (PipeDream graph file" in shown
    )
    # 87.3 ms for 256 samples, all but 2 ms of it in the file.
    assert shown.splitlines()[3].split()[:4] == ["gpu-v100", "measured", "87.302", "2,932.4"]
    assert shown.splitlines()[4].split()[:2] == ["gpu-t4", "estimated"]
    assert "heaviest     layer 0, node2 Conv2d: 32.9% of the time on gpu-v100" in shown
    assert "Plan for alexnet (21 layers) by exact" in planned
    assert "0 (proven optimal)" in planned


def test_the_problem_holds_measured_times_prices_and_where_they_come_from(tmp_path):
    path = tmp_path / "problem.json"
    main([*IMPORT, *DEVICES, "--num-samples", "5e6", "--num-epochs", "2", "--output", str(path)])

    problem = SchedulingProblem.load(path)
    provenance = json.loads(path.read_text())["provenance"]

    assert (problem.batch_size, problem.profile_batch_size) == (256, 256)
    assert (problem.num_samples, problem.num_epochs) == (5e6, 2)
    # Forward and backward as in the file, seven passes over 93,184 bytes at 900 GB/s, two launches.
    seconds = (22.316 + 6.405) / 1e3 + 7 * 93_184 / 900e9 + 2 * 5e-6
    assert problem.layers[0].compute_seconds["gpu-v100"] == pytest.approx(seconds)
    assert problem.layers[0].state_bytes == 3 * 93_184
    assert not any(layer.is_sharded for layer in problem.layers)
    unit = problem.device_types["gpu-v100"]
    assert (unit.price_usd_per_hour, unit.max_units, unit.memory_bytes) == (3.06, 16, 16 * 2**30)
    assert unit.bandwidth_bytes_per_s == 2.5e9 / 8
    times = {name: entry["times"] for name, entry in provenance["device_types"].items()}
    assert times == {"gpu-v100": "measured", "gpu-t4": "estimated"}


def test_profiles_are_written_in_this_projects_form(tmp_path):
    path = tmp_path / "profiles.json"

    assert main([*IMPORT, "--device", "gpu-v100", "--device", "cpu-c5", "--profiles", str(path)]) == 0

    profiles = json.loads(path.read_text())["profiles"]
    assert list(profiles) == ["gpu-v100", "cpu-c5"]
    assert not LayerProfile.from_json(profiles["gpu-v100"]).is_estimated
    assert LayerProfile.from_json(profiles["cpu-c5"]).is_estimated


@pytest.fixture
def sailor(tmp_path):
    folder = tmp_path / "GPT"
    folder.mkdir()
    batches = {str(size): {"2": {"0": [0.01 * size, 0.02 * size, 0.0]}} for size in (1, 2)}
    (folder / "RTX-3090.json").write_text(json.dumps(batches))
    layer = {"params_bytes": 100, "act_input_bytes": 8, "act_output_bytes": 40}
    sizes_path = tmp_path / "sizes.json"
    sizes_path.write_text(json.dumps({"GPT": {"1": {"0": layer}}}))
    return ["import-profile", str(folder), "--format", "sailor", "--layer-sizes", str(sizes_path)]


def test_a_unit_of_several_gpus_has_their_price_memory_and_bandwidth(sailor, tmp_path):
    path = tmp_path / "problem.json"

    status = main(
        [*sailor, "--tensor-parallel", "2", "--device", "RTX-3090=0.4:8:24:10", "--output", str(path)]
    )

    unit = SchedulingProblem.load(path).device_types["RTX-3090"]
    assert status == 0
    assert (unit.price_usd_per_hour, unit.max_units) == (0.8, 8)
    assert unit.memory_bytes == 2 * 24 * 2**30
    assert unit.bandwidth_bytes_per_s == 2 * 10e9 / 8


def test_a_device_is_read_with_what_is_published_about_it():
    plain, full = parse_device("gpu-t4"), parse_device("gpu-t4=0.5:3:8:1")

    assert (plain.price_usd_per_hour, plain.max_units, plain.memory_bytes) == (None, 64, 16 * 2**30)
    assert (full.price_usd_per_hour, full.max_units, full.memory_bytes) == (0.5, 3, 8 * 2**30)
    assert full.network_bytes_per_s == 1e9 / 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu-t4=cheap", r"must be NAME\[=USD_PER_HOUR"),
        ("gpu-t4=-1", "with positive numbers"),
        ("gpu-t4=nan", "with positive numbers"),
        ("gpu-t4=1:2:3", r"must be NAME\[=USD"),
        ("=1", r"must be NAME\[=USD"),
        ("gpu-t4=1:2.5", "MAX_UNITS of --device must be a whole number"),
        ("RTX-3090=1:2", "say them: --device RTX-3090=USD_PER_HOUR:MAX_UNITS:MEMORY_GIB:GBIT_PER_S"),
    ],
)
def test_a_device_that_cannot_be_read_is_told(text, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_device(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--format", "onnx", *DEVICES],
            "'onnx' is not a known profile format; known are: pipedream, sailor",
        ),
        (["--device", "gpu-t5=1:1:1:1"], "'gpu-t5' is not a known device type"),
        (["--measured-on", "gpu-v10", *DEVICES], "Did you mean 'gpu-v100'?"),
        ([], "--device must name at least one device type"),
        (["--device", "gpu-t4", "--device", "gpu-t4=1"], "each once, got: gpu-t4, gpu-t4"),
        (
            ["--device", "gpu-t4", "--output", "none.json"],
            "but gpu-t4 has none; say --device gpu-t4=USD_PER_HOUR",
        ),
        (
            [*DEVICES, "--output", "/none/problem.json"],
            "cannot write the planning problem to /none/problem.json",
        ),
        ([*DEVICES, "--profiles", "/none/profiles.json"], "cannot write"),
        ([*DEVICES, "--batch-size", "0", "--output", "none.json"], "batch_size must be at least 1, got 0"),
        (
            [*DEVICES, "--num-samples", "-3", "--output", "none.json"],
            "num_samples: must not be negative, got -3.0",
        ),
        ([*DEVICES, "--profile-batch-size", "64"], "that of the file, 256 by the activation of node"),
        (
            [*DEVICES, "--tensor-parallel", "2"],
            "--tensor-parallel and --layer-sizes belong to --format sailor",
        ),
        ([*DEVICES, "--tensor-parallel", "0"], "--tensor-parallel must be at least 1, got 0"),
        (["--format", "sailor", *DEVICES], "need the sizes of layers: --layer-sizes llm_info.json"),
    ],
)
def test_errors_are_one_line_and_a_status(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)

    assert main([*IMPORT, *arguments]) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("heterps: error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize("share", [0.3, 0.7, 0.9, 0.999])
def test_a_file_that_is_cut_off_ends_with_the_status_and_its_place(tmp_path, capsys, share):
    text = ALEXNET.read_text()
    path = tmp_path / "cut.graph.txt"
    path.write_text(text[: int(share * len(text))])

    assert main(["import-profile", str(path), "--format", "pipedream", *DEVICES]) == 2
    assert "cut off" in capsys.readouterr().err
