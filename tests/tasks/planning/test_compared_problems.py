import pytest

from heterps_core.errors import ConfigurationError, InfeasiblePlanError, UnknownNameError
from tasks.planning.compared_problems import check_compared_model, load_problems, reason_in_one_line


def test_reasons_are_one_line_without_the_way_out():
    missed_floor = InfeasiblePlanError("throughput floor", "10 samples/s, 99% below; raise max_units")

    assert reason_in_one_line(missed_floor) == "no plan meets the throughput floor: 10 samples/s, 99% below"
    assert reason_in_one_line(ValueError("a\nb")) == "failed: ValueError: a b"


@pytest.mark.parametrize("model", ["ctrdnn", "vgg-16", "tests.builders:build"])
def test_models_of_clicks_of_images_and_of_users_can_be_compared(model):
    check_compared_model(model)


def test_an_unknown_model_is_answered_with_all_that_are_known():
    with pytest.raises(UnknownNameError, match=r"2emb.*alexnet.*vgg-16"):
        check_compared_model("resnet")


def test_a_problem_file_that_cannot_be_used_is_named(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text("{}")

    with pytest.raises(ConfigurationError, match=r"problem\.json: schema_version: is missing"):
        load_problems([str(path)])
    with pytest.raises(ConfigurationError, match=r"cannot read .*none\.json"):
        load_problems([str(tmp_path / "none.json")])
