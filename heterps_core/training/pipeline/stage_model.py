"""The layers that one replica holds: cut from the whole chain, with tables attached and optimizers made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from heterps_core.compute_device import CPU
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.lookup_table import LookupTable
from heterps_core.embeddings.row_optimizers import get_row_optimizer
from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.errors import ConfigurationError
from heterps_core.models.chain import build_chain
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.models.tracing import trace_chain
from heterps_core.plans.scheduling_plan import Stage, check_stages_cover_chain
from heterps_core.training.gradients.optimizers import get_dense_optimizer
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_layers import keep_freed_memory
from heterps_core.training.servers.parameter_server_client import PulledTable
from heterps_core.transport.rank_layout import RankLayout
from heterps_core.transport.shared_memory_link import SharedMemoryLink
from heterps_core.units import BYTES_PER_FLOAT32


@dataclass(frozen=True, kw_only=True)
class StageModel:
    """A stage's layers with all that is trained in them."""

    layers: dict[str, nn.Module]
    """By name, in order; those that this replica runs, so none on a parameter server."""

    tables: dict[str, ShardedTable]
    """This replica's shards, by the name of their layer."""

    pulled_tables: tuple[PulledTable, ...]
    """Those that parameter servers hold for its layers; empty elsewhere than right behind the servers."""

    dense_optimizer: Optimizer | None
    """None where the stage has no dense parameters."""

    input_width: int
    """Floats per sample that enter; 0 for the first stage."""

    output_width: int
    device: torch.device
    """Where layers, tables and optimizer state are."""

    @property
    def reads_batch(self) -> bool:
        """The stage looks rows up, so it needs the features of a batch."""
        return any(isinstance(layer, SlotEmbedding) for layer in self.layers.values())

    def apply_gradients(self, *, dense_learning_rate: float, embedding_learning_rate: float) -> None:
        """Update all parameters and clear the gradients; once a step."""
        if self.dense_optimizer is not None:
            for parameters in self.dense_optimizer.param_groups:
                parameters["lr"] = dense_learning_rate
            self.dense_optimizer.step()
            self.dense_optimizer.zero_grad()
        tables: tuple[LookupTable[Any], ...] = (*self.tables.values(), *self.pulled_tables)
        for table in tables:
            table.apply_gradients(learning_rate=embedding_learning_rate)


def build_stage_model(
    model: str,
    features: FeatureSpec,
    config: TrainingConfig,
    stages: Sequence[Stage],
    stage_index: int,
    group: ProcessGroup | None,
    link: SharedMemoryLink | None = None,
    *,
    layout: RankLayout | None = None,
    device: torch.device = CPU,
    device_group: ProcessGroup | None = None,
) -> StageModel:
    """Build the layers of one stage, and prepare this process for training them.

    Args:
        model: Registry name or import path.
        features: What the data has.
        config: Seed and optimizers.
        stages: All stages of the plan; they must cover the chain.
        stage_index: The stage to build.
        group: Its replicas; None for one.
        link: Between them where they sit on one machine.
        layout: Of all workers; needed where it has parameter servers. They take the place of the first stage, and
            the stage behind them runs its layers too.
        device: Where layers and tables are to be.
        device_group: The replicas of `group`, for tensors on the device; by default `group`.

    Raises:
        ConfigurationError: The stages do not cover the chain, or servers would have to run dense layers.
    """
    keep_freed_memory()
    chain = build_chain(model, features, seed=config.seed)
    check_stages_cover_chain(stages, len(chain))
    row_optimizer = get_row_optimizer(config.embedding_optimizer)
    dense_optimizer = get_dense_optimizer(config.dense_optimizer)
    graph = trace_chain(
        model,
        chain,
        dense_optimizer_values_per_parameter=dense_optimizer.state_values_per_parameter,
        row_optimizer=row_optimizer,
    )
    stage = stages[stage_index]
    named = list(chain.named_children())[stage.first_layer : stage.last_layer + 1]
    has_servers = layout is not None and bool(layout.servers)
    if has_servers:
        check_servers_hold_embeddings_only(chain, stages)
    tables = {}
    for name, layer in named:
        if isinstance(layer, SlotEmbedding):
            tables[name] = layer.new_table(
                name,
                row_optimizer(),
                seed=config.seed,
                group=group,
                link=link,
                device=device,
                rows_group=device_group,
            )
            layer.attach_table(tables[name])
    pulled_tables: tuple[PulledTable, ...] = ()
    is_behind_servers = has_servers and stage_index == 1
    if layout is not None and is_behind_servers:
        served = list(chain.named_children())[: stage.first_layer]
        pulled_tables = _pull_tables(served, layout, config, device)
        named = [*served, *named]
    # Before there is an optimizer, whose state lies where the parameters are.
    for _, layer in named:
        layer.to(device)
    parameters = [parameter for _, layer in named for parameter in layer.parameters()]
    input_bytes = graph.layers[stage.first_layer - 1].output_bytes_per_sample if stage.first_layer else 0
    is_server = has_servers and stage_index == 0
    return StageModel(
        layers={} if is_server else dict(named),
        tables=tables,
        pulled_tables=pulled_tables,
        dense_optimizer=dense_optimizer.new(parameters, config.dense_learning_rate) if parameters else None,
        input_width=0 if is_behind_servers else input_bytes // BYTES_PER_FLOAT32,
        output_width=graph.layers[stage.last_layer].output_bytes_per_sample // BYTES_PER_FLOAT32,
        device=device,
    )


def check_servers_hold_embeddings_only(chain: nn.Sequential, stages: Sequence[Stage]) -> None:
    """Check that the first of several stages can be parameter servers.

    Raises:
        ConfigurationError: It is the only one, or has dense layers.
    """
    names = [name for name, _ in chain.named_children()]
    num_embeddings = next(
        (number for number, layer in enumerate(chain) if not isinstance(layer, SlotEmbedding)), len(names)
    )
    first = stages[0]
    if first.last_layer >= num_embeddings or len(stages) < 2:
        dense = ", ".join(names[num_embeddings : first.last_layer + 1])
        raise ConfigurationError(
            f"hybrid updates need a first stage of nothing but embeddings, which parameter servers hold, and a stage "
            f"behind it, but the first of {len(stages)} is layers 0..{first.last_layer} with {dense}; take a "
            f"plan that is cut behind layer {num_embeddings - 1} ({names[num_embeddings - 1]}), as the scheduler "
            f"heuristic makes it, or update_mode sync"
        )


def _pull_tables(
    served: Sequence[tuple[str, nn.Module]],
    layout: RankLayout,
    config: TrainingConfig,
    device: torch.device,
) -> tuple[PulledTable, ...]:
    """Let embeddings look up what parameter servers hold; returns their tables in the order of layers."""
    tables = []
    for number, (name, layer) in enumerate(served):
        assert isinstance(layer, SlotEmbedding)
        table = PulledTable(
            number=number,
            name=name,
            num_rows=layer.num_rows,
            dimension=layer.dimension,
            layout=layout,
            staleness_bound_steps=config.staleness_bound_steps,
            device=device,
        )
        layer.attach_table(table)
        tables.append(table)
    return tuple(tables)
