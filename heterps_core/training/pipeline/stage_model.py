"""The layers that one replica holds: cut from the whole chain, with tables attached and optimizers made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from heterps_core.compute_device import CPU
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_exchange import TablePeers
from heterps_core.embeddings.row_optimizers import get_row_optimizer
from heterps_core.embeddings.sequence_columns import SequenceColumns
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.embeddings.swept.sweep_memory import SweepCounts, slots_by_table
from heterps_core.embeddings.swept.swept_table import ColdRowsPlace, SweptTable
from heterps_core.errors import ConfigurationError
from heterps_core.models.chain import build_chain
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.models.tracing import output_widths
from heterps_core.plans.scheduling_plan import Stage, check_stages_cover_chain
from heterps_core.training.gradients.optimizers import DenseOptimizer, get_dense_optimizer
from heterps_core.training.job import MOST_IN_ONE_TABLE, TrainingConfig
from heterps_core.training.pipeline.stage_layers import keep_freed_memory
from heterps_core.training.pipeline.stage_place import ALONE, StagePlace


@dataclass(frozen=True, kw_only=True)
class StageModel:
    """A stage's layers with all that is trained in them."""

    layers: dict[str, nn.Module]
    """By name, in order."""

    tables: dict[str, ShardedTable]
    """This replica's shards, by the name of their layer."""

    dense_optimizer: DenseOptimizer
    input_width: int
    """Floats per sample that enter; 0 for the first stage."""

    output_width: int
    device: torch.device
    """Where layers, tables and optimizer state are."""

    input_columns: SequenceColumns | None = None
    """Of packed sequences that enter, which give the input any width."""

    output_columns: SequenceColumns | None = None

    @property
    def swept_tables(self) -> dict[str, SweptTable]:
        """Tables that are larger than the memory for them."""
        return {name: table for name, table in self.tables.items() if isinstance(table, SweptTable)}

    @property
    def sweep_counts(self) -> SweepCounts:
        """Counts of the sweeps of all tables in training."""
        return sum((table.counts for table in self.swept_tables.values()), SweepCounts())

    @property
    def reads_batch(self) -> bool:
        """The stage looks rows up, so it needs the features of a batch."""
        return any(isinstance(layer, SlotEmbedding) for layer in self.layers.values())

    def update_dense(self, learning_rate: float) -> None:
        """Update the dense parameters by the gradients of a batch, and clear them."""
        self.dense_optimizer.step(learning_rate)

    def update_rows(self, learning_rate: float) -> None:
        """Update the rows of tables by the gradients of a batch, and clear them."""
        for table in self.tables.values():
            table.apply_gradients(learning_rate=learning_rate)


def build_stage_model(
    model: str,
    features: FeatureSpec,
    config: TrainingConfig,
    stages: Sequence[Stage],
    place: StagePlace = ALONE,
    *,
    scratch: Path = Path(),
) -> StageModel:
    """Build the layers of one stage, and prepare this process for training them.

    Args:
        model: Registry name or import path.
        features: What the data has.
        config: Seed and optimizers.
        stages: All stages of the plan; they must cover the chain.
        place: Of this replica; its link serves up to `MOST_IN_ONE_TABLE` replicas, and neither swept rows nor those
            of dynamic ids.
        scratch: Folder for rows that find no room in `config.embedding_memory_bytes`, where `config` names none.

    Raises:
        ConfigurationError: The stages do not cover the chain, or the memory for rows is too small.
    """
    keep_freed_memory(shares_heap=config.embedding_memory_bytes is not None)
    chain = build_chain(model, features, seed=config.seed)
    check_stages_cover_chain(stages, len(chain))
    row_optimizer = get_row_optimizer(config.embedding_optimizer)
    dense_optimizer = get_dense_optimizer(config.dense_optimizer)
    widths = output_widths(chain)
    # Of what enters each layer, and then of what leaves the last.
    columns = [None, *(_packed_columns(layer) for layer in chain)]
    stage = stages[place.stage]
    named = list(chain.named_children())[stage.first_layer : stage.last_layer + 1]
    tables = {}
    link = place.link if place.link and place.num_replicas <= MOST_IN_ONE_TABLE else None
    if config.embedding_memory_bytes is not None or features.dynamic_ids is not None:
        link = None
    peers = None
    if place.group is not None and link is None and any(isinstance(each, SlotEmbedding) for _, each in named):
        peers = TablePeers.connect(
            place.group,
            layout=place.layout,
            silence_limit_s=place.silence_limit_s,
            cards_group=place.cards_group,
        )
    cold_places = _cold_rows_places(dict(named), config, place, scratch=scratch)
    for name, layer in named:
        if isinstance(layer, SlotEmbedding):
            tables[name] = layer.new_table(
                name,
                row_optimizer(l2=config.embedding_l2),
                seed=config.seed,
                peers=peers,
                link=link,
                device=place.device,
                cold_rows=cold_places.get(name),
                wire_dtype=getattr(torch, config.wire_dtype),
                day=config.day_number,
            )
            layer.attach_table(tables[name])
    # Before there is an optimizer, whose state lies where the parameters are.
    for _, layer in named:
        layer.to(place.device)
    parameters = [parameter for _, layer in named for parameter in layer.parameters()]
    return StageModel(
        layers=dict(named),
        tables=tables,
        dense_optimizer=dense_optimizer(parameters, l2=config.dense_l2),
        input_width=widths[stage.first_layer - 1] if stage.first_layer else 0,
        output_width=widths[stage.last_layer],
        device=place.device,
        input_columns=columns[stage.first_layer],
        output_columns=columns[stage.last_layer + 1],
    )


def _packed_columns(layer: nn.Module) -> SequenceColumns | None:
    return layer.sequence_columns if isinstance(layer, SlotEmbedding) and layer.packs_sequences else None


def _cold_rows_places(
    layers: Mapping[str, nn.Module], config: TrainingConfig, place: StagePlace, *, scratch: Path
) -> dict[str, ColdRowsPlace]:
    """Return for each table that is larger than the memory for it where its other rows are."""
    embeddings = {name: layer for name, layer in layers.items() if isinstance(layer, SlotEmbedding)}
    if config.embedding_memory_bytes is None or not embeddings:
        return {}
    if any(layer.ids is not None for layer in embeddings.values()):
        raise ConfigurationError(
            f"tables with dynamic ids must be in memory, got embedding_memory_bytes {config.embedding_memory_bytes}; "
            f"leave that out, or dynamic_ids out of the schema"
        )
    if place.device != CPU:
        raise ConfigurationError(
            f"embedding_memory_bytes is for tables in the host's memory, but those of {', '.join(embeddings)} lie on "
            f"{place.device}; place these layers on a CPU, or leave embedding_memory_bytes out"
        )
    shards = {
        name: layer.shard_size(
            get_row_optimizer(config.embedding_optimizer),
            batch_size=config.batch_size,
            num_shards=place.num_replicas,
            shard=place.replica,
        )
        for name, layer in embeddings.items()
    }
    num_slots = slots_by_table(shards, config.embedding_memory_bytes)
    folders = [Path(folder) for folder in config.embedding_folders] or [scratch]
    return {
        name: ColdRowsPlace(folders=folders, num_slots=count)
        for name, count in num_slots.items()
        if count is not None
    }
