import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.planning.simulate.dry_run import predict_dry_run
from heterps_core.plans.scheduling_plan import Stage
from tests.heterps_core.profiling.builders import GRAPH, make_profile


def predict(*replicas, num_microbatches=4, num_cores=64, batch_size=400):
    """Predict both layers in one stage, or one stage each."""
    if len(replicas) == 1:
        stages = [Stage(0, 1, "cpu-c5", replicas[0])]
    else:
        stages = [Stage(0, 0, "cpu-c5", replicas[0]), Stage(1, 1, "gpu-t4", replicas[1])]
    return predict_dry_run(
        GRAPH,
        make_profile(),
        stages,
        batch_size=batch_size,
        num_microbatches=num_microbatches,
        num_cores=num_cores,
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


def test_a_worker_computes_and_communicates_one_after_the_other():
    prediction = predict(2)

    stage = prediction.evaluation.stages[0]
    assert prediction.step_seconds == pytest.approx(stage.compute_seconds + stage.communication_seconds)
    assert prediction.evaluation.throughput_samples_per_s == pytest.approx(400 / stage.compute_seconds)


def test_in_stage_communication_is_exact_for_the_replicas_that_there_are():
    prediction = predict(2)

    # Half of 3000 bytes, of which half lies with the other, in each of four micro-batches, and four messages a step
    # of 2 ms between busy workers; a ring of two moves the 1000 bytes of gradients in one more.
    expected = 4 * 750 / 10_000 + 4 * 0.002 + 1_000 / 10_000 + 0.002
    assert prediction.evaluation.stages[0].communication_seconds == pytest.approx(expected)


def test_each_stage_scales_by_its_own_layers():
    first, second = predict(2, 2).evaluation.stages

    assert first.compute_seconds == pytest.approx(4 * 0.52)
    assert second.compute_seconds == pytest.approx(4 * 1.5 + 0.4)


def test_a_boundary_is_shared_by_the_replicas_of_its_stage():
    first, second = predict(2, 1).evaluation.stages

    # 2 * 400 samples * 60 bytes at 10,000/s are 4.8 s.
    assert second.communication_seconds == pytest.approx(4.8)
    assert first.communication_seconds == pytest.approx(4.8 / 2 + 4 * 750 / 10_000 + 4 * 0.002 + 0.002)


@pytest.mark.parametrize("num_microbatches", [1, 4, 100])
def test_a_pipeline_fills_and_drains_in_every_step(num_microbatches):
    prediction = predict(1, 1, num_microbatches=num_microbatches)

    # Each stage spends 4.8 s at the boundary. The first takes 9.6 ms a sample and 40 ms a micro-batch, as 50 samples
    # take 0.52 s and 100 one second; the second 30 ms a sample, and 0.4 s for its update.
    first, second = 4.8 + 400 * 0.0096 + num_microbatches * 0.04, 4.8 + 400 * 0.03 + 0.4
    expected = (first + second + (num_microbatches - 1) * second) / num_microbatches
    assert prediction.step_seconds == pytest.approx(expected)
    assert prediction.evaluation.throughput_samples_per_s == pytest.approx(400 / 12.4)


def test_workers_that_share_a_core_take_the_sum_of_their_work():
    # Two replicas of 0.52 s for the embedding and two of 1.5 s, four times, and two updates of 0.4 s.
    assert predict(2, num_cores=1).step_seconds == pytest.approx(2 * (4 * 2.02 + 0.4))


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
