"""What the planned split buys: a click model on processor cores alone, on a GPU alone, and with its embeddings on the
cores and its dense layers on the GPU, side by side.

All three run the training engine on the same batches: the cores as replicas of one stage that share their table's
memory, one worker on each core but one, which feeds the GPU. Batches lie in memory and are brought to their device on
a thread while the step before runs, as in training. Ways alternate within each round; each figure is the median of
the rounds. "HeterPS" (Liu et al. 2023) and its sequels report up to 3.3 times the throughput of CPU-only and up to
2.1 times that of GPU-only, with other machines and models; their figures are printed beside ours.

Needs a CUDA device. The profile of the same two devices, layer by layer:

    heterps profile --model ctrdnn --batch-size 4096 --device cuda --output docs/profiles/ctrdnn-GPU.json
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from heterps_core.compute_device import CPU, card_text, clock_of
from heterps_core.data.batch import ClickBatch
from heterps_core.data.features import FeatureSpec
from heterps_core.plans.scheduling_plan import Stage
from heterps_core.training.job import TrainingConfig, default_microbatches
from heterps_core.training.pipeline.stage_model import StageModel, build_stage_model
from heterps_core.training.pipeline.stage_place import StagePlace, connect_neighbours
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.training.replica_batches import BatchFeed
from heterps_core.transport.rank_layout import RankLayout
from heterps_core.transport.shared_memory_link import SharedMemoryLink
from tests.one_step import train_one_step
from tests.worker_processes import run_in_processes

LEARNING_RATES = {"dense_learning_rate": 1e-3, "embedding_learning_rate": 0.05}
MODEL = "ctrdnn"
NUM_LAYERS = 8
FIRST_DENSE_LAYER = 1
NUM_BATCHES = 4

PAPERS = {"cpu_only": 3.3, "gpu_only": 2.1}
"""Times by which the split beats each in the papers, at most."""

WAYS = ("cpu_only", "gpu_only", "split")


class Setting(NamedTuple):
    """What is measured."""

    batch_size: int
    num_cpu_workers: int
    gpu: str = "cuda:0"
    buckets_per_slot: int = 40_000
    num_rounds: int = 5
    steps_per_round: int = 20
    seed: int = 0


class Way(NamedTuple):
    """One worker's part in one way of training."""

    runner: StageRunner
    model: StageModel
    num_microbatches: int


def run(*, seed: int = 0) -> list[dict[str, Any]]:
    """Measure, print a table and return its figures in the form of the benchmark contract; none without CUDA."""
    if not torch.cuda.is_available():
        print(
            f"not measured: torch {torch.__version__} sees no CUDA device; run this where it does: "
            f"python -m tests.benchmarks gpu_split --json FILE"
        )
        return []
    print(f"{card_text(torch.device('cuda', 0))}; {os.cpu_count()} cores")
    figures = []
    for batch_size in (4_096, 16_384):
        setting = Setting(batch_size, num_cpu_workers=max((os.cpu_count() or 2) - 1, 1), seed=seed)
        rounds = measure(setting)
        print(f"{MODEL}, {setting}; k samples/s, median and rounds")
        for way in WAYS:
            speeds = [speeds[way] / 1e3 for speeds in rounds]
            print(f"  {way:<10}{statistics.median(speeds):>10.1f}", *(f"{speed:8.1f}" for speed in speeds))
        figures += figures_of(rounds, batch_size)
    for entry in figures:
        print(f"{entry['name']:<48}{entry['value']:>12.3f} {entry['unit']}")
    print(f"the papers, at most: {PAPERS['cpu_only']} over CPU-only, {PAPERS['gpu_only']} over GPU-only")
    return figures


def figures_of(rounds: Sequence[dict[str, float]], batch_size: int) -> list[dict[str, Any]]:
    """Return the speed of each way, and by how much the split beats the others in the same rounds."""
    speeds = {way: [speeds[way] for speeds in rounds] for way in WAYS}
    named = {f"{way}_samples_per_s_batch_{batch_size}": (speeds[way], "samples/s") for way in WAYS}
    for way in PAPERS:
        ratios = [split / other for split, other in zip(speeds["split"], speeds[way], strict=True)]
        named[f"split_over_{way}_batch_{batch_size}"] = (ratios, "ratio")
    return [
        {
            "name": name,
            "value": float(np.round(statistics.median(values), 4)),
            "unit": unit,
            "higher_is_better": True,
        }
        for name, (values, unit) in named.items()
    ]


