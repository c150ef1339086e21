"""One real, small measurement by the command serves most tests here, because it takes seconds to load torch."""

import argparse
import contextlib
import io
import itertools
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from flows.commands.planning import profile as command
from heterps_core.data.dataset import PreparedDataset
from heterps_core.data.features import FeatureSpec
from heterps_core.data.preparation import prepare_dataset
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_stream import write_click_stream
from heterps_core.errors import ConfigurationError, HeterpsError
from heterps_core.machine import software_versions, this_machine
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling import measuring_process, profile_cache
from heterps_core.profiling.layer_profile import LayerProfile
from heterps_core.profiling.measurement import layer_profiler
from heterps_core.profiling.measurement.layer_profiler import trace_model
from heterps_core.profiling.measurement.profiling_input import (
    NUM_BATCHES,
    HeldBatches,
    _zipf_ids,
    click_batches,
    with_fewer_rows,
)
from heterps_core.profiling.measurement.timed_layers import training_config
from heterps_core.profiling.measuring_process import ProfileRequest, measure_in_fresh_process
from heterps_core.profiling.profile_cache import _profile_name, keep_profile, profile_model
from heterps_core.training.node import host_memory
from heterps_core.training.node.failures import OutOfMemoryError
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.pipeline.stage_runner import StageRunner
from tests.heterps_core.data.history.event_rows import draw_events, draw_rows, fat, write
from tests.heterps_core.data.synthetic_rows import all_rows
from tests.heterps_core.profiling.builders import keep_replica_path

pytestmark = pytest.mark.slow

BATCH_SIZE = 64
SMALL = ProfileRequest(
    model="ctrdnn", features=FeatureSpec(num_dense=3, slot_rows=(51, 40)), batch_size=BATCH_SIZE
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    stream = write_click_stream(folder / "clicks.tsv", num_rows=300, seed=1)
    return prepare_dataset(
        stream.path, schema=CRITEO_SCHEMA, buckets_per_slot=50, out_dir=folder / "prepared"
    )


@pytest.fixture(scope="module")
def request_for_dataset(dataset):
    return ProfileRequest(
        model="ctrdnn",
        features=dataset.features,
        batch_size=BATCH_SIZE,
        dataset=str(dataset.directory.resolve()),
        dataset_fingerprint=dataset.manifest.fingerprint,
    )


@pytest.fixture(scope="module")
def command_result(tmp_path_factory, request_for_dataset):
    """What the command printed, the document it wrote, and the number of threads before."""
    output = tmp_path_factory.mktemp("profiles") / "profiles.json"
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = parser.parse_args(f"--batch-size {BATCH_SIZE} --device-types gpu-t4 --output {output}".split())
    num_threads = torch.get_num_threads()
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "ProfileRequest", lambda **asked: request_for_dataset)
        # Measured in test_replica_path.py.
        law = keep_replica_path(output.parent)
        patch.setattr(profile_cache, "measure_replica_path", lambda: law)
        command.run(options)
    return printed.getvalue(), json.loads(output.read_text()), num_threads


@pytest.fixture(scope="module")
def measured(command_result):
    return LayerProfile.from_json(command_result[1]["profiles"]["local-cpu"])


def test_every_layer_of_the_chain_is_timed_in_order(measured, request_for_dataset):
    graph = trace_model(request_for_dataset)

    assert [timing.layer for timing in measured.timings] == [layer.name for layer in graph.layers]
    assert measured.graph_fingerprint == graph.fingerprint()
    for timing in (*measured.timings, *measured.half_batch_timings):
        assert timing.forward.median_ms > 0
        assert timing.backward.median_ms > 0
        assert timing.forward.low_ms <= timing.forward.median_ms <= timing.forward.high_ms
        assert not timing.is_estimated


def test_layers_with_parameters_are_updated_and_others_are_not(measured):
    updated = {timing.layer for timing in measured.timings if timing.update.median_ms > 0}

    assert updated == {"embedding", "fc1", "fc2", "fc3", "output"}


def test_the_layers_together_are_compared_with_a_whole_step(monkeypatch):
    """By a clock that moves on by a millisecond whenever it is read, each phase takes one; a step has two phases."""
    readings = itertools.count()
    monkeypatch.setattr(layer_profiler, "clock_of", lambda device: lambda: next(readings) / 1_000)
    num_threads = torch.get_num_threads()
    try:
        (profile,) = layer_profiler.measure([replace(SMALL, budget_s=0.1)])
    finally:
        torch.set_num_threads(num_threads)

    # Eight layers go forward and backward, and five of them have parameters to update.
    assert profile.sum_over_step == pytest.approx((8 * 2 + 5) / 2)
    for timings in (profile.timings, profile.half_batch_timings):
        assert sum(timing.compute_ms(update_share=1.0) for timing in timings) == pytest.approx(2.0)


