import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from heterps_core.data.features import FeatureSpec
from heterps_core.device_types import get_device_type
from heterps_core.machine import Machine, software_versions, this_machine
from heterps_core.profiling import profile_cache
from heterps_core.profiling.analytic_profile import estimate_profile
from heterps_core.profiling.layer_profile import LayerProfile
from heterps_core.profiling.measuring_process import ProfileRequest
from heterps_core.profiling.profile_cache import (
    _counts_still,
    _profile_name,
    keep_profile,
    kept_profile,
    profile_model,
)
from tests.heterps_core.profiling.builders import GRAPH, keep_replica_path, make_profile

MACHINE = Machine(processor="a processor", num_cores=2, memory_bytes=1)
REQUEST = ProfileRequest(
    model="small", features=FeatureSpec(num_dense=1, slot_rows=(2,)), batch_size=100, num_threads=1
)


def make_key(request=REQUEST, graph=GRAPH, machine=MACHINE, device_type="local-cpu", software=None):
    return _profile_name(
        request,
        graph,
        device_type=device_type,
        hardware_fingerprint=machine.fingerprint(),
        software=software or software_versions(),
    )


def test_a_kept_profile_is_read_by_later_runs(tmp_path):
    path = tmp_path / "profiles" / make_key()

    before = kept_profile(path, LayerProfile)
    keep_profile(path, make_profile())

    assert (before, kept_profile(path, LayerProfile)) == (None, make_profile())
    assert [each.suffix for each in path.parent.iterdir()] == [".json"]


def test_a_model_whose_profile_is_kept_is_not_measured_but_estimated_for_other_types(tmp_path):
    # A model of this name is nowhere: measuring it would fail.
    kept = replace(make_profile(), measured_at=datetime.now(UTC).isoformat())
    keep_profile(tmp_path / make_key(machine=this_machine()), kept)
    path = keep_replica_path(tmp_path)

    found = profile_model(REQUEST, GRAPH, ["local-cpu", "gpu-t4", "gpu-t4"], cache_directory=tmp_path)

    assert list(found) == ["local-cpu", "gpu-t4"]
    assert found["local-cpu"] == replace(kept, measured_replica_path=path)
    assert found["gpu-t4"] == estimate_profile(GRAPH, found["local-cpu"], get_device_type("gpu-t4"))
    assert found["gpu-t4"].replica_path == path


@pytest.mark.parametrize(
    ("age", "relative_error", "load", "counts"),
    [
        (timedelta(days=6), 0.1, 0.0, True),
        (timedelta(days=8), 0.1, 0.0, False),
        (timedelta(hours=1), 0.4, 99.0, True),
        (timedelta(hours=1), 0.4, 0.0, False),
    ],
    ids=["fresh", "old", "missed-and-busy", "missed-and-idle"],
)
def test_a_kept_replica_path_counts_until_it_is_old_or_one_of_a_busy_machine_can_be_measured_again(
    tmp_path, monkeypatch, age, relative_error, load, counts
):
    now = datetime.now(UTC)
    kept = keep_replica_path(tmp_path, measured_at=(now - age).isoformat(), relative_error=relative_error)
    again = replace(kept, message_seconds=1.0)
    monkeypatch.setattr(profile_cache, "measure_replica_path", lambda: again)
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    keep_profile(
        tmp_path / make_key(machine=this_machine()), replace(make_profile(), measured_at=now.isoformat())
    )

    found = profile_model(REQUEST, GRAPH, [], cache_directory=tmp_path)["local-cpu"]

    assert found.replica_path == (kept if counts else again)


@pytest.mark.parametrize(
    ("age", "clock_over_processor", "load", "counts"),
    [
        (timedelta(days=6), 1.0, 9.0, True),
        (timedelta(days=8), 1.0, 9.0, False),
        (timedelta(hours=1), 4.0, 9.0, True),
        (timedelta(hours=1), 4.0, 0.0, False),
    ],
    ids=["fresh", "old", "busy-then-and-now", "busy-then-and-idle-now"],
)
def test_a_kept_profile_counts_until_it_is_old_or_a_busy_machine_is_idle(
    monkeypatch, age, clock_over_processor, load, counts
):
    now = datetime(2026, 11, 26, tzinfo=UTC)
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    kept = replace(
        make_profile(), measured_at=(now - age).isoformat(), clock_over_processor=clock_over_processor
    )

    assert _counts_still(kept, now) is counts


@pytest.mark.parametrize(
    "other",
    [
        make_key(graph=replace(GRAPH, layers=GRAPH.layers[:1])),
        make_key(machine=replace(MACHINE, processor="another one")),
        make_key(machine=replace(MACHINE, num_cores=4)),
        make_key(device_type="gpu-t4"),
        make_key(request=replace(REQUEST, batch_size=200)),
        make_key(request=replace(REQUEST, num_threads=2)),
        make_key(request=replace(REQUEST, dense_optimizer="sgd")),
        make_key(request=replace(REQUEST, precision="bfloat16")),
        make_key(request=replace(REQUEST, dataset="clicks", dataset_fingerprint="f1")),
        make_key(software={**software_versions(), "torch": "9.9"}),
    ],
)
def test_whatever_changes_the_speed_is_measured_anew(tmp_path, other):
    keep_profile(tmp_path / make_key(), make_profile())

    assert kept_profile(tmp_path / make_key(), LayerProfile) is not None
    assert kept_profile(tmp_path / other, LayerProfile) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 0}', '{"schema_version": 1}', "\x00"])
def test_a_file_that_cannot_be_used_is_reported_and_replaced(tmp_path, caplog, content):
    path = tmp_path / make_key()
    path.write_text(content)

    with caplog.at_level(logging.WARNING):
        assert kept_profile(path, LayerProfile) is None
    keep_profile(path, make_profile())

    assert kept_profile(path, LayerProfile) == make_profile()
    assert "counts as missing" in caplog.text


def test_a_cache_that_cannot_be_written_does_not_stop_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")

    keep_profile(tmp_path / "file" / make_key(), make_profile())

    assert kept_profile(tmp_path / "file" / make_key(), LayerProfile) is None
    assert "is not kept" in caplog.text
