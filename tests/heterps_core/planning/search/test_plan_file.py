import json

import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.planning.search.plan_file import load_problem_and_plan
from heterps_core.plans.scheduling_plan import Stage
from tests.heterps_core.plan_files import plan_document, problem_document, write_files


def load(folder, problem, plan):
    write_files(folder, problem, plan)
    return load_problem_and_plan(folder / "problem.json", folder / "plan.json")


def test_reads_both_with_fields_that_are_not_known(tmp_path):
    problem, plan = load(tmp_path, problem_document(), plan_document(explanation={"detail": "full"}))

    assert problem.model == "tiny"
    assert plan.stages == (Stage(0, 0, "cpu", 1), Stage(1, 1, "gpu", 1))


def test_a_plan_below_the_floor_fits(tmp_path):
    _, plan = load(tmp_path, problem_document(throughput_floor_samples_per_s=1e6), plan_document())

    assert plan.throughput_samples_per_s == 4096


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([], "plan.json: plan: must be a JSON object"),
        ({"schema_version": 1}, "plan.json: scheduler: is missing"),
        (plan_document(schema_version=2), "plan.json: schema_version: must be 1, got 2"),
        (plan_document(scheduler=7), "scheduler: must be a text"),
        (plan_document(throughput_samples_per_s=0), "throughput_samples_per_s: must be positive"),
        (plan_document(stages={}), "stages: must be a list, got {}"),
        (plan_document(stages=[]), "a plan needs at least one stage"),
        (
            plan_document(
                stages=[
                    {
                        "first_layer": 0,
                        "last_layer": 1,
                        "device_type": "cpu",
                        "num_replicas": 2,
                        "shares": [3, 1],
                    }
                ]
            ),
            "stages[0].shares: are measured in training; leave them out",
        ),
        (plan_document(stages=[7]), "stages[0]: must be a JSON object, got 7"),
        (plan_document(stages=[{}]), "stages[0].first_layer: is missing"),
        (plan_document((0, 1, "tpu", 1)), "stages[0].device_type: must be one of the problem's, cpu, gpu"),
        (plan_document((0, 1, ["cpu"], 1)), "stages[0].device_type: must be a text, got ['cpu']"),
        (plan_document((0, 2, "cpu", 1)), "stages[0].last_layer: must be a whole number in 0..1, got 2"),
        (plan_document((0.0, 1, "cpu", 1)), "stages[0].first_layer: must be a whole number"),
        (plan_document((0, 1, "cpu", True)), "stages[0].num_replicas: must be a whole number, got True"),
        (plan_document((0, 1, "cpu", 10**9)), "stages[0].num_replicas: must be a whole number in 1..4"),
        (plan_document((1, 0, "cpu", 1)), "must have 0 <= first_layer <= last_layer"),
        (plan_document((0, 0, "cpu", 1)), "does not fit"),
        (plan_document((1, 1, "cpu", 1)), "without gap"),
        (plan_document((0, 0, "cpu", 1), (1, 1, "cpu", 1)), "neighbouring stages must differ in device type"),
    ],
)
def test_a_plan_that_cannot_be_used_is_reported_with_its_file(tmp_path, plan, message):
    with pytest.raises(ConfigurationError) as raised:
        load(tmp_path, problem_document(), plan)

    assert message in str(raised.value)
    assert str(tmp_path / "plan.json") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_field_that_is_missing_is_named(tmp_path):
    plan = plan_document()
    del plan["seed"]

    with pytest.raises(ConfigurationError, match=r"plan\.json: seed: is missing"):
        load(tmp_path, problem_document(), plan)


def test_a_plan_that_lacks_memory_or_units_does_not_fit(tmp_path):
    layers = [layer | {"state_bytes": 2e9} for layer in problem_document()["layers"]]
    with pytest.raises(ConfigurationError, match=r"does not fit .*: memory of layers .* plan again"):
        load(tmp_path, problem_document(layers=layers), plan_document())

    layers = [layer | {"is_sharded": False} for layer in problem_document()["layers"]] * 2
    stages = [(0, 0, "cpu", 3), (1, 2, "gpu", 1), (3, 3, "cpu", 3)]
    with pytest.raises(ConfigurationError, match="units cap of cpu: 6 units against a limit of 4"):
        load(tmp_path, problem_document(layers=layers), plan_document(*stages))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": 1, "a": 2}', "\udcff"])
def test_a_plan_that_is_no_json_is_named_once(tmp_path, text):
    write_files(tmp_path, problem_document(), {})
    (tmp_path / "plan.json").write_bytes(text.encode(errors="surrogateescape"))

    with pytest.raises(ConfigurationError) as raised:
        load_problem_and_plan(tmp_path / "problem.json", tmp_path / "plan.json")

    assert str(raised.value).count("plan.json") == 1


def test_a_problem_that_cannot_be_used_is_reported_with_its_file(tmp_path):
    write_files(tmp_path, problem_document(batch_size=0), plan_document())

    with pytest.raises(ConfigurationError, match=r"problem\.json: batch_size: must"):
        load_problem_and_plan(tmp_path / "problem.json", tmp_path / "plan.json")

    (tmp_path / "problem.json").write_text(json.dumps([]))
    with pytest.raises(ConfigurationError, match=r"problem\.json: problem: must be a JSON object"):
        load_problem_and_plan(tmp_path / "problem.json", tmp_path / "plan.json")
