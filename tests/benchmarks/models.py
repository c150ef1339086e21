"""Every model with branches: where it can be cut, its best plan, that no cut changes what it learns, and its speed.

- Plans: layers are measured on this machine and estimated for rented ones, for the night that a dry run plans.
- Differences: weights after some steps of SGD beside those of the same module, never traced, with plain tables of
  torch in one process; cut in two at every boundary, and in three with replicas (2, 1, 2).
- Speed: a step uncut, one thread, over the module with plain tables of torch with sparse gradients; Adam for dense
  parameters, SGD for rows, processor time, in turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import RowWiseSGD
from heterps_core.errors import HeterpsError
from heterps_core.models.chain import build_chain, load_builder
from heterps_core.models.graph_block import GraphBlock, tensor_name
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.planning.problem.scheduling_problem import StepModel
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingConfig
from heterps_core.training.pipeline.stage_layers import StageLayers
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.transport.rank_layout import RankLayout
from infra.workspace import Workspace
from tasks.comparison import problems_of_models
from tasks.data import prepare_data
from tasks.provisioning import find_offers
from tests.benchmarks.training_speed import figure
from tests.heterps_core.training.reference import plain_model
from tests.one_step import train_one_step
from tests.worker_processes import run_in_processes

MODELS = (
    *("matchnet", "2emb", "lr", "wide-deep", "deepfm", "dlrm", "dcnv2"),
    *("xdeepfm", "finalmlp", "autoint", "din", "mmoe"),
)
DEVICE_TYPES = ["cpu-r6in", "gpu-t4"]
FEATURES = FeatureSpec(num_dense=13, slot_rows=(300,) * 26)
SPEED_FEATURES = FeatureSpec(num_dense=13, slot_rows=(4_000,) * 26)
NUM_WORKERS = 5
NUM_STEPS, STEP_ROWS = 4, 48
DENSE_RATE, ROW_RATE = 0.1, 0.1
SPEED_BATCH, SPEED_ROUNDS = 2048, 7


def run(*, seed: int = 0) -> list[dict[str, Any]]:
    """Measure, print a table and return its figures in the form of the benchmark contract."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run_in_processes(train_replicated, NUM_WORKERS, folder, seed)
        replicated = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(NUM_WORKERS)]
    plans = best_plans()
    figures: list[dict[str, Any]] = []
    largest, slowest = 0.0, float("inf")
    header = ("model", "ops", "cuts", "USD", "bound", "difference", "replicas", "over plain")
    print("".join(f"{each:>12}" for each in header), " plan")
    for model in MODELS:
        chain = build_chain(model, FEATURES, seed=seed)
        num_ops = sum(number_of_operations(layer) for layer in chain)
        cut = max(difference_of_cut(model, place, seed) for place in range(1, len(chain)))
        with_replicas = difference_of_parts(model, [part[model] for part in replicated], seed)
        speed = speed_over_plain(model, seed)
        largest, slowest = max(largest, cut, with_replicas), min(slowest, speed)
        usd, bound, plan = plans.get(model, (float("nan"), float("nan"), "not planned"))
        print(
            f"{model:>12}{num_ops:>12}{len(chain) - 1:>12}{usd:>12.4f}{bound:>12.4f}{cut:>12.1e}"
            f"{with_replicas:>12.1e}{speed:>12.2f}  {plan}",
            flush=True,
        )
        figures += [
            figure(f"{model}_legal_cuts", len(chain) - 1, "cuts"),
            figure(f"{model}_usd", usd, "USD", higher_is_better=False),
            figure(f"{model}_difference", max(cut, with_replicas), "", higher_is_better=False),
            figure(f"{model}_uncut_over_plain", speed, "ratio"),
        ]
    figures += [
        figure("largest_difference", largest, "", higher_is_better=False),
        figure("uncut_over_plain_min", slowest, "ratio"),
    ]
    return figures


