"""The form that Prefect draws: read from the schema that it makes of a flow, as its pages do."""

import pytest
from prefect.utilities.callables import parameter_schema

from flows.parameters import TrainParameters
from flows.train_ctr import train_ctr
from heterps_core.data.schema import CRITEO_SCHEMA, DataSchema
from heterps_core.errors import ConfigurationError
from heterps_core.judging.quality import WHERE_DIVERGED
from heterps_core.models.chain import build_chain
from heterps_core.planning.search.schedulers import SCHEDULERS
from infra.providers import PROVIDERS


@pytest.fixture(scope="module")
def form():
    return parameter_schema(train_ctr.fn).model_dump()


def part(field):
    """Return what a field may hold besides nothing."""
    return next((option for option in field.get("anyOf", []) if option.get("type") != "null"), field)


def test_every_field_is_described_and_none_must_be_filled_in(form):
    assert [name for name, field in form["properties"].items() if not field.get("description")] == []
    assert form["required"] == []


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("scheduler", set(SCHEDULERS)),
        ("provider", set(PROVIDERS)),
        ("start_from", {"champion", "scratch"}),
    ],
)
def test_names_are_chosen_from_a_list(form, name, choices):
    field = form["properties"][name]

    assert set(field["enum"]) == choices
    assert field["default"] in choices


def test_several_names_are_chosen_from_a_list(form):
    assert set(form["properties"]["markets"]["items"]["enum"]) == {"on-demand", "spot"}


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("epochs", {"minimum": 1}),
        ("batch_size", {"minimum": 4}),
        ("planned_samples", {"minimum": 1}),
        ("planned_rows_per_slot", {"minimum": 2}),
        ("seed", {"minimum": 0, "maximum": 4_294_967_295}),
        ("throughput_floor_samples_per_s", {"minimum": 0}),
        ("max_usd_per_run", {"exclusiveMinimum": 0}),
    ],
)
def test_numbers_have_their_bounds(form, name, bound):
    field = part(form["properties"][name])

    assert {key: field.get(key) for key in bound} == bound


@pytest.mark.parametrize(("given", "number"), [("1e9", 10**9), ("2.5E+3", 2_500), ("1000", 1_000)])
def test_many_samples_may_be_written_in_short(given, number):
    assert TrainParameters.of({"planned_samples": given}).planned_samples == number


@pytest.mark.parametrize("given", ["1e-3", "2.5e0", "1e", "many", 0])
def test_what_is_no_number_of_samples_is_refused(given):
    with pytest.raises(
        ConfigurationError, match="planned_samples must be a whole number of samples, at least 1"
    ):
        TrainParameters.of({"planned_samples": given})


def test_what_is_advised_where_a_training_diverges_can_be_given(form):
    for name in ("dense_learning_rate", "embedding_learning_rate", "batch_size", "start_from"):
        assert name in WHERE_DIVERGED
        assert name in form["properties"]
    assert "scratch" in form["properties"]["start_from"]["enum"]
    assert "count_columns" in WHERE_DIVERGED
    assert "count_columns" in DataSchema.__dataclass_fields__


def test_patterns_of_device_types_are_the_names_that_they_match():
    asked = TrainParameters.of({"device_types": ["gpu-l4*", "cpu-c7i"]})

    assert asked.device_types == ["gpu-l4", "gpu-l4-10gbit", "gpu-l40s", "gpu-l40s-20gbit", "cpu-c7i"]
    assert TrainParameters.of({}).device_types == []


def test_a_size_sets_all_parts_of_the_model_and_single_settings_win_over_it():
    small = TrainParameters(size="s")
    other = TrainParameters(size="s", embedding_dim=8, model_settings={"cross_rank": 16})

    assert small.sized_model == (
        "cross-deep(embedding_dim=4, hidden_widths=64-32, cross_layers=1, cross_rank=32)"
    )
    assert (
        other.sized_model == "cross-deep(embedding_dim=8, hidden_widths=64-32, cross_layers=1, cross_rank=16)"
    )
    assert TrainParameters().sized_model == "cross-deep"


def test_each_size_has_more_parameters_than_the_one_before():
    features = CRITEO_SCHEMA.features([16] * 26)
    chains = [build_chain(TrainParameters(size=size).sized_model, features, seed=0) for size in "sml"]

    counts = [sum(each.numel() for each in chain.parameters()) for chain in chains]

    assert sorted(counts) == counts
    assert len({*counts}) == 3
