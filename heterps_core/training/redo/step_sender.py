"""Sends what each step of a worker changed to two keepers: that of its own machine and that of the next one."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import AuthenticationError

import torch.distributed as dist
from torch import Tensor

from heterps_core.compute_device import CPU
from heterps_core.training.checkpoint import TrainingCursor, all_tensors
from heterps_core.training.checkpoint_writer import CheckpointWriter
from heterps_core.training.pipeline.stage_model import StageModel
from heterps_core.training.redo.keeper import KeeperPlace, StepLogs, connect
from heterps_core.training.redo.step_log import (
    WHOLE_INTERVAL_STEPS,
    DenseChange,
    LoggedWorker,
    Rows,
    StepChanges,
    Values,
)
from heterps_core.training.storage.named_tensors import dense_optimizer_state, parameters_of, tables_by_tensor
from heterps_core.transport.rank_layout import RankLayout

logger = logging.getLogger(__name__)

ARRIVAL_LIMIT_S = 5.0
"""For the changes of a step to be sent; less than the silence after which a worker counts as lost."""


def buddy_of(node_id: str, places: Sequence[KeeperPlace]) -> KeeperPlace | None:
    """Return the place on the next machine in a ring of those of all workers; None where there is one machine.

    Example:
        >>> places = [KeeperPlace("a", "a:1"), KeeperPlace("a", "a:1"), KeeperPlace("b", "b:1")]
        >>> buddy_of("a", places).node_id, buddy_of("b", places).node_id
        ('b', 'a')
    """
    machines = list(dict.fromkeys(places))
    names = [place.node_id for place in machines]
    following = machines[(names.index(node_id) + 1) % len(machines)]
    return None if following.node_id == node_id else following


class StepSender:
    """Of one worker; all workers of the world make one together.

    Args:
        own: Its own place.
        key: The run's.
        generation: Of the workers.
        layout: Of all ranks.
        model: This replica's layers and shards.
        checkpoints: Of this replica.
    """

    def __init__(
        self,
        own: KeeperPlace,
        *,
        key: bytes,
        generation: int,
        layout: RankLayout,
        model: StageModel,
        checkpoints: CheckpointWriter,
    ) -> None:
        self._model, self._checkpoints = model, checkpoints
        self._rank = dist.get_rank()
        stage, _ = layout.position(self._rank)
        places: list[KeeperPlace] = [own] * dist.get_world_size()
        dist.all_gather_object(places, own)
        of_tables = tables_by_tensor(model)
        self._dense = {
            name: each.detach() for name, each in all_tensors(model).items() if name not in of_tables
        }
        self._parameters = parameters_of(model)
        # What its steps change besides parameters is sent with their gradients.
        by_gradients = self._parameters.keys() | dense_optimizer_state(model).keys()
        self._others = {name: each for name, each in self._dense.items() if name not in by_gradients}
        # On a CPU the same steps give the same numbers wherever they are made.
        has_state = len(by_gradients) > len(self._parameters)
        self._sends_gradients = model.device == CPU and has_state
        self._num_noted = 0
        self._gradients: dict[str, Tensor] = {}
        self._new_dense: dict[int, DenseChange] = {}
        # Replicas of a stage have the same dense part, so where they are on two machines, two have it already.
        firsts = {places[rank].node_id: rank for rank in reversed(layout.ranks[stage])}
        is_on_one_machine = len(firsts) == 1
        own_has_dense = self._rank in sorted(firsts.values())[:2]
        self._keepers: list[tuple[KeeperPlace, StepLogs, LoggedWorker]] = []
        buddy = buddy_of(own.node_id, places)
        for place, has_dense in ((own, own_has_dense), (buddy, own_has_dense and is_on_one_machine)):
            if place is None:
                continue
            worker = LoggedWorker(
                generation=generation,
                rank=self._rank,
                world_size=len(places),
                stage=stage,
                num_stages=layout.num_stages,
                shards={name: (table.rows.first, table.num_rows) for name, table in model.tables.items()},
                has_dense=has_dense,
            )
            try:
                self._keepers.append((place, connect(place, key=key), worker))
            except (OSError, EOFError, AuthenticationError) as error:
                _tell(place, error)
        self._has_dense = own_has_dense
        self._waiting: queue.Queue[Callable[[], StepChanges] | None] = queue.Queue()
        self._has_copied, self._has_arrived = threading.Event(), threading.Event()
        self._has_copied.set()
        self._has_arrived.set()
        self._thread = threading.Thread(target=self._send, name="step-log", daemon=True)

    def begin(self, step: int) -> None:
        """Begin the logs behind a step, before the next one begins."""
        for table in self._model.tables.values():
            table.log_rows(is_on=True)
        self._call(lambda logs, worker: logs.begin(worker, step))
        self._thread.start()

    def note_gradients(self) -> None:
        """Keep the gradients by which the dense part is about to be updated; nothing may write to them later."""
        if self._sends_gradients and self._has_dense and self._keepers:
            self._gradients = {
                name: parameter.grad
                for name, parameter in self._parameters.items()
                if parameter.grad is not None
            }

    def note_dense(self, step: int, *, learning_rate: float) -> None:
        """Note the dense part, which was just updated by the gradients of a step with a learning rate."""
        if not (self._has_dense and self._keepers):
            return
        if self._sends_gradients and self._num_noted % WHOLE_INTERVAL_STEPS:
            gradients = {name: gradient.detach().numpy() for name, gradient in self._gradients.items()}
            change = DenseChange(
                values=_copied(self._others), gradients=gradients, learning_rate=learning_rate
            )
        else:
            change = DenseChange(values=_copied(self._dense))
        self._num_noted += 1
        self._new_dense[step], self._gradients = change, {}

    def finish_step(self, cursor: TrainingCursor, *, begins_checkpoint: bool) -> None:
        """Begin to copy and send what a step changed, once what the step before did has arrived."""
        if not self._keepers:
            for table in self._model.tables.values():
                table.log_rows(is_on=False)
            return
        copies = {name: table.take_step() for name, table in self._model.tables.items()}
        dense, self._new_dense = self._new_dense, {}
        if not self._has_arrived.wait(ARRIVAL_LIMIT_S):
            for place, *_ in self._keepers:
                _tell(place, TimeoutError(f"nothing arrived there for {ARRIVAL_LIMIT_S:.0f} s"))
            self._keepers = []
            return
        self._has_arrived.clear()
        self._has_copied.clear()
        self._waiting.put(
            lambda: StepChanges(
                cursor=cursor,
                dense=dense,
                rows={name: _on_host(*copy()) for name, copy in copies.items()},
                begins_checkpoint=begins_checkpoint,
            )
        )

    def wait_for_copies(self) -> None:
        """Wait until rows may change again: those that the step before changed are copied."""
        self._has_copied.wait()

    def close(self) -> None:
        """Send no more."""
        self._waiting.put(None)

    def _send(self) -> None:
        while (copied := self._waiting.get()) is not None:
            try:
                changes = copied()
            finally:
                self._has_copied.set()
            self._call(partial(self._add, changes, self._checkpoints.complete_step))
            self._has_arrived.set()

    @staticmethod
    def _add(changes: StepChanges, complete_step: int | None, logs: StepLogs, worker: LoggedWorker) -> None:
        own = changes if worker.has_dense else changes.without_dense()
        logs.add(worker.generation, worker.rank, own, complete_step)

    def _call(self, action: Callable[[StepLogs, LoggedWorker], None]) -> None:
        for each in self._keepers:
            place, logs, worker = each
            try:
                action(logs, worker)
            except (OSError, EOFError) as error:
                # A training goes on without it: after a loss it then begins from the newest checkpoint.
                self._keepers = [other for other in self._keepers if other is not each]
                _tell(place, error)


def _tell(place: KeeperPlace, error: Exception) -> None:
    logger.warning("steps are not logged on %s any more: %s", place.node_id, error or type(error).__name__)


def _copied(tensors: dict[str, Tensor]) -> Values:
    return {name: tensor.to(CPU, copy=True).numpy() for name, tensor in tensors.items()}


def _on_host(rows_U: Tensor, tensors: dict[str, Tensor]) -> Rows:
    return rows_U.numpy(), {name: each.to(CPU).numpy() for name, each in tensors.items()}