def best_plans() -> dict[str, tuple[float, float, str]]:
    """Return the cost of each model's cheapest plan by the trainer's step, the proven bound, and its stages."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(root=Path(folder)).create()
        clicks = prepare_data(workspace, data=None, schema_file=None)
        problems, left_out = problems_of_models(
            workspace,
            MODELS,
            clicks,
            find_offers(DEVICE_TYPES),
            device_types=DEVICE_TYPES,
            throughput_floor_samples_per_s=0.0,
        )
        print("\n".join(f"{model} has no plan: {reason}" for model, reason in left_out.items()))
        for problem in problems:
            is_own_step = problem.problem.step_model is StepModel.TRAINER
            if is_own_step and problem.name not in found:
                try:
                    best = find_optimum(problem.problem)
                except HeterpsError as error:
                    print(f"{problem.name} has no plan: {error}")
                    continue
                names = [layer.name for layer in problem.problem.layers]
                plan = ", ".join(
                    f"{names[stage.first_layer]}..{names[stage.last_layer]} on {stage.num_replicas} "
                    f"{stage.device_type}"
                    for stage in best.stages
                )
                found[problem.name] = (best.cost_usd, best.cost_lower_bound_usd, plan)
    return found


def number_of_operations(layer: nn.Module) -> int:
    if isinstance(layer, GraphBlock):
        return sum(node.op.startswith("call") for node in layer.graph.nodes)
    return 1


def draw_batch(features: FeatureSpec, num_rows: int, number: int) -> ClickBatch:
    generator = torch.Generator().manual_seed(number)
    rows = features.slot_rows[0]
    return ClickBatch(
        dense=torch.randn(num_rows, features.num_dense, generator=generator),
        ids=(torch.rand(num_rows, features.num_slots, generator=generator) ** 3 * rows).long(),
        labels=torch.randint(0, 2, (num_rows,), generator=generator).float(),
    )


def learned_plainly(model: str, seed: int) -> dict[str, Tensor]:
    """Return what the module learns in plain torch."""
    plain = plain_model(model, FEATURES, seed=seed)
    optimizer = torch.optim.SGD(plain.parameters(), lr=DENSE_RATE)
    for step in range(NUM_STEPS):
        batch = draw_batch(FEATURES, STEP_ROWS, step)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(plain(batch), batch.labels).backward()
        optimizer.step()
    return plain.tensors()


def difference_of_cut(model: str, place: int, seed: int) -> float:
    """Return the largest difference of a weight between a model that is cut in two and the plain module."""
    chain = build_chain(model, FEATURES, seed=seed)
    layers, tables = list(chain), {}
    for name, layer in chain.named_children():
        if isinstance(layer, SlotEmbedding):
            tables[name] = layer.new_table(name, RowWiseSGD(), seed=seed)
            layer.attach_table(tables[name])
    stages = [StageLayers(layers[:place]), StageLayers(layers[place:])]
    optimizer = torch.optim.SGD(chain.parameters(), lr=DENSE_RATE)
    for step in range(NUM_STEPS):
        batch = draw_batch(FEATURES, STEP_ROWS, step)
        optimizer.zero_grad()
        crossing = stages[0](batch, None)
        entering = crossing.detach().requires_grad_()
        logits = stages[1](batch, entering).squeeze(1)
        F.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        crossing.backward(entering.grad)
        for stage in stages:
            stage.weight_gradients.finish()
        optimizer.step()
        for table in tables.values():
            table.apply_gradients(learning_rate=ROW_RATE)
    expected = learned_plainly(model, seed)
    found = {f"{name}.weight": table.weight_RD for name, table in tables.items()}
    for name, layer in chain.named_children():
        found |= {tensor_name(name, layer, key): value for key, value in layer.named_parameters()}
    return max((value - expected[name]).abs().max().item() for name, value in found.items())


def train_replicated(rank: int, folder: str, seed: int, models: Sequence[str] = MODELS) -> None:
    """Train this rank's part of each model, cut in three with replicas (2, 1, 2); leave what it learned in a file."""
    torch.save({model: train_part(rank, model, seed) for model in models}, f"{folder}/{rank}.pt")