def test_a_step_beside_another_worker_is_compared_with_one_alone(measured):
    assert 1 <= measured.crowding < 10


def test_reading_rows_of_a_data_set_is_measured_in_memory_and_not(measured):
    reading = measured.reading

    assert reading.batch_ms >= 0
    assert reading.row_ms >= 0
    assert reading.decoded_row_ms > 0


def test_exchanged_bytes_are_those_of_the_distinct_rows(measured, dataset):
    rows = np.resize(np.arange(dataset.num_train_rows), NUM_BATCHES * BATCH_SIZE)
    batches = np.split(all_rows(dataset).ids[rows], NUM_BATCHES)
    distinct = sum(len(np.unique(slot_ids)) for ids in batches for slot_ids in ids.T) / NUM_BATCHES

    # A row index of 8 bytes out, 16 floats in, 16 floats of gradient back.
    assert measured.timings[0].exchanged_bytes == pytest.approx(distinct * (8 + 2 * 16 * 4))


def test_the_number_of_threads_of_the_caller_is_left_alone(command_result, measured):
    assert torch.get_num_threads() == command_result[2]
    assert measured.num_threads == 1


def test_links_and_speeds_are_measured(measured):
    for link in (measured.exchange_link, measured.all_reduce_link, measured.boundary_link):
        assert link.latency_seconds > 0
        assert link.bandwidth_bytes_per_s > 0
    for boundary in (measured.network_boundary, measured.memory_boundary):
        assert 0 < boundary.microbatch_seconds < 0.1
        assert 0 <= boundary.byte_seconds < 1e-6
    assert measured.machine_speed.flops_per_s > measured.machine_speed.memory_bandwidth_bytes_per_s > 0
    assert measured.hardware_fingerprint == this_machine().fingerprint()


def test_the_command_shows_what_is_measured_and_what_is_estimated(command_result, measured):
    here, elsewhere = command_result[0].split("\n\nctrdnn on one unit of gpu-t4")

    assert here.count(" measured\n") == len(measured.timings)
    assert elsewhere.count(" estimated\n") == len(measured.timings)
    assert command_result[1]["profiles"]["gpu-t4"]["is_estimated"]


def test_a_kept_profile_is_not_measured_again(measured, request_for_dataset, tmp_path):
    graph = trace_model(request_for_dataset)
    name = _profile_name(
        request_for_dataset,
        graph,
        device_type="local-cpu",
        hardware_fingerprint=this_machine().fingerprint(),
        software=software_versions(),
    )
    keep_profile(tmp_path / name, measured)
    path = keep_replica_path(tmp_path)

    found = profile_model(request_for_dataset, graph, ["cpu-c5", "local-cpu"], cache_directory=tmp_path)

    assert list(found) == ["local-cpu", "cpu-c5"]
    assert found["local-cpu"] == replace(measured, measured_replica_path=path)
    assert found["cpu-c5"].is_estimated


def test_a_failed_measurement_ends_with_what_the_process_said():
    broken = replace(SMALL, model="no_such_package:build")

    with pytest.raises(HeterpsError, match=r"failed with exit status 1:\n(.|\n)*no_such_package"):
        measure_in_fresh_process(broken)


@pytest.mark.parametrize(("num_kills", "is_memory"), [((7, 8), True), ((7, 7), False)])
def test_a_measurement_that_the_kernel_kills_is_reported_from_another_death(
    tmp_path, monkeypatch, num_kills, is_memory
):
    (tmp_path / "ends_by_kill.py").write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.syspath_prepend(tmp_path)
    counts = iter(num_kills)
    monkeypatch.setattr(host_memory, "_num_memory_kills", lambda: next(counts))

    with pytest.raises(OutOfMemoryError if is_memory else HeterpsError) as failure:
        measuring_process._measured("ends_by_kill", [], what="profiling 'ctrdnn'", way_out="")

    expected = (
        "profiling 'ctrdnn' must fit into memory, but the kernel killed its process for lack of it"
        if is_memory
        else "failed with exit status -9"
    )
    assert expected in str(failure.value)


def test_refuses_a_batch_that_cannot_be_halved():
    with pytest.raises(ConfigurationError, match="at least 2 rows"):
        replace(SMALL, batch_size=1)


def test_batches_of_a_data_set_are_its_rows_from_the_first(request_for_dataset, dataset):
    reopened = PreparedDataset.open(dataset.directory)

    batches = click_batches(request_for_dataset, request_for_dataset.features)

    assert len(batches) == NUM_BATCHES
    np.testing.assert_array_equal(batches[1].ids, all_rows(reopened).ids[BATCH_SIZE : 2 * BATCH_SIZE])
    # 240 training rows, so the fourth batch begins again.
    np.testing.assert_array_equal(batches[3].ids[-1], all_rows(reopened).ids[4 * BATCH_SIZE - 240 - 1])


