"""How much memory the workers of a plan need on their machines, before any of them starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import get_row_optimizer
from heterps_core.errors import ConfigurationError
from heterps_core.hardware import is_gpu
from heterps_core.models.chain import build_chain
from heterps_core.models.model_graph import WORKER_BYTES, Layer, host_bytes_of_worker
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.models.tracing import trace_chain
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.checkpoint_writer import COPIED_BYTES, PIECE_BYTES
from heterps_core.training.gradients.optimizers import get_dense_optimizer
from heterps_core.training.job import DELAYED, TrainingConfig
from heterps_core.training.node.host_memory import gigabytes

_READING_BYTES_PER_ROW = 1_400
"""Bytes per row of a row group with Criteo's columns while it is read and hashed: Arrow's columns, float64 numbers
and copies; measured with row groups of 0.5 and 1 million rows on 2 cores, 2026-11-22."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMemory:
    """Host memory that one worker needs."""

    process_bytes: int
    """Python, torch, Arrow and what they import."""

    row_group_bytes: int
    state_bytes: int
    """Tables, weights, gradients and what optimizers keep."""

    checkpoint_bytes: int
    """Copies that wait to be written, and the marks of changed rows."""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.process_bytes + self.row_group_bytes + self.state_bytes + self.checkpoint_bytes

    def __str__(self) -> str:
        return (
            f"{gigabytes(self.process_bytes)} for the process, {gigabytes(self.row_group_bytes)} for row groups, "
            f"{gigabytes(self.state_bytes)} for tables, weights and optimizers and "
            f"{gigabytes(self.checkpoint_bytes)} for checkpoints"
        )


def worker_memory(
    model: str,
    features: FeatureSpec,
    config: TrainingConfig,
    stages: Sequence[Stage],
    *,
    mean_lengths: Sequence[float] = (),
    rows_per_list: Sequence[float] = (),
    num_train_rows: int,
    largest_group_rows: int,
    is_dry_run: bool,
) -> tuple[WorkerMemory, ...]:
    """Return the host memory that one worker of each stage needs.

    A worker holds its shard of each table with the optimizer's state, or as much of them as `embedding_memory_bytes`
    says, and copies of a part of it for checkpoints; all dense parameters of its stage with theirs and their
    gradients, and with delayed updates two copies and gradients on their way; row groups, and one that is read. On a
    rented card tables and weights lie in the card's memory.

    Args:
        model: Registry name or import path.
        mean_lengths, rows_per_list: See `trace_chain`.
        num_train_rows: Whose row groups a worker holds, up to a bound.
        largest_group_rows: Rows of the largest row group.
        is_dry_run: All stages run on this machine's cores.

    Raises:
        ConfigurationError: A table with dynamic ids would lie in a card's memory.
    """
    chain = build_chain(model, features, seed=config.seed)
    num_rows = {
        name: layer.num_rows for name, layer in chain.named_children() if isinstance(layer, SlotEmbedding)
    }
    graph = trace_chain(
        model,
        chain,
        dense_optimizer_values_per_parameter=len(get_dense_optimizer(config.dense_optimizer).state_names),
        row_optimizer=get_row_optimizer(config.embedding_optimizer),
        mean_lengths=mean_lengths,
        rows_per_list=rows_per_list,
    )
    needs = []
    for stage in stages:
        layers = graph.layers[stage.first_layer : stage.last_layer + 1]
        state_bytes = _state_bytes(layers, config, stage)
        is_on_card = is_gpu(stage.device_type) and not is_dry_run
        if is_on_card and features.dynamic_ids is not None and any(layer.is_sharded for layer in layers):
            raise ConfigurationError(
                f"tables with dynamic ids must lie in the host's memory, but the plan has some on "
                f"{stage.device_type}; leave cards out of device_types, or dynamic_ids out of the schema"
            )
        memory_bytes = config.embedding_memory_bytes
        is_swept = memory_bytes is not None and _table_bytes(layers, stage.num_replicas) > memory_bytes
        row_group_bytes = host_bytes_of_worker(num_train_rows) - WORKER_BYTES
        needs.append(
            WorkerMemory(
                process_bytes=round(WORKER_BYTES),
                row_group_bytes=round(row_group_bytes) + _READING_BYTES_PER_ROW * largest_group_rows,
                state_bytes=0 if is_on_card else state_bytes,
                checkpoint_bytes=sum(
                    _copied_bytes(
                        layer,
                        # The marks of rows that are on disk are within the memory for rows.
                        num_rows=0 if is_swept else num_rows.get(layer.name, 0),
                        num_replicas=stage.num_replicas,
                    )
                    for layer in layers
                ),
            )
        )
    return tuple(needs)


def _table_bytes(layers: Sequence[Layer], num_replicas: int) -> int:
    """Return the rows of tables, with the optimizer's state, of one replica."""
    return sum(-(-layer.state_bytes // num_replicas) for layer in layers if layer.is_sharded)


def _state_bytes(layers: Sequence[Layer], config: TrainingConfig, stage: Stage) -> int:
    """Return what one replica of a stage holds of tables, weights, gradients and what optimizers keep."""
    tables = _table_bytes(layers, stage.num_replicas)
    if config.embedding_memory_bytes is not None:
        tables = min(tables, config.embedding_memory_bytes)
    copies = 4 if config.update_mode == DELAYED else 1
    dense = sum(
        layer.state_bytes + layer.parameter_bytes * copies for layer in layers if not layer.is_sharded
    )
    return tables + dense


def _copied_bytes(layer: Layer, *, num_rows: int, num_replicas: int) -> int:
    """Return what checkpoints of a layer take beside it; the mark of a row is a byte."""
    if not layer.is_sharded:
        return layer.state_bytes
    shard_bytes = -(-layer.state_bytes // num_replicas)
    return min(shard_bytes, COPIED_BYTES + 2 * PIECE_BYTES) + -(-num_rows // num_replicas)
