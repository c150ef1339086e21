"""How much memory the workers of a plan need on their machines, before any of them starts."""

from __future__ import annotations

from collections.abc import Sequence

from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import get_row_optimizer
from heterps_core.models.chain import build_chain
from heterps_core.models.model_graph import Layer, host_bytes_of_worker
from heterps_core.models.tracing import trace_chain
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.gradients.optimizers import get_dense_optimizer
from heterps_core.training.job import DELAYED, TrainingConfig
from heterps_core.training.pipeline.stage_device import is_gpu


def worker_bytes(
    model: str,
    features: FeatureSpec,
    config: TrainingConfig,
    stages: Sequence[Stage],
    *,
    num_train_rows: int,
    is_dry_run: bool,
) -> tuple[int, ...]:
    """Return the bytes of host memory that one worker of each stage needs.

    A worker holds its shard of each table with the optimizer's state; all dense parameters of its stage with theirs
    and their gradients, and with delayed updates two copies and gradients on their way; and row groups. On a rented
    card all but the last lie in the card's memory.

    Args:
        model: Registry name or import path.
        num_train_rows: Whose row groups a worker holds, up to a bound.
        is_dry_run: All stages run on this machine's cores.
    """
    graph = trace_chain(
        model,
        build_chain(model, features, seed=config.seed),
        dense_optimizer_values_per_parameter=get_dense_optimizer(
            config.dense_optimizer
        ).state_values_per_parameter,
        row_optimizer=get_row_optimizer(config.embedding_optimizer),
    )
    needs = []
    for stage in stages:
        state_bytes = sum(
            _bytes_of(layer, num_replicas=stage.num_replicas, delays_updates=config.update_mode == DELAYED)
            for layer in graph.layers[stage.first_layer : stage.last_layer + 1]
        )
        is_on_card = is_gpu(stage.device_type) and not is_dry_run
        needs.append(round(host_bytes_of_worker(num_train_rows)) + (0 if is_on_card else state_bytes))
    return tuple(needs)


def _bytes_of(layer: Layer, *, num_replicas: int, delays_updates: bool) -> int:
    if layer.is_sharded:
        return -(-layer.state_bytes // num_replicas)
    return layer.state_bytes + layer.parameter_bytes * (4 if delays_updates else 1)
