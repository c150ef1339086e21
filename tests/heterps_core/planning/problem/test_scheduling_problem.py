import json
from copy import deepcopy
from dataclasses import replace

import pytest

from heterps_core.errors import ConfigurationError, MalformedDocumentError
from heterps_core.planning.problem.scheduling_problem import SchedulingProblem
from tests.builders import make_problem
from tests.paths import TESTS

PROBLEMS = TESTS / "golden" / "problems"


@pytest.fixture
def document() -> dict:
    return make_problem(0, num_layers=3, num_types=2).to_json()


def test_json_form_is_kept_on_a_round_trip():
    document = json.loads((PROBLEMS / "sixteen_layers.json").read_text())

    assert SchedulingProblem.from_json(document).to_json() == document


def test_limits_follow_from_the_fields():
    problem = replace(
        make_problem(0, num_layers=3, num_types=2, floor_samples_per_s=8192.0),
        num_epochs=3,
        num_samples=40960,
    )

    assert problem.stage_seconds_limit == 0.5
    assert problem.num_steps == 30
    assert replace(problem, throughput_floor_samples_per_s=0).stage_seconds_limit == float("inf")


def test_fields_that_are_not_known_are_ignored(document):
    document["comment"] = "made by hand"
    document["layers"][0]["flops"] = 3

    assert SchedulingProblem.from_json(document).num_layers == 3


MISSING = object()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 2, "must be 1, got 2"),
        ("schema_version", True, "must be 1, got True"),
        ("model", MISSING, "is missing"),
        ("model", "", "must be a text"),
        ("batch_size", 0, "must lie in 1.."),
        ("batch_size", 12.5, "must be a whole number"),
        ("profile_batch_size", "512", "must be a number, got '512'"),
        ("num_samples", -1, "must not be negative"),
        ("num_samples", 0, "must be positive"),
        ("num_epochs", True, "must be a number, got True"),
        ("num_epochs", None, "must be a number, got None"),
        ("throughput_floor_samples_per_s", float("nan"), "must be a finite number"),
        ("throughput_floor_samples_per_s", float("inf"), "must be a finite number"),
        ("throughput_floor_samples_per_s", 10**400, "must be at most 1e"),
        ("single_replica_communicates", 0, "must be true or false, got 0"),
        ("layers", [], "1 to 1000 layers, got 0"),
        ("layers", {}, "must be a list"),
        ("layers[1]", 7, "must be a JSON object, got 7"),
        ("layers[1].name", 7, "must be a text"),
        ("layers[1].is_sharded", 1, "must be true or false"),
        ("layers[2].state_bytes", -5, "must not be negative"),
        ("layers[2].output_bytes_per_sample", MISSING, "is missing"),
        ("layers[0].compute_seconds", [1, 2], "must be a JSON object"),
        ("layers[0].compute_seconds.cpu", MISSING, "is missing"),
        ("layers[0].compute_seconds.cpu", -0.1, "must not be negative"),
        ("layers[0].compute_seconds.cpu", 1e-300, "at least 1e-18"),
        ("layers[0].communication_seconds.tpu", 0.1, "'tpu' is not a device type"),
        ("device_types", {}, "1 to 512 device types"),
        ("device_types.cpu", [], "must be a JSON object"),
        ("device_types.cpu.price_usd_per_hour", MISSING, "is missing"),
        ("device_types.cpu.price_usd_per_hour", -0.01, "must not be negative"),
        ("device_types.cpu.max_units", 0, "must lie in 1.."),
        ("device_types.cpu.memory_bytes", 0, "must be positive"),
        ("device_types.cpu.reserved_bytes", -1, "must not be negative"),
        ("device_types.cpu.bandwidth_bytes_per_s", 0, "must be positive"),
        ("device_types.cpu.compute_parallel_fraction", 1.01, r"must lie in \[0, 1\]"),
        ("device_types.cpu.communication_parallel_fraction", -0.01, r"must lie in \[0, 1\]"),
    ],
)
def test_names_the_field_and_what_is_wrong_with_it(document, path, value, message):
    parts = path.replace("[", ".").replace("]", "").split(".")
    place = document
    for part in parts[:-1]:
        place = place[int(part) if isinstance(place, list) else part]
    last = int(parts[-1]) if isinstance(place, list) else parts[-1]
    if value is MISSING:
        del place[last]
    else:
        place[last] = value

    with pytest.raises(MalformedDocumentError, match=message) as raised:
        SchedulingProblem.from_json(document)

    assert raised.value.field == path


def test_ten_thousand_layers_are_too_many(document):
    document["layers"] = [deepcopy(document["layers"][0])] * 10_000

    with pytest.raises(MalformedDocumentError, match="1 to 1000 layers, got 10000"):
        SchedulingProblem.from_json(document)


def test_a_chain_that_takes_no_time_has_no_throughput(document):
    for layer in document["layers"]:
        layer["compute_seconds"]["cpu"] = 0

    with pytest.raises(MalformedDocumentError, match="positive compute_seconds on every device type"):
        SchedulingProblem.from_json(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON: .* line 1"),
        ("", "is not valid JSON"),
        ("[1, 2]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('{"model": 1, "model": 2}', "model: stands twice"),
        ("[" * 100_000, "nested too deeply"),
        ("1" * 10_000, "cannot be read"),
        ("\xff", "must be UTF-8"),
    ],
)
def test_files_that_are_no_problem_are_refused(tmp_path, text, message):
    path = tmp_path / "problem.json"
    path.write_bytes(text.encode("latin-1"))

    with pytest.raises(MalformedDocumentError, match=message):
        SchedulingProblem.load(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot read the problem file .*missing\.json"):
        SchedulingProblem.load(tmp_path / "missing.json")


def test_whether_a_single_replica_communicates_is_said_in_the_file_only_where_it_does_not(document):
    assert "single_replica_communicates" not in SchedulingProblem.from_json(document).to_json()

    document["single_replica_communicates"] = False
    problem = SchedulingProblem.from_json(document)

    assert problem.to_json()["single_replica_communicates"] is False
    assert SchedulingProblem.from_json(problem.to_json()) == problem
