"""The first thing that workers do behind a loss: make a checkpoint of the newest step of which all state is kept.

Each machine tells what its keeper has of the generation before. Where that is the state of every worker of it after a
common step, keepers' logs are written as one more layer on the newest checkpoint, in the format of all others; so
what follows begins from it by any plan. Where it is not, the newest checkpoint stays what they begin from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing import AuthenticationError

import torch
import torch.distributed as dist
from torch import Tensor, nn

from heterps_core.training.checkpoint import (
    TrainingCursor,
    complete_checkpoints,
    read_checkpoint,
    write_manifest,
)
from heterps_core.training.checkpoint_writer import listed_rows
from heterps_core.training.gradients.optimizers import get_dense_optimizer
from heterps_core.training.job import TrainingConfig
from heterps_core.training.redo.keeper import KeeperPlace, StepLogs, connect
from heterps_core.training.redo.step_log import DenseChange, LogSummary
from heterps_core.training.storage.run_directory import CHECKPOINTS, RunDirectory
from heterps_core.training.storage.stored_tensors import TensorManifest, TensorRows, write_tensors
from heterps_core.training.storage.verified_files import DamagedFileError

logger = logging.getLogger(__name__)


ROWS, DENSE = "rows", "dense layers"
"""What is written of a worker's state."""


