"""Every model with branches: where it can be cut, its best plan, that no cut changes what it learns, and its speed.

- Plans: layers are measured on this machine and estimated for rented ones, for the night that a dry run plans.
- Lines: of 200 random graphs the cheapest plan of the program's order beside the cheapest of all convex partitions,
  which are all tried, by formulas of their own.
- Differences: weights after some steps of SGD beside those of the same module, never traced, with plain tables of
  torch in one process; cut in two at every boundary, and in three with replicas (2, 1, 2). Beside them stands what
  rounding makes of that module itself: how far it is from its own steps in float64.
- Speed: a step uncut, one thread, over the module with plain tables of torch with sparse gradients, as it is and
  with `torch.compile`, which compiles all but the look-ups; Adam for dense parameters, SGD for rows, processor
  time, in turns.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.embeddings.row_optimizers import RowWiseSGD
from heterps_core.models.chain import build_chain
from heterps_core.models.graph_block import GraphBlock, tensor_name
from heterps_core.models.slot_embedding import SlotEmbedding
from heterps_core.planning.search.optimum import find_optimum
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import DELAYED, NIGHT_SAMPLES, PRODUCTION_ROWS_PER_SLOT, TrainingConfig
from heterps_core.training.pipeline.stage_layers import StageLayers
from heterps_core.training.pipeline.stage_model import build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace, connect_neighbours
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.transport.rank_layout import RankLayout
from infra.workspace import Workspace
from tasks.data import prepare_data
from tasks.planning.problems import make_problems, problem_of_cheapest_zone
from tasks.profiling import planned_job, profile_layers
from tasks.provisioning import find_offers
from tasks.sources import ClickSource
from tests.benchmarks.plain_torch import plain_step, processor_seconds
from tests.benchmarks.training_speed import figure
from tests.heterps_core.planning.search.branched_graphs import losses_of_lines
from tests.heterps_core.training.reference import plain_model
from tests.one_step import train_one_step
from tests.worker_processes import run_in_processes

MODELS = (
    *("matchnet", "2emb", "lr", "wide-deep", "deepfm", "dlrm", "dcnv2"),
    *("rankmixer", "wukong", "din", "mmoe", "ple", "cross-deep"),
)
DEVICE_TYPES = ["cpu-r6in", "gpu-t4"]
FEATURES = FeatureSpec(num_dense=13, slot_rows=(300,) * 26)
SPEED_FEATURES = FeatureSpec(num_dense=13, slot_rows=(4_000,) * 26)
NUM_WORKERS = 5
NUM_STEPS, STEP_ROWS = 4, 48
DENSE_RATE, ROW_RATE = 0.1, 0.1
SPEED_BATCH, SPEED_ROUNDS = 2048, 7
NUM_GRAPHS = 200
ROUNDING = 1e-9
"""Of costs, relative."""


def run(*, seed: int = 0, num_cases: int = NUM_GRAPHS) -> list[dict[str, Any]]:
    """Measure, print a table and return its figures in the form of the benchmark contract."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run_in_processes(train_replicated, NUM_WORKERS, folder, seed)
        replicated = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(NUM_WORKERS)]
    figures: list[dict[str, Any]] = []
    differences, over_rounding, speeds, compiled = [], [], [], []
    header = (
        "model",
        "ops",
        "cuts",
        "USD",
        "bound",
        "difference",
        "replicas",
        "rounding",
        "plain",
        "compiled",
    )
    print("".join(f"{each:>11}" for each in header), " plan")
    for model, plan in best_plans(MODELS):
        chain = build_chain(model, FEATURES, seed=seed)
        num_ops = sum(number_of_operations(layer) for layer in chain)
        cut = max(difference_of_cut(model, place, seed) for place in range(1, len(chain)))
        with_replicas = difference_of_parts(model, [part[model] for part in replicated], seed)
        rounding = rounding_of_plain(model, seed)
        over = speed_over_plain(model, seed)
        differences.append(max(cut, with_replicas))
        over_rounding.append(differences[-1] / rounding)
        speeds.append(over.plain)
        compiled.append(min(over))
        print(
            f"{model:>11}{num_ops:>11}{len(chain) - 1:>11}{plan.usd:>11.4f}{plan.bound_usd:>11.4f}{cut:>11.1e}"
            f"{with_replicas:>11.1e}{rounding:>11.1e}{over.plain:>11.2f}{over.compiled:>11.2f}  {plan.stages}",
            flush=True,
        )
        figures += [
            _figure(f"{model}_operations", num_ops, "operations"),
            _figure(f"{model}_legal_cuts", len(chain) - 1, "cuts"),
            _figure(f"{model}_usd", plan.usd, "USD", higher_is_better=False),
            _figure(f"{model}_bound", plan.bound_usd, "USD"),
            _figure(f"{model}_difference", max(cut, with_replicas), "", higher_is_better=False),
            _figure(f"{model}_rounding_of_plain", rounding, "", higher_is_better=False),
            _figure(f"{model}_uncut_over_plain", over.plain, "ratio"),
            _figure(f"{model}_uncut_over_compiled", over.compiled, "ratio"),
        ]
    losses = losses_of_lines(range(seed, seed + num_cases))
    num_worse = sum(loss > ROUNDING for loss in losses)
    print(
        f"lines of {num_cases} random graphs: {num_worse} cost more than the best of all convex partitions, "
        f"{max(losses):.1%} at most, {statistics.fmean(losses):.2%} in the mean"
    )
    return [
        *figures,
        _figure("largest_difference", max(differences), "", higher_is_better=False),
        _figure("largest_difference_over_rounding", max(over_rounding), "ratio", higher_is_better=False),
        _figure("uncut_over_plain_min", min(speeds), "ratio"),
        _figure("uncut_over_best_of_plain_min", min(compiled), "ratio"),
        _figure("lines_as_cheap_as_any_partition", 1 - num_worse / num_cases, "share"),
        _figure("line_loss_max", max(losses), "share", higher_is_better=False),
    ]


