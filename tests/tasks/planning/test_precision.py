"""bfloat16 is planned by itself only for models that were shown to learn as well in it, and where it pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterps_core.data.features import FeatureSpec
from heterps_core.models import CTR_MODELS, sized_model
from heterps_core.profiling.measuring_process import ProfileRequest
from heterps_core.profiling.profile_cache import with_estimates
from heterps_core.training.job import AUTO, PRECISIONS
from tasks.planning.precision import (
    LEARN_AS_WELL_IN_BFLOAT16,
    cheapest_precision,
    in_float32_without_units,
    precisions_of,
)
from tasks.profiling import ProfiledModel
from tests.heterps_core.profiling.builders import GRAPH, make_profile
from tests.paths import PROJECT

FEATURES = FeatureSpec(num_dense=1, slot_rows=(10,))


def profiled_as(precision: str) -> ProfiledModel:
    measured = replace(make_profile(), precision=precision)
    return ProfiledModel(
        graph=GRAPH,
        local_profile=measured,
        planned_graph=GRAPH,
        profiles=with_estimates(GRAPH, measured, ["cpu-c7i", "gpu-t4"]),
        planned_request=ProfileRequest(model="lr", features=FEATURES, batch_size=100, precision=precision),
    )


def test_a_precision_that_is_asked_for_is_the_only_one():
    assert [precisions_of(name, "ctrdnn") for name in PRECISIONS] == [(name,) for name in PRECISIONS]


@pytest.mark.parametrize(
    ("model", "precisions"),
    [
        ("ctrdnn", ("float32", "bfloat16")),
        ("nce", ("float32",)),
        (sized_model("ctrdnn", hidden_widths=[8]), ("float32",)),
        ("package.module:function", ("float32",)),
    ],
)
def test_a_choice_is_left_for_models_that_were_shown_to_learn_as_well(model, precisions):
    assert precisions_of(AUTO, model) == precisions


def test_the_models_are_those_of_the_table_of_evidence():
    text = (PROJECT / "docs" / "QUALITY.md").read_text(encoding="utf-8")
    rows = text.partition("## bfloat16 and float32")[2].partition("\n## ")[0].splitlines()

    shown = {row.split("`")[1] for row in rows if row.startswith("| `")}
    assert shown == LEARN_AS_WELL_IN_BFLOAT16
    assert shown <= set(CTR_MODELS)


def test_hardware_without_units_keeps_its_times_in_float32():
    whole, rounded = (profiled_as(precision) for precision in PRECISIONS)

    found = in_float32_without_units(rounded, whole).profiles

    assert found["gpu-t4"] is whole.profiles["gpu-t4"]
    assert found["cpu-c7i"] is rounded.profiles["cpu-c7i"]
    assert found["local-cpu"] is rounded.profiles["local-cpu"]


@pytest.mark.parametrize(
    ("bfloat16_usd", "taken"), [(0.90, "bfloat16"), (0.96, "float32"), (1.20, "float32")]
)
def test_bfloat16_is_taken_where_it_saves_more_than_measurements_differ(bfloat16_usd, taken, caplog):
    with caplog.at_level("INFO"):
        assert cheapest_precision({"float32": 1.0, "bfloat16": bfloat16_usd}) == taken

    assert f"{taken}: the plan costs 1.00 USD in float32" in caplog.text


def test_nothing_is_said_of_a_single_precision(caplog):
    with caplog.at_level("INFO"):
        assert cheapest_precision({"bfloat16": 2.0}) == "bfloat16"

    assert not caplog.messages
