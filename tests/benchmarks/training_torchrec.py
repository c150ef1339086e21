"""TorchRec as the engine is compared with it: DistributedModelParallel over two processes on the CPU.

The same dense layers, table sizes, batches and optimizers. Tables are cut by rows, as here, or dealt out whole, which
its CPU build does with less work; batches go through its pipeline, which sends the ids of the next one ahead.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.training_engine import (
    BATCH_SIZE,
    DIMENSION,
    NUM_SLOTS,
    dense_layers,
    make_batches,
)

INSTALL = (
    "for the comparison: pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict pyvers "
    "pyre-extensions typing-inspect"
)
SHARDINGS = ("row_wise", "table_wise")
SLOTS = [f"slot{number}" for number in range(NUM_SLOTS)]


def is_installed() -> bool:
    """Tell whether TorchRec and what it needs can be imported."""
    return all(find_spec(name) for name in ("torchrec", "fbgemm_gpu", "tensordict", "pyre_extensions"))


def make_torchrec_step(
    rank: int, num_replicas: int, num_rows: int, sharding: str, seed: int
) -> Callable[[], None]:
    """Return a training step of one process; the process group is initialised.

    Args:
        rank, num_replicas: Of this process, and how many there are.
        num_rows: Of all tables together.
        sharding: One of `SHARDINGS`.
        seed: Of the batches.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _make_step(rank, num_replicas, num_rows, sharding, seed)


def _make_step(rank: int, num_replicas: int, num_rows: int, sharding: str, seed: int) -> Callable[[], None]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.streamable import Pipelineable

    Pipelineable.register(_TorchRecBatch)
    device = torch.device("cpu")
    is_by_row = sharding == "row_wise"
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05, "eps": 1e-8}
    config_class = EmbeddingConfig if is_by_row else EmbeddingBagConfig
    configs = [
        config_class(
            name=f"table_{slot}",
            embedding_dim=DIMENSION,
            num_embeddings=num_rows // NUM_SLOTS,
            feature_names=[slot],
            weight_init_min=-0.05,
            weight_init_max=0.05,
        )
        for slot in SLOTS
    ]
    meta = torch.device("meta")
    tables: nn.Module
    # Its CPU build cuts by rows only what is not summed over a sample's ids.
    if is_by_row:
        tables, sharder = EmbeddingCollection(tables=configs, device=meta), EmbeddingCollectionSharder(fused)
    else:
        tables = EmbeddingBagCollection(tables=configs, device=meta)
        sharder = EmbeddingBagCollectionSharder(fused)
    model = _TorchRecModel(tables)
    constraint = ParameterConstraints(sharding_types=[sharding], compute_kernels=["fused"])
    plan = EmbeddingShardingPlanner(
        topology=Topology(world_size=num_replicas, compute_device="cpu", local_world_size=num_replicas),
        constraints={config.name: constraint for config in configs},
    ).collective_plan(model, [sharder], dist.group.WORLD)
    parallel = DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=plan,
        sharders=[sharder],
    )
    dense = [parameter for _, parameter in in_backward_optimizer_filter(parallel.named_parameters())]
    pipeline = TrainPipelineSparseDist(parallel, torch.optim.Adam(dense, lr=1e-3, fused=True), device)
    size = BATCH_SIZE // num_replicas
    batches = []
    for batch in make_batches(num_rows, seed=seed):
        own = slice(rank * size, (rank + 1) * size)
        ids = KeyedJaggedTensor.from_lengths_sync(
            keys=SLOTS,
            values=batch.ids[own].t().reshape(-1).contiguous(),
            lengths=torch.ones(size * NUM_SLOTS, dtype=torch.int32),
        )
        batches.append(_TorchRecBatch(ids, batch.dense[own], batch.labels[own]))
    upcoming = itertools.cycle(batches)

    def step() -> None:
        pipeline.progress(upcoming)

    return step


@dataclass
class _TorchRecBatch:
    """What its pipeline moves about."""

    ids: Any
    dense: Tensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> _TorchRecBatch:
        return _TorchRecBatch(
            *(
                value.to(device=device, non_blocking=non_blocking)
                for value in (self.ids, self.dense, self.labels)
            )
        )

    def record_stream(self, stream: object) -> None:
        """There are no streams on the CPU."""


class _TorchRecModel(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.dense = dense_layers()

    def forward(self, batch: _TorchRecBatch) -> tuple[Tensor, Tensor]:
        found = self.tables(batch.ids)
        if isinstance(found, dict) or hasattr(found, "items"):
            vectors = [found[slot].values() for slot in SLOTS]
        else:
            vectors = [found.values()]
        logits = self.dense(torch.cat([*vectors, batch.dense], 1))
        return F.binary_cross_entropy_with_logits(logits.squeeze(1), batch.labels), logits.detach()