def measure(setting: Setting) -> list[dict[str, float]]:
    """Return samples/s by way for each round."""
    by_rank = run_in_processes(run_worker, setting.num_cpu_workers + 1, setting)
    # The slowest worker of a way says when it was done.
    return [
        {way: min(part[way] for part in parts if way in part) for way in WAYS}
        for parts in zip(*by_rank, strict=True)
    ]


def run_worker(rank: int, setting: Setting) -> list[dict[str, float]]:
    """Measure one worker: of those on cores, or the last one, which has the GPU."""
    features = FeatureSpec(num_dense=13, slot_rows=(setting.buckets_per_slot,) * 26)
    batches = [draw_batch(features, setting, index) for index in range(NUM_BATCHES)]
    cores, card = tuple(range(setting.num_cpu_workers)), setting.num_cpu_workers
    group = dist.new_group(list(cores)) if len(cores) > 1 else None
    layouts = {
        "cpu_only": RankLayout((cores,)),
        "gpu_only": RankLayout(((card,),)),
        "split": RankLayout((cores, (card,))),
    }
    ways = {
        name: new_way(layout, rank, setting, features, group)
        for name, layout in layouts.items()
        if any(rank in ranks for ranks in layout.ranks)
    }
    rounds = []
    for _ in range(setting.num_rounds + 1):
        speeds = {}
        for name in WAYS:
            dist.barrier()
            if name in ways:
                speeds[name] = train(ways[name], batches, setting)
        rounds.append(speeds)
    # The first warms up.
    return rounds[1:]


def new_way(
    layout: RankLayout,
    rank: int,
    setting: Setting,
    features: FeatureSpec,
    group: dist.ProcessGroup | None,
) -> Way:
    """Return this worker's part of a way, with layers and tables of its own."""
    index, replica = layout.position(rank)
    firsts = (0, FIRST_DENSE_LAYER)[: layout.num_stages]
    lasts = [*(first - 1 for first in firsts[1:]), NUM_LAYERS - 1]
    stages = [
        Stage(first, last, "any", len(ranks))
        for first, last, ranks in zip(firsts, lasts, layout.ranks, strict=True)
    ]
    config = TrainingConfig(
        batch_size=setting.batch_size,
        num_microbatches=default_microbatches(setting.batch_size, num_stages=layout.num_stages),
        num_epochs=1,
        seed=setting.seed,
    )
    device, link = CPU, None
    if rank == setting.num_cpu_workers:
        device, group = torch.device(setting.gpu), None
    elif group is not None:
        link = SharedMemoryLink.connect(group, layout=layout, silence_limit_s=60.0)
    place = StagePlace(
        layout=layout,
        stage=index,
        replica=replica,
        device=device,
        group=group,
        link=link,
        # Only workers of two stages are all of the world.
        neighbours=connect_neighbours(layout, rank=rank, device=device) if layout.num_stages > 1 else {},
    )
    model = build_stage_model(MODEL, features, config, stages, place)
    return Way(StageRunner(model, config, place), model, config.num_microbatches)


def train(way: Way, batches: Sequence[ClickBatch], setting: Setting) -> float:
    """Train a round of steps; returns samples/s."""
    clock = clock_of(way.model.device)
    started_s = clock()
    feed = BatchFeed(lambda step: cut(way, batches[step % len(batches)]), range(setting.steps_per_round))
    for step, microbatches in feed:
        is_followed = step + 1 < setting.steps_per_round
        following = microbatches if is_followed else []
        train_one_step(way.model, way.runner, microbatches, following=following, **LEARNING_RATES)
    return setting.steps_per_round * setting.batch_size / (clock() - started_s)


def cut(way: Way, batch: ClickBatch) -> list[MicroBatch]:
    """Cut this worker's rows of a batch into micro-batches, on its device."""
    return [
        MicroBatch(size, batch.rows(rows.first, rows.stop).to(way.model.device))
        for size, rows in way.runner.row_slices(batch.num_rows, way.num_microbatches)
    ]


def draw_batch(features: FeatureSpec, setting: Setting, index: int) -> ClickBatch:
    """Return synthetic clicks; squared, so that low row indices come more often."""
    random = np.random.default_rng([setting.seed, index])
    num_rows, num_slots = setting.batch_size, features.num_slots
    return ClickBatch.from_numpy(
        random.standard_normal((num_rows, features.num_dense), dtype=np.float32),
        (random.random((num_rows, num_slots)) ** 2 * setting.buckets_per_slot).astype(np.int64),
        random.integers(0, 2, num_rows).astype(np.float32),
    )
