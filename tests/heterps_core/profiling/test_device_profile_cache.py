from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from heterps_core.data.features import FeatureSpec
from heterps_core.device_types import DEVICE_TYPES
from heterps_core.errors import ConfigurationError
from heterps_core.machine import software_versions
from heterps_core.models.model_graph import ModelGraph
from heterps_core.profiling import device_profile
from heterps_core.profiling.analytic_profile import estimate_profile
from heterps_core.profiling.device_profile import DeviceProfile, DeviceProfileCache
from heterps_core.profiling.measuring_process import ProfileRequest
from tests.heterps_core.profiling.builders import (
    BATCH_SIZE,
    DENSE,
    EMBEDDING,
    GRAPH,
    make_profile,
    make_timing,
)

REQUEST = ProfileRequest(
    model="small", features=FeatureSpec(num_dense=1, slot_rows=(2,)), batch_size=BATCH_SIZE
)
MEASURED_AT = datetime(2026, 11, 21, tzinfo=UTC)
SOON = MEASURED_AT + timedelta(days=29)


def measured(*, is_dry_run=False, **changes):
    profile = replace(
        make_profile(),
        software=software_versions(),
        measured_at=MEASURED_AT.isoformat(),
        hardware="c7i.2xlarge: a processor, 4 cores",
    )
    return DeviceProfile(
        device_type="cpu-c7i",
        instance_type="c7i.2xlarge",
        is_dry_run=is_dry_run,
        profile=replace(profile, **changes),
        cost_usd=0.01,
    )


@pytest.fixture
def cache(tmp_path):
    kept = DeviceProfileCache(tmp_path)
    kept.keep(REQUEST, GRAPH, measured())
    return kept


def find(cache, request=REQUEST, graph=GRAPH, *, device_type="cpu-c7i", now=SOON):
    return cache.find(request, graph, device_type=device_type, now=now)


def test_a_measurement_is_found_for_the_hardware_in_any_market(cache):
    assert find(cache) == find(cache, device_type="cpu-c7i-spot") == measured()
    assert str(find(cache)) == "measured on c7i.2xlarge 2026-11-21"


def test_it_counts_for_thirty_days(cache):
    assert find(cache, now=MEASURED_AT + timedelta(days=30, seconds=-1)) is not None
    assert find(cache, now=MEASURED_AT + timedelta(days=30)) is None


@pytest.mark.parametrize(
    "other",
    [
        {"request": replace(REQUEST, batch_size=2 * BATCH_SIZE)},
        {"request": replace(REQUEST, dense_optimizer="sgd")},
        {"graph": ModelGraph(name="small", layers=(EMBEDDING, replace(DENSE, output_bytes_per_sample=8)))},
        {"device_type": "cpu-r6in"},
    ],
)
def test_what_changes_the_speed_does_not_match(cache, other):
    assert find(cache, **other) is None


def test_other_tables_and_other_data_match(cache):
    larger = ModelGraph(name="small", layers=(replace(EMBEDDING, parameter_bytes=10**9), DENSE))

    assert find(cache, replace(REQUEST, dataset="clicks", dataset_fingerprint="f1"), larger) == measured()


@pytest.mark.parametrize(
    ("installed", "is_found"), [("2.13.0", True), ("2.13.0+cpu", True), ("2.14.0", False)]
)
def test_another_torch_does_not_match(tmp_path, monkeypatch, installed, is_found):
    cache = DeviceProfileCache(tmp_path)
    cache.keep(REQUEST, GRAPH, measured(software={**software_versions(), "torch": "2.13.0+cu130"}))
    monkeypatch.setattr(
        device_profile, "software_versions", lambda: {**software_versions(), "torch": installed}
    )

    assert (find(cache) is not None) == is_found


def test_a_dry_run_is_never_kept(tmp_path):
    cache = DeviceProfileCache(tmp_path)

    with pytest.raises(
        ConfigurationError, match="must be measured on such a machine, but this was measured in a dry run"
    ):
        cache.keep(REQUEST, GRAPH, measured(is_dry_run=True))

    assert find(cache) is None
    assert not measured(is_dry_run=True).is_valid(SOON)


def test_what_was_not_asked_for_is_not_kept(tmp_path):
    with pytest.raises(ConfigurationError, match="measured 'small' with 100"):
        DeviceProfileCache(tmp_path).keep(replace(REQUEST, batch_size=200), GRAPH, measured())


def test_a_charge_is_remembered(cache):
    cache.keep(REQUEST, GRAPH, replace(find(cache), charged_to="r7"))

    assert find(cache) == replace(measured(), charged_to="r7")


def test_times_are_measured_and_what_one_machine_cannot_tell_is_estimated():
    estimate = estimate_profile(GRAPH, make_profile(), DEVICE_TYPES["cpu-c7i"])
    fast = (make_timing(EMBEDDING, 3.0, 2.0, 5.0, exchanged_bytes=9.0), make_timing(DENSE, 10.0, 20.0, 4.0))

    planned = measured(timings=fast).in_place_of(estimate)

    assert [timing.forward.median_ms for timing in planned.timings] == [3.0, 10.0]
    # Of the data, as measured here; the machine drew its row indices.
    assert planned.timings[0].exchanged_bytes == 3_000.0
    assert not planned.is_estimated
    assert (planned.device_type, planned.hardware) == ("cpu-c7i", "c7i.2xlarge: a processor, 4 cores")
    assert planned.boundary_link == estimate.boundary_link
    assert planned.graph_fingerprint == GRAPH.fingerprint()