def test_rows_are_read_in_the_order_of_training_epoch_after_epoch(request_for_dataset, dataset):
    config = training_config(request_for_dataset, num_rows=BATCH_SIZE)
    model = build_stage_model("ctrdnn", dataset.features, config, [Stage(0, 7, "local-cpu", 1)])
    held = HeldBatches(request_for_dataset, dataset.features, config, model, StageRunner(model, config))

    num_batches = dataset.num_batches(BATCH_SIZE)
    cursors = itertools.islice(held.cursors(), 2 * num_batches)
    read = torch.cat([each.batch.ids for cursor in cursors for each in held.training_batch(cursor)])

    wanted = [
        dataset.batch(dataset.batch_rows(epoch, index, batch_size=BATCH_SIZE, seed=config.seed)).ids
        for epoch in range(2)
        for index in range(num_batches)
    ]
    assert torch.equal(read, torch.cat(wanted))


def test_made_up_row_numbers_follow_zipfs_law():
    ids = _zipf_ids(SMALL.features, 200_000, np.random.default_rng(1))

    shares = np.sort(np.bincount(ids[:, 0], minlength=51))[::-1][:50] / len(ids)
    # Rank r is drawn where 51 ** u lies in [r, r + 1), with u uniform.
    ranks = np.arange(1, 51)
    np.testing.assert_allclose(shares, np.log((ranks + 1) / ranks) / np.log(51), atol=0.004)
    assert ids.min(axis=0).tolist() == [1, 1]
    assert ids.max(axis=0).tolist() == [50, 39]


@pytest.mark.weekly
def test_a_model_is_measured_in_bfloat16_with_other_optimizers():
    (profile,) = measure_in_fresh_process(
        replace(SMALL, precision="bfloat16", dense_optimizer="sgd", embedding_optimizer="sgd", budget_s=0.1)
    )

    assert all(timing.forward.median_ms > 0 for timing in profile.timings)


@pytest.mark.weekly
def test_a_table_larger_than_memory_is_measured_by_a_smaller_one(request_for_dataset):
    """Tables of 300 MB where 280 MB more than torch takes are allowed; the rows of the data set wrap around."""
    program = """
import json, resource, sys
from dataclasses import replace
from heterps_core.profiling.measurement import layer_profiler
from heterps_core.profiling.measurement.layer_profiler import measure, trace_model
from heterps_core.profiling.measurement.timed_layers import training_config
from heterps_core.profiling.measuring_process import ProfileRequest

asked = ProfileRequest.from_json(json.loads(sys.stdin.read()))
measure([asked])
layer_profiler.PROFILED_TABLE_BYTES = 64 * 2**20
rows = int(300e6 / 68 / len(asked.features.slot_rows))
large = replace(asked, features=replace(asked.features, slot_rows=(rows,) * len(asked.features.slot_rows)))
held = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (held + 280_000_000, held + 280_000_000))
(profile,) = measure([large])
assert profile.graph_fingerprint == trace_model(large).fingerprint()
print(profile.timings[0].forward.median_ms)
"""
    finished = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(replace(request_for_dataset, budget_s=0.2).to_json()),
        capture_output=True,
        text=True,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr[-2_000:]
    assert float(finished.stdout) > 0


def test_row_indices_wrap_around_and_missing_values_stay(request_for_dataset):
    fewer = with_fewer_rows(request_for_dataset.features, 7)

    whole = click_batches(request_for_dataset, request_for_dataset.features)[0].ids
    wrapped = click_batches(request_for_dataset, fewer)[0].ids

    assert set(fewer.slot_rows) == {7}
    assert wrapped.max() <= 6
    assert torch.equal(wrapped <= 0, whole <= 0)
    assert torch.equal(wrapped[whole > 0], 1 + (whole[whole > 0] - 1) % 6)


def test_layers_of_sequences_are_timed_though_each_batch_has_another_width(tmp_path):
    rows, schema = fat(draw_rows(600, seed=1), draw_events(900, seed=1))
    dataset = prepare_dataset(write(rows, tmp_path / "rows.parquet"), schema=schema, out_dir=tmp_path / "out")
    asked = replace(SMALL, model="din(embedding_dim=4)", features=dataset.features, budget_s=0.1)

    (profile,) = measure_in_fresh_process(replace(asked, dataset=str(tmp_path / "out")))

    assert all(timing.backward.median_ms > 0 for timing in profile.timings)