def train_part(rank: int, model: str, seed: int) -> dict[str, Any]:
    """Return what this rank learned of one model; a model of two layers is cut in two."""
    num_layers = len(build_chain(model, FEATURES, seed=seed))
    firsts = sorted({0, max(1, num_layers // 3), 2 * num_layers // 3})
    firsts = [first for first in firsts if first < num_layers][: min(3, num_layers)]
    replicas = (2, 1, 2)[: len(firsts)]
    ends = [*firsts[1:], num_layers]
    stages = [
        Stage(first, stop - 1, "cpu", count)
        for first, stop, count in zip(firsts, ends, replicas, strict=True)
    ]
    ranks = [(0, 1), (2,), (3, 4)][: len(stages)]
    groups = [dist.new_group(list(each)) for each in ranks]
    layout = RankLayout(tuple(ranks))
    if rank >= sum(replicas):
        return {}
    index, replica = layout.position(rank)
    group = groups[index] if replicas[index] > 1 else None
    config = TrainingConfig(
        batch_size=STEP_ROWS,
        num_microbatches=3,
        num_epochs=1,
        seed=seed,
        dense_optimizer="sgd",
        embedding_optimizer="sgd",
    )
    part = build_stage_model(model, FEATURES, config, stages, index, group)
    runner = new_runner(part, layout, index, replica, group)
    for step in range(NUM_STEPS):
        batch = draw_batch(FEATURES, STEP_ROWS, step)
        microbatches = [
            MicroBatch(size, batch.rows(rows.first, rows.stop))
            for size, rows in runner.row_slices(batch.num_rows, config.num_microbatches)
        ]
        train_one_step(
            part, runner, microbatches, dense_learning_rate=DENSE_RATE, embedding_learning_rate=ROW_RATE
        )
    dense = {
        tensor_name(name, layer, key): value.detach()
        for name, layer in part.layers.items()
        for key, value in layer.named_parameters()
    }
    return {
        **{name: (slice(None), value) for name, value in dense.items()},
        **{
            f"{name}.weight": (slice(table.rows.first, table.rows.stop), table.weight_RD)
            for name, table in part.tables.items()
        },
    }


def difference_of_parts(model: str, parts: list[dict[str, Any]], seed: int) -> float:
    """Return the largest difference of a weight of any replica from the plain module's."""
    expected = learned_plainly(model, seed)
    return max(
        (value - expected[name][rows]).abs().max().item()
        for part in parts
        for name, (rows, value) in part.items()
    )


def new_runner(
    part: StageModel, layout: RankLayout, index: int, replica: int, group: dist.ProcessGroup | None
) -> StageRunner:
    return StageRunner(
        list(part.layers.values()),
        layout=layout,
        stage=index,
        replica=replica,
        input_width=part.input_width,
        output_width=part.output_width,
        group=group,
    )


class SparseEmbedding(nn.Module):
    """A SlotEmbedding of slots with one value each as users of plain torch write it."""

    def __init__(self, layer: SlotEmbedding) -> None:
        super().__init__()
        self.table = nn.Embedding(layer.num_rows, layer.dimension, sparse=True)
        nn.init.normal_(self.table.weight, 0.0, layer.initial_standard_deviation)
        self.layer = layer

    def forward(self, batch: ClickBatch) -> Tensor:
        vectors = self.table(self.layer.row_numbers(batch)).flatten(1)
        return torch.cat([vectors, batch.dense], 1) if self.layer.include_dense else vectors


def speed_over_plain(model: str, seed: int) -> float:
    """Return the median ratio of processor times: a step of the plain module over one of the engine."""
    batches = [draw_batch(SPEED_FEATURES, SPEED_BATCH, number) for number in range(4)]
    torch.manual_seed(seed)
    plain = load_builder(model)(SPEED_FEATURES)
    for path, layer in list(plain.named_modules()):
        if isinstance(layer, SlotEmbedding):
            plain.set_submodule(path, SparseEmbedding(layer))
    tables = [each.table.weight for each in plain.modules() if isinstance(each, SparseEmbedding)]
    dense = [each for each in plain.parameters() if all(each is not table for table in tables)]
    optimizers = [torch.optim.Adam(dense, fused=True), torch.optim.SGD(tables, lr=ROW_RATE)]

    def plain_step(batch: ClickBatch) -> None:
        loss = F.binary_cross_entropy_with_logits(plain(batch).squeeze(1), batch.labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    config = TrainingConfig(
        batch_size=SPEED_BATCH, num_microbatches=1, num_epochs=1, seed=seed, embedding_optimizer="sgd"
    )
    num_layers = len(build_chain(model, SPEED_FEATURES, seed=seed))
    part = build_stage_model(model, SPEED_FEATURES, config, [Stage(0, num_layers - 1, "cpu", 1)], 0, None)
    runner = new_runner(part, RankLayout(((0,),)), 0, 0, None)

    def engine_step(batch: ClickBatch) -> None:
        microbatch = MicroBatch(batch.num_rows, batch)
        train_one_step(part, runner, [microbatch], dense_learning_rate=1e-3, embedding_learning_rate=ROW_RATE)

    ratios = []
    for number in range(SPEED_ROUNDS + 1):
        seconds = [processor_seconds(step, batches) for step in (plain_step, engine_step)]
        if number:
            ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios)


def processor_seconds(step: Callable[[ClickBatch], None], batches: list[ClickBatch]) -> float:
    started = time.process_time()
    for batch in batches:
        step(batch)
    return time.process_time() - started
