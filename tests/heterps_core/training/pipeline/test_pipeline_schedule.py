"""The 1F1B order, by its properties and by simulating all stages together."""

import itertools

import pytest

from heterps_core.training.pipeline.pipeline_schedule import one_forward_one_backward

SHAPES = list(itertools.product([1, 2, 3, 8], [1, 2, 3, 5], [1, 2, 4]))


def order(num_microbatches, num_stages, stage, warmup_per_stage):
    return list(
        one_forward_one_backward(
            num_microbatches=num_microbatches,
            num_stages=num_stages,
            stage=stage,
            warmup_per_stage=warmup_per_stage,
        )
    )


@pytest.mark.parametrize(("num_microbatches", "num_stages", "warmup_per_stage"), SHAPES)
def test_every_micro_batch_runs_once_each_way_and_few_are_alive(
    num_microbatches, num_stages, warmup_per_stage
):
    for stage in range(num_stages):
        alive, most_alive, done = set(), 0, []
        for direction, microbatch in order(num_microbatches, num_stages, stage, warmup_per_stage):
            if direction == "forward":
                alive.add(microbatch)
                most_alive = max(most_alive, len(alive))
            else:
                alive.remove(microbatch)
                done.append(microbatch)
        assert done == list(range(num_microbatches))
        assert most_alive == min(num_microbatches, warmup_per_stage * (num_stages - 1 - stage) + 1)


@pytest.mark.parametrize(("num_microbatches", "num_stages", "warmup_per_stage"), SHAPES)
def test_stages_never_wait_for_each_other_in_a_circle(num_microbatches, num_stages, warmup_per_stage):
    queues = [order(num_microbatches, num_stages, stage, warmup_per_stage) for stage in range(num_stages)]
    finished = set()

    def may_run(stage, direction, microbatch):
        if direction == "forward":
            return stage == 0 or (stage - 1, "forward", microbatch) in finished
        return stage == num_stages - 1 or (stage + 1, "backward", microbatch) in finished

    while any(queues):
        runnable = [stage for stage, queue in enumerate(queues) if queue and may_run(stage, *queue[0])]
        assert runnable, f"deadlock with {queues}"
        for stage in runnable:
            finished.add((stage, *queues[stage].pop(0)))
