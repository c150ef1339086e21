from dataclasses import replace

import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.planning.simulate.dry_run import predict_dry_run
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.layer_profile import RowReading
from heterps_core.profiling.replica_path import ReplicaPath
from tests.heterps_core.profiling.builders import GRAPH, make_profile

REPLICAS_S = 3 * 0.001 + (200 * 60 + 1_000) * 1e-6
"""Each of two replicas sends three messages, two of them of the table, and writes row indices, gradients of rows and
dense gradients."""


FREE = ReplicaPath(message_seconds=0.0, peer_seconds=0.0, byte_seconds=0.0, relative_error=0.0)


def predict(*replicas, num_microbatches=4, num_cores=64, batch_size=400, profile=None, **others):
    """Predict both layers in one stage, or one stage each."""
    if len(replicas) == 1:
        stages = [Stage(0, 1, "cpu-c5", replicas[0])]
    else:
        stages = [Stage(0, 0, "cpu-c5", replicas[0]), Stage(1, 1, "gpu-t4", replicas[1])]
    return predict_dry_run(
        GRAPH,
        profile or make_profile(),
        stages,
        batch_size=batch_size,
        num_microbatches=num_microbatches,
        num_cores=num_cores,
        **others,
    )


def test_one_worker_is_predicted_to_take_the_profiled_time():
    prediction = predict(1)

    # Four batches of 1 + 3 s and one dense update of 0.4 s; nothing to exchange.
    assert prediction.step_seconds == pytest.approx(16.4)
    assert prediction.evaluation.stages[0].communication_seconds == 0


def test_a_batch_that_is_not_cut_bears_the_time_of_one_micro_batch():
    # By hand: 400 samples of 9.6 and 30 ms, 40 ms once, and the update.
    assert predict(1, num_microbatches=1).step_seconds == pytest.approx(400 * 0.0396 + 0.04 + 0.4)


def test_two_replicas_take_the_time_of_half_a_batch():
    # 50 samples: 0.52 and 1.5 s, four times, and the update of 0.4 s.
    stage = predict(2).evaluation.stages[0]

    assert stage.compute_seconds == pytest.approx(4 * 2.02 + 0.4)


def test_replicas_of_two_device_types_are_all_processes_of_this_machine():
    mixed = [Stage(0, 1, "cpu-c5", 2, "cpu-c7i", 1)]

    found = predict_dry_run(GRAPH, make_profile(), mixed, batch_size=400, num_microbatches=4, num_cores=64)

    assert found.step_seconds == predict(2).step_seconds


def test_a_worker_that_waits_for_its_updates_computes_and_communicates_one_after_the_other():
    prediction = predict(2)

    stage = prediction.evaluation.stages[0]
    assert prediction.step_seconds == pytest.approx(stage.compute_seconds + stage.communication_seconds)


def test_replicas_on_one_machine_spend_processor_time_on_messages_and_shared_bytes():
    evaluation = predict(2).evaluation

    assert evaluation.stages[0].exchange_seconds == pytest.approx(REPLICAS_S)
    assert evaluation.stages[0].communication_seconds == pytest.approx(REPLICAS_S)


def test_nine_replicas_exchange_rows_by_messages_as_measured():
    path = ReplicaPath(
        message_seconds=0.01, peer_seconds=0.002, table_seconds=0.03, byte_seconds=1e-6, relative_error=0.1
    )
    by_messages = replace(make_profile(), measured_replica_path=path)
    alone, measured = (
        predict(9, batch_size=900, profile=profile).evaluation.stages[0]
        for profile in (replace(by_messages, measured_replica_path=FREE), by_messages)
    )

    # Two messages and the request of 900 rows, each to eight peers; one table; the bytes of the profile's batch.
    requests = 900 / 4096
    expected = 0.01 * (2 + requests / 9) + 0.002 * (2 * 8 + requests) + 0.03
    expected += 1e-6 * by_messages.timings[0].exchanged_bytes
    assert measured.exchange_seconds - alone.exchange_seconds == pytest.approx(expected)
    assert predict(8, batch_size=800, profile=by_messages) == predict(8, batch_size=800)


def test_the_stage_of_the_embedding_and_the_last_stage_read_rows():
    profile = replace(make_profile(), reading=RowReading(batch_ms=5.0, row_ms=0.1))

    for replicas in ((2,), (2, 1)):
        with_reading, without = (
            predict(*replicas, profile=each).evaluation.stages for each in (profile, None)
        )
        added = [
            one.compute_seconds - other.compute_seconds
            for one, other in zip(with_reading, without, strict=True)
        ]
        assert added == pytest.approx([0.005 + 0.0001 * 400 / count for count in replicas])


def test_workers_beside_others_compute_as_much_slower_as_the_profile_says():
    profile = replace(make_profile(), crowding=1.5)

    assert predict(1, profile=profile).step_seconds == predict(1).step_seconds
    alone, beside = (predict(2, profile=each).evaluation.stages[0] for each in (None, profile))
    assert beside.compute_seconds == pytest.approx(1.5 * alone.compute_seconds)


def test_each_stage_scales_by_its_own_layers():
    first, second = predict(2, 2).evaluation.stages

    # Beside the boundary's 2 ms for each of four micro-batches, and 1 microsecond for each of 200 * 60 bytes there
    # and back.
    boundary = 4 * 0.002 + 2 * 200 * 60 * 1e-6
    assert first.compute_seconds == pytest.approx(4 * 0.52 + boundary)
    assert second.compute_seconds == pytest.approx(4 * 1.5 + 0.4 + boundary)


def test_the_bytes_of_a_boundary_are_shared_by_the_replicas_of_its_stage():
    both, one = predict(2, 1).evaluation.stages[1], predict(2, 2).evaluation.stages[1]

    # 400 samples of 60 bytes there and back for one worker, half of them for each of two; 50 samples of 30 ms saved
    # in each of four micro-batches.
    assert both.compute_seconds - one.compute_seconds == pytest.approx(2 * 200 * 60 * 1e-6 + 4 * 50 * 0.03)
    assert both.communication_seconds == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("num_microbatches", [1, 4, 100])
def test_a_pipeline_is_no_faster_than_its_slowest_stage_nor_slower_than_all_of_them(num_microbatches):
    drained = predict(1, 1, num_microbatches=num_microbatches)
    delayed = predict(1, 1, num_microbatches=num_microbatches, drains=False)

    first, second = (part.compute_seconds for part in drained.evaluation.stages)
    assert second * (1 - 1e-9) <= drained.step_seconds <= first + second
    assert delayed.step_seconds == pytest.approx(max(first, second), rel=1e-3 if num_microbatches >= 4 else 1)


def test_workers_that_share_a_core_take_the_sum_of_their_work():
    # Two replicas of 0.52 s for the embedding and two of 1.5 s, four times, two updates of 0.4 s, and the exchange.
    assert predict(2, num_cores=1).step_seconds == pytest.approx(2 * (4 * 2.02 + 0.4 + REPLICAS_S))


def test_refuses_stages_that_leave_layers_out():
    with pytest.raises(ConfigurationError, match="end at 0"):
        predict_dry_run(
            GRAPH,
            make_profile(),
            [Stage(0, 0, "cpu-c5", 1)],
            batch_size=100,
            num_microbatches=1,
            num_cores=1,
        )


def test_refuses_a_machine_without_cores():
    with pytest.raises(ConfigurationError, match="num_cores must be at least 1, got 0"):
        predict(1, num_cores=0)