def _figure(name: str, value: float, unit: str, *, higher_is_better: bool = True) -> dict[str, Any]:
    """Return a figure with four digits, as differences are small."""
    digits = {"value": float(f"{value:.4g}")}
    return figure(name, value, unit, higher_is_better=higher_is_better) | digits


class BestPlan(NamedTuple):
    """The cheapest plan of a model's night by the trainer's step."""

    usd: float
    bound_usd: float
    stages: str


def best_plans(models: Sequence[str]) -> Iterator[tuple[str, BestPlan]]:
    """Yield each model with its cheapest plan."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(root=Path(folder)).create()
        clicks = prepare_data.fn(workspace, ClickSource())
        job = planned_job(
            clicks.open(),
            is_dry_run=True,
            batch_size=None,
            planned_samples=NIGHT_SAMPLES,
            planned_rows_per_slot=PRODUCTION_ROWS_PER_SLOT,
        )
        offers = find_offers.fn(DEVICE_TYPES)
        for model in models:
            profiled = profile_layers.fn(
                workspace, clicks, job, model=model, batch_size=job.batch_size, device_types=DEVICE_TYPES
            )
            problems = make_problems(
                profiled,
                offers,
                job,
                device_types=DEVICE_TYPES,
                num_epochs=1,
                throughput_floor_samples_per_s=0.0,
                update_mode=DELAYED,
            )
            problem = problem_of_cheapest_zone(problems)
            best = find_optimum(problem)
            names = [layer.name for layer in problem.layers]
            stages = ", ".join(
                f"{names[stage.first_layer]}..{names[stage.last_layer]} on {stage.num_replicas} "
                f"{stage.device_type}"
                for stage in best.stages
            )
            yield model, BestPlan(best.cost_usd, best.cost_lower_bound_usd, stages)


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


@functools.cache
def learned_plainly(model: str, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return what the module learns in plain torch."""
    plain = plain_model(model, FEATURES, seed=seed).to(dtype)
    optimizer = torch.optim.SGD(plain.parameters(), lr=DENSE_RATE)
    for step in range(NUM_STEPS):
        drawn = draw_batch(FEATURES, STEP_ROWS, step)
        batch = replace(drawn, dense=drawn.dense.to(dtype), labels=drawn.labels.to(dtype))
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(plain(batch), batch.labels).backward()
        optimizer.step()
    return plain.tensors()


def rounding_of_plain(model: str, seed: int) -> float:
    """Return the largest difference of a weight between the module in plain torch and the same in float64."""
    exact = learned_plainly(model, seed, torch.float64)
    return max(
        (value - exact[name]).abs().max().item() for name, value in learned_plainly(model, seed).items()
    )


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
    neighbours = connect_neighbours(layout, rank=rank, shares_memory=False)
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
    place = StagePlace(layout=layout, stage=index, replica=replica, group=group, neighbours=neighbours)
    part = build_stage_model(model, FEATURES, config, stages, place)
    runner = StageRunner(part, config, place)
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


class SpeedOver(NamedTuple):
    """Median ratios of processor times: a step of the plain module over one of the engine."""

    plain: float
    compiled: float


def speed_over_plain(model: str, seed: int) -> SpeedOver:
    """Return how much faster the engine is than the plain module, and than that with `torch.compile`."""
    batches = [draw_batch(SPEED_FEATURES, SPEED_BATCH, number) for number in range(4)]
    steps = [
        plain_step(model, SPEED_FEATURES, seed=seed, rate=ROW_RATE, is_compiled=is_compiled)
        for is_compiled in (False, True)
    ]
    config = TrainingConfig(
        batch_size=SPEED_BATCH, num_microbatches=1, num_epochs=1, seed=seed, embedding_optimizer="sgd"
    )
    num_layers = len(build_chain(model, SPEED_FEATURES, seed=seed))
    part = build_stage_model(model, SPEED_FEATURES, config, [Stage(0, num_layers - 1, "cpu", 1)])
    runner = StageRunner(part, config)

    def engine_step(batch: ClickBatch) -> None:
        microbatch = MicroBatch(batch.num_rows, batch)
        train_one_step(part, runner, [microbatch], dense_learning_rate=1e-3, embedding_learning_rate=ROW_RATE)

    ratios = []
    for number in range(SPEED_ROUNDS + 1):
        *plain, engine = [processor_seconds(step, batches) for step in (*steps, engine_step)]
        if number:
            ratios.append([seconds / engine for seconds in plain])
    return SpeedOver(*map(statistics.median, zip(*ratios, strict=True)))
