import logging
from dataclasses import replace

import pytest

from heterps_core.data.features import FeatureSpec
from heterps_core.device_types import get_device_type
from heterps_core.profiling.analytic_profile import estimate_profile
from heterps_core.profiling.layer_profile import LayerProfile
from heterps_core.profiling.machine import Machine, software_versions, this_machine
from heterps_core.profiling.measuring_process import ProfileRequest
from heterps_core.profiling.profile_cache import ProfileCache, _profile_name, profile_model
from tests.heterps_core.profiling.builders import GRAPH, make_profile

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


class Measurement:
    """Gives a profile and counts how often it was asked."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return make_profile()


def test_a_profile_is_measured_once_and_read_by_later_runs(tmp_path):
    measure = Measurement()

    first = ProfileCache(tmp_path / "profiles", LayerProfile).get_or_measure(make_key(), measure)
    second = ProfileCache(tmp_path / "profiles", LayerProfile).get_or_measure(make_key(), measure)

    assert (first, second, measure.count) == (make_profile(), make_profile(), 1)
    assert [path.suffix for path in (tmp_path / "profiles").iterdir()] == [".json"]


def test_a_model_whose_profile_is_kept_is_not_measured_but_estimated_for_other_types(tmp_path):
    # A model of this name is nowhere: measuring it would fail.
    key = make_key(machine=this_machine())
    kept = ProfileCache(tmp_path, LayerProfile).get_or_measure(key, make_profile)

    found = profile_model(REQUEST, GRAPH, ["local-cpu", "gpu-t4", "gpu-t4"], cache_directory=tmp_path)

    assert list(found) == ["local-cpu", "gpu-t4"]
    assert found["local-cpu"] == kept
    assert found["gpu-t4"] == estimate_profile(GRAPH, kept, get_device_type("gpu-t4"))


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
    cache, measure = ProfileCache(tmp_path, LayerProfile), Measurement()
    cache.get_or_measure(make_key(), measure)

    cache.get_or_measure(other, measure)

    assert measure.count == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema_version": 0}', '{"schema_version": 1}', "\x00"])
def test_a_file_that_cannot_be_used_is_reported_and_replaced(tmp_path, caplog, content):
    cache, measure = ProfileCache(tmp_path, LayerProfile), Measurement()
    (tmp_path / make_key()).write_text(content)

    with caplog.at_level(logging.WARNING):
        cache.get_or_measure(make_key(), measure)
    cache.get_or_measure(make_key(), measure)

    assert measure.count == 1
    assert "counts as missing" in caplog.text


def test_a_cache_that_cannot_be_written_does_not_stop_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")

    found = ProfileCache(tmp_path / "file", LayerProfile).get_or_measure(make_key(), Measurement())

    assert found == make_profile()
    assert "is not kept" in caplog.text
