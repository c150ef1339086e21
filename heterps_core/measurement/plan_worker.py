"""One process of a device: runs its part of one plan after the other on the training engine.

Started by `plan_measurer` as python -m heterps_core.measurement.plan_worker with its set-up as the only argument. It
reads one plan per line from its input and writes one answer per line; at the end of its input it ends.

Shapes: B rows of this replica in a micro-batch, W width of a boundary activation.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from heterps_core.data.batch import ClickBatch
from heterps_core.training.gradients.optimizers import get_dense_optimizer
from heterps_core.training.pipeline.stage_exchange import RowSlice, replica_slice
from heterps_core.training.pipeline.stage_layers import keep_freed_memory
from heterps_core.training.pipeline.stage_runner import MicroBatch, StageRunner
from heterps_core.transport.rank_layout import RankLayout

LEARNING_RATE = 1e-5
"""Training on made-up inputs must not drive parameters anywhere; the time of a step does not depend on it."""


class InputSource(nn.Module):
    """First layer of the first stage: hands out the inputs of a step's micro-batches in turn.

    The engine gives its first layer no activation, because click models begin with an embedding that reads the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inputs: Iterator[Tensor] = iter(())

    def feed(self, inputs: Sequence[Tensor]) -> None:
        """Set what the forward passes of the next step get."""
        self._inputs = iter(inputs)

    def forward(self, _: None) -> Tensor:
        """Return the next micro-batch."""
        return next(self._inputs)


class PlanWorker:
    """The process of one rank, which holds the whole chain and trains what a plan gives it.

    Args:
        set_up: "model" (`MeasuredModel`), "batch_size", "num_microbatches" of a plan with several stages,
            "optimizer" (name in `DENSE_OPTIMIZERS`), "rank".
    """

    def __init__(self, set_up: Mapping[str, Any]) -> None:
        self._rank: int = set_up["rank"]
        self._batch_size: int = set_up["batch_size"]
        self._num_microbatches: int = set_up["num_microbatches"]
        self._optimizer = get_dense_optimizer(set_up["optimizer"])
        module_name, _, function_name = set_up["model"]["builder"].partition(":")
        builder = getattr(importlib.import_module(module_name), function_name)
        torch.manual_seed(0)
        self._blocks: list[nn.Sequential] = list(builder(**set_up["model"]["arguments"]))
        self._inputs = torch.rand(self._batch_size, *set_up["model"]["input_shape"])
        self._labels = (torch.arange(self._batch_size) % 2).float()
        self._shapes = self._output_shapes()
        self._groups: dict[tuple[int, ...], ProcessGroup | None] = {}

    def run(self, stages: Sequence[Mapping[str, Any]], *, num_steps: int) -> dict[str, list[float]]:
        """Train this rank's part of a plan for some steps.

        Args:
            stages: "first_block", "last_block", "ranks" and "row_shares" of each stage.
            num_steps: Steps to run, warm-up included.

        Returns:
            "ended_s": when each step ended here, on the clock that all processes of a machine share.
            "computed_s": CPU time of the computing thread in each step. Both empty where the plan leaves this
            rank out.
        """
        for stage in stages:
            self._join_group(tuple(stage["ranks"]))
        for index, stage in enumerate(stages):
            if self._rank in stage["ranks"]:
                return self._train(stages, index, stage["ranks"].index(self._rank), num_steps)
        return {"ended_s": [], "computed_s": []}

    def _train(
        self, stages: Sequence[Mapping[str, Any]], index: int, replica: int, num_steps: int
    ) -> dict[str, list[float]]:
        stage = stages[index]
        layers = [layer for block in self._blocks_of(stage) for layer in block]
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        source = InputSource()
        input_shape = self._shapes[stage["first_block"]]
        runner = StageRunner(
            [
                source if index == 0 else nn.Unflatten(1, input_shape),
                *layers,
                *([nn.Flatten()] if index < len(stages) - 1 else []),
            ],
            layout=RankLayout(tuple(tuple(stage["ranks"]) for stage in stages)),
            stage=index,
            replica=replica,
            input_width=0 if index == 0 else math.prod(input_shape),
            output_width=math.prod(self._shapes[stage["last_block"] + 1]),
            group=self._groups[tuple(stage["ranks"])],
        )
        microbatches, inputs = self._microbatches(runner, len(stages), stage["row_shares"])
        optimizer = self._optimizer.new(parameters, LEARNING_RATE) if parameters else None
        ended_s, computed_s = [], []
        for _ in range(num_steps):
            started_core_s = time.thread_time()
            source.feed(inputs)
            runner.train_step(microbatches)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            computed_s.append(time.thread_time() - started_core_s)
            ended_s.append(time.perf_counter())
        return {"ended_s": ended_s, "computed_s": computed_s}

    def _microbatches(
        self, runner: StageRunner, num_stages: int, row_shares: Sequence[float] | None
    ) -> tuple[list[MicroBatch], list[Tensor]]:
        """Return this replica's micro-batches and the inputs of their rows; a lone stage has nothing to overlap."""
        if num_stages > 1:
            slices = runner.row_slices(self._batch_size, self._num_microbatches)
        else:
            slices = [(self._batch_size, self._rows_of(runner, row_shares))]
        microbatches = []
        for num_rows, rows in slices:
            empty = torch.empty(rows.num_rows, 0)
            batch = ClickBatch(dense=empty, ids=empty.long(), labels=self._labels[rows.first : rows.stop])
            microbatches.append(MicroBatch(num_rows, batch))
        return microbatches, [self._inputs[rows.first : rows.stop] for _, rows in slices]

    def _rows_of(self, runner: StageRunner, row_shares: Sequence[float] | None) -> RowSlice:
        if row_shares is None:
            return replica_slice(self._batch_size, runner.num_replicas, runner.replica)
        ends = [round(self._batch_size * sum(row_shares[:count])) for count in range(len(row_shares) + 1)]
        return RowSlice(ends[runner.replica], ends[runner.replica + 1])

    def _join_group(self, ranks: tuple[int, ...]) -> None:
        """Make the group of a stage with several replicas, which takes all processes of the world."""
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks)) if len(ranks) > 1 else None

    def _blocks_of(self, stage: Mapping[str, Any]) -> list[nn.Sequential]:
        return self._blocks[stage["first_block"] : stage["last_block"] + 1]

    def _output_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of a sample before each block and behind the last."""
        activation = self._inputs[:2]
        shapes = [tuple(activation.shape[1:])]
        with torch.no_grad():
            for block in self._blocks:
                activation = block(activation)
                shapes.append(tuple(activation.shape[1:]))
        return shapes


def main() -> None:
    """Join the world, then answer plans until the input ends."""
    set_up = json.loads(sys.argv[1])
    os.sched_setaffinity(0, set_up["cores"])
    torch.set_num_threads(set_up["num_threads"])
    keep_freed_memory()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(  # type: ignore[attr-defined]
            str(Path(set_up["store_file"])), set_up["world_size"]
        ),
        rank=set_up["rank"],
        world_size=set_up["world_size"],
        timeout=timedelta(seconds=set_up["limit_s"]),
    )
    worker = PlanWorker(set_up)
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = worker.run(request["stages"], num_steps=request["num_steps"])
        # Whatever a plan does to its worker is an answer too: it is the plan that failed.
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
