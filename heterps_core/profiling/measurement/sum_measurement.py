"""Processor time of a replica for the sum of a batch's dense gradients, measured with the trainer's own sum.

Two processes each train a small and a large model, and sum their gradients before the updates: layers and updates
take the caches meanwhile.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from heterps_core.compute_device import CPU, one_torch_thread
from heterps_core.data.features import FeatureSpec
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.profiling.layer_profile import SumCost
from heterps_core.profiling.measurement.profiling_input import plain_batch
from heterps_core.training.gradients.gradient_sum import GradientSum
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.transport.rank_layout import START_LIMIT_S, RankLayout
from heterps_core.transport.shared_memory_link import SharedMemoryLink
from heterps_core.units import BYTES_PER_FLOAT32

_SMALL_WIDTHS, _LARGE_WIDTHS = (8,), (400, 400, 400)
"""Hidden layers; the second are CTR-DNN's."""

_NUM_ROWS, _NUM_SUMS, _LEARNING_RATE = 256, 16, 1e-6
_FEATURES = FeatureSpec(num_dense=400, slot_rows=(16,))


def measure_sum(rank: int, *, shares_memory: bool) -> SumCost:
    """Return the cost of a sum of the two processes of the world, which both call this.

    Gradients lie in the memory of this machine, where it can be shared, or cross sockets.
    """
    layout, group = RankLayout(((0, 1),)), dist.group.WORLD
    assert group is not None
    link = None
    if shares_memory:
        link = SharedMemoryLink.connect(group, layout=layout, silence_limit_s=START_LIMIT_S)
    place = StagePlace(layout=layout, replica=rank, group=group, sum_group=group, link=link)
    with one_torch_thread():
        (small_s, few), (large_s, many) = (
            _sum_seconds(place, each) for each in (_SMALL_WIDTHS, _LARGE_WIDTHS)
        )
    if link is not None:
        link.close()
    byte_seconds = max(large_s - small_s, 0.0) / (many - few)
    return SumCost(peer_seconds=max(small_s - few * byte_seconds, 0.0), byte_seconds=byte_seconds)


def _sum_seconds(place: StagePlace, hidden_widths: tuple[int, ...]) -> tuple[float, int]:
    """Return the processor time of a sum, the mean of both processes, and the bytes of the gradients."""
    config = TrainingConfig(batch_size=_NUM_ROWS, num_microbatches=1, num_epochs=1, seed=0)
    name = f"ctrdnn(hidden_widths={'-'.join(map(str, hidden_widths))}, embedding_dim=1)"
    whole = Stage(0, 2 * len(hidden_widths) + 1, "whole", 1)
    model = build_stage_model(name, _FEATURES, config, [whole])
    parameters = [each for layer in model.layers.values() for each in layer.parameters()]
    runner, gradient_sum = StageRunner(model, config), GradientSum(parameters, place)
    batch = plain_batch(_FEATURES, num_rows=_NUM_ROWS)
    loss, seconds = torch.zeros(()), []
    for _ in range(_NUM_SUMS):
        for _ in runner.train_step([MicroBatch(_NUM_ROWS, batch)]):
            started_s = time.process_time()
            gradient_sum.begin([each.grad for each in parameters], [loss]).finish()
            seconds.append(time.process_time() - started_s)
        model.update_dense(_LEARNING_RATE)
        model.update_rows(_LEARNING_RATE)
    mean_s = torch.tensor(statistics.median(seconds), dtype=torch.float64, device=CPU)
    dist.all_reduce(mean_s)
    return mean_s.item() / 2, BYTES_PER_FLOAT32 * sum(each.numel() for each in parameters)