class NotKeptError(Exception):
    """The state of a worker is lost, or of no common step; the message says which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """Which kept state is written by whom."""

    cursor: TrainingCursor
    """Behind the step that the state is of."""

    generation: int
    """That was lost."""

    base: str
    """Name of the checkpoint that lacks only what changed since."""

    written_by: Mapping[int, Mapping[int, Sequence[str]]]
    """By rank of the generation that begins, and by rank of the one before whose state it is: `ROWS` or `DENSE`."""

    shards: Mapping[int, Mapping[str, tuple[int, int]]]
    """By rank of the generation before; see `LoggedWorker`."""


def plan_recovery(found: Sequence[Sequence[LogSummary]], *, base: str | None) -> Recovery | None:
    """Return what is to be written; None where there is a checkpoint as new.

    Args:
        found: By rank of the generation that begins, what it has access to.
        base: Name of the newest checkpoint, None where there is none.

    Raises:
        NotKeptError: The state of all workers of the generation before is not to be had.
    """
    logs = [(holder, each) for holder, summaries in enumerate(found) for each in summaries]
    newest = max((each.worker.generation for _, each in logs), default=0)
    logs = [
        (holder, each)
        for holder, each in logs
        if each.worker.generation == newest and base is not None and each.base_step <= int(base)
    ]
    if base is None or not logs:
        raise NotKeptError("there is no checkpoint that logs could follow")
    worker = logs[0][1].worker
    shards: dict[int, Mapping[str, tuple[int, int]]] = {}
    needed = [
        (ROWS, f"worker {rank}", [log for log in logs if log[1].worker.rank == rank])
        for rank in range(worker.world_size)
    ]
    needed += [
        (
            DENSE,
            f"stage {stage}",
            [log for log in logs if log[1].worker.stage == stage and log[1].worker.has_dense],
        )
        for stage in range(worker.num_stages)
    ]
    steps = [{step for _, log in having for step in log.cursors} for _, _, having in needed]
    for (part, whose, _), own_steps in zip(needed, steps, strict=True):
        if not own_steps:
            raise NotKeptError(f"the {part} of {whose} of generation {newest} are kept nowhere")
    common = set.intersection(*steps)
    if not common:
        raise NotKeptError(f"no step is kept of all, but {'; '.join(str(sorted(own)) for own in steps)}")
    step = max(common)
    if step <= int(base):
        return None
    written_by: dict[int, dict[int, list[str]]] = {}
    for part, _, having in needed:
        holder, log = next(each for each in having if step in each[1].cursors)
        written_by.setdefault(holder, {}).setdefault(log.worker.rank, []).append(part)
        cursor, shards = log.cursors[step], shards | {log.worker.rank: log.worker.shards}
    return Recovery(cursor=cursor, generation=newest, base=base, written_by=written_by, shards=shards)


def recover(
    run: RunDirectory, keeper: KeeperPlace | None, *, generation: int, config: TrainingConfig
) -> None:
    """Make a checkpoint of the newest kept state; all workers of a generation call it before they load any.

    Where it cannot be made, the log says why, and the newest checkpoint stays.

    Args:
        keeper: On this machine, for one of its workers; None for the others.
        generation: That begins.
        config: Of the training; its dense optimizer makes the kept steps again.
    """
    logs: StepLogs | None = None
    own: list[LogSummary] = []
    if keeper is not None:
        with suppress(OSError, EOFError, AuthenticationError):
            logs = connect(keeper, key=run.secret)
            own = logs.summaries()
    found: list[list[LogSummary]] = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    is_first = dist.get_rank() == 0
    agreed: list[Recovery | None] = [None]
    problem = ""
    if is_first:
        try:
            agreed = [plan_recovery(found, base=next(reversed(complete_checkpoints(run)), None))]
        except NotKeptError as error:
            problem = str(error)
    dist.broadcast_object_list(agreed)
    if (plan := agreed[0]) is not None:
        outcomes: list[TensorManifest | str] = [""] * dist.get_world_size()
        dist.all_gather_object(outcomes, _write(run, logs, plan, generation=generation, config=config))
        if is_first:
            problem = _complete(run, plan, outcomes)
        # None may look for checkpoints before.
        dist.barrier()
    if problem:
        logger.warning("generation %d begins from the newest checkpoint: %s", generation, problem)


def _write(
    run: RunDirectory, logs: StepLogs | None, plan: Recovery, *, generation: int, config: TrainingConfig
) -> TensorManifest | str:
    """Write what this worker is to write; returns why it is not written where it is not."""
    rank = dist.get_rank()
    own = plan.written_by.get(rank, {})
    if logs is None or not own:
        return TensorManifest()
    folder = f"{CHECKPOINTS}/{plan.cursor.step:08d}"
    # Files that a worker began to write there before the loss have other names.
    name = f"redo-{generation:03d}-rank-{rank:05d}.bin"
    try:
        return write_tensors(run, folder, name, _parts(logs, plan, own, config))
    except (OSError, EOFError) as error:
        return f"worker {rank} could not write what is kept: {error}"


def _parts(
    logs: StepLogs, plan: Recovery, own: Mapping[int, Sequence[str]], config: TrainingConfig
) -> Iterator[tuple[str, TensorRows]]:
    for rank, parts in own.items():
        dense, tables = logs.state(plan.generation, rank, plan.cursor.step)
        for name, tensor in dense_part(dense, config).items() if DENSE in parts else ():
            yield name, TensorRows.whole(tensor)
        for table, (rows_U, of_table) in tables.items() if ROWS in parts else ():
            first, num_rows = plan.shards[rank][table]
            if len(rows_U):
                tensors = {key: torch.from_numpy(values) for key, values in of_table.items()}
                yield from listed_rows(table, torch.from_numpy(rows_U) + first, tensors, num_rows=num_rows)


def dense_part(changes: Sequence[DenseChange], config: TrainingConfig) -> dict[str, Tensor]:
    """Return the tensors of a dense part: the whole one that comes first, and steps by the gradients behind it."""
    if not changes:
        return {}
    whole, *steps = changes
    tensors = {name: torch.from_numpy(values.copy()) for name, values in whole.values.items()}
    names = dict.fromkeys(chain.from_iterable(step.gradients or () for step in steps))
    parameters = {name: nn.Parameter(tensors[name], requires_grad=False) for name in names}
    for step in steps:
        tensors |= {name: torch.from_numpy(values) for name, values in step.values.items()}
    if not parameters:
        return tensors
    optimizer = get_dense_optimizer(config.dense_optimizer).new(
        parameters.values(), config.dense_learning_rate, l2=config.dense_l2
    )
    for name, parameter in parameters.items():
        own = optimizer.state[parameter]
        own.update({key: tensors[f"{name}.{key}"] for key in own})
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = step.learning_rate
        for name, gradient in (step.gradients or {}).items():
            parameters[name].grad = torch.from_numpy(gradient)
        optimizer.step()
        optimizer.zero_grad()
    return tensors


def _complete(run: RunDirectory, plan: Recovery, outcomes: Sequence[TensorManifest | str]) -> str:
    """Write the manifest of what all have written; returns why there is none."""
    problem = next((each for each in outcomes if isinstance(each, str)), "")
    if problem:
        return problem
    written = [each for each in outcomes if isinstance(each, TensorManifest)]
    try:
        base = read_checkpoint(run, plan.base)
        layers = {layer.folder.removeprefix(f"{CHECKPOINTS}/"): layer.tensors for layer in base.layers}
        write_manifest(
            run, plan.cursor, layers | {f"{plan.cursor.step:08d}": sum(written, start=TensorManifest())}
        )
    except (OSError, DamagedFileError) as error:
        return str(error)
    logger.info("checkpoint at step %d made of what machines have kept", plan.cursor.step)
    return ""
