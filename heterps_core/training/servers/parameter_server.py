"""One parameter server: it holds a row range of every table of the first stage and serves any worker of the next.

Two threads listen to each worker. One answers pulls, once the updates that a pull must not miss are applied: bounded
staleness as in stale synchronous parallel (Ho et al. 2013), with dense parameters synchronous (PERSIA, Lian et al.
2021). The other applies gradients to rows as they come, without waiting for other workers. The main thread stands
where other workers compute: a step of it ends when the updates of all workers are applied. So checkpoints, which are
made between steps, hold exactly the steps that they say, in the form of any other stage.

With a bound of 0 rows are those of a synchronous run: workers sum their dense gradients before they push, so none
pushes before all have the rows of the step. Only what the row optimizer makes of the gradients of several workers
one after the other, and not of their sum, still differs; with SGD nothing does.

Shapes: U distinct rows, D width of a row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from heterps_core.embeddings.sharded_table import ShardedTable
from heterps_core.errors import TrainingError
from heterps_core.training.pipeline.stage_exchange import RowSlice, replica_slice
from heterps_core.training.pipeline.stage_runner import MicroBatch
from heterps_core.training.servers.parameter_server_messages import (
    END,
    NO_STEP,
    Channel,
    Mail,
    Patience,
    PullRequest,
    PushNotice,
)
from heterps_core.training.storage.run_directory import STALENESS, RunDirectory
from heterps_core.transport.lost_workers import LostWorkerError, lost_worker
from heterps_core.transport.rank_layout import RankLayout

logger = logging.getLogger(__name__)

LISTENING_LIMIT_S = 86_400.0
"""A listener may wait through checkpoints and evaluations; the main thread limits the wait for what is due, and ends
the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessSeen:
    """How old the rows of training steps were that a server handed out."""

    num_pulls: int
    mean_steps: float
    """Steps before a pull's own whose updates were not yet in its rows, on average over pulls."""

    max_steps: int


class ParameterServer:
    """Serves rows; stands in a training loop in place of a `StageRunner`.

    Args:
        tables: This server's shards, in the order of layers.
        layout: Ranks of servers and stages.
        replica: Which of the servers this one is.
    """

    is_last = False

    def __init__(self, tables: Sequence[ShardedTable], *, layout: RankLayout, replica: int) -> None:
        self._replica = replica
        self._tables = tables
        self._layout = layout
        self._mail = Mail(layout)
        self._workers = layout.ranks[0]
        self.num_replicas = len(layout.servers)
        self._patience = Patience()
        self._table_locks = [threading.Lock() for _ in tables]
        self._unpushed: dict[tuple[int, int], deque[Tensor]] = {
            (worker, number): deque() for worker in self._workers for number in range(len(tables))
        }
        """Rows of pulls, relative to the shard, whose gradients have yet to come, by worker and table."""

        self._first_step = 0
        self._num_steps_due = 0
        self._num_readings_due = 0
        self._changed = threading.Condition()
        # All below is read and written under the condition.
        self._num_pushes = dict.fromkeys(self._workers, 0)
        self._num_readings = dict.fromkeys(self._workers, 0)
        self._num_ends = dict.fromkeys(self._workers, 0)
        self._is_trained = False
        self._failure: Exception | None = None
        self._num_pulls = self._sum_staleness_steps = self._max_staleness_steps = 0

    @property
    def silence_limit_s(self) -> float:
        """Longest wait for another worker."""
        return self._patience.limit_s

    @property
    def staleness(self) -> StalenessSeen:
        """What training pulls have seen up to now."""
        with self._changed:
            return StalenessSeen(
                num_pulls=self._num_pulls,
                mean_steps=self._sum_staleness_steps / max(self._num_pulls, 1),
                max_steps=self._max_staleness_steps,
            )

    def start(self, step: int) -> None:
        """Listen from now on; `step` steps were trained before."""
        self._first_step = step
        for worker in self._workers:
            for listen in (self._answer_pulls, self._take_pushes):
                name = f"{listen.__name__.strip('_')}-{worker}"
                threading.Thread(target=self._run, args=(listen, worker), name=name, daemon=True).start()

    def close(self, run: RunDirectory) -> None:
        """Wait until all workers have said that they are done, and leave how stale rows were."""
        self._expect_no_more_steps()
        self._wait_for_all(self._num_ends, 2)
        seen = self.staleness
        run.write_json(f"{STALENESS}/{self._replica:04d}.json", asdict(seen))
        logger.info(
            "%d pulls saw rows %.2f steps old, at most %d", seen.num_pulls, seen.mean_steps, seen.max_steps
        )

    def row_slices(self, num_rows: int, num_microbatches: int) -> list[tuple[int, RowSlice]]:
        """Return for each micro-batch of a batch its size and no rows: a server works on none."""
        sizes = [
            replica_slice(num_rows, num_microbatches, index).num_rows for index in range(num_microbatches)
        ]
        return [(size, RowSlice(0, 0)) for size in sizes if size]

    def train_step(self, microbatches: Sequence[MicroBatch]) -> list[float]:
        """Wait until the updates of all workers for one more step are applied.

        Raises:
            LostWorkerError: A worker died, or was silent for too long.
        """
        started_s = time.perf_counter()
        self._num_steps_due += 1
        self._wait_for_all(self._num_pushes, self._num_steps_due * len(self._tables))
        self._patience.step_took(time.perf_counter() - started_s)
        return []

    def predict(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        """Wait until all workers have the rows of a batch that is not trained on; raises as `train_step` does."""
        self._expect_no_more_steps()
        self._num_readings_due += len(microbatches) * len(self._tables)
        self._wait_for_all(self._num_readings, self._num_readings_due)
        return torch.empty(0)

    def lost_worker(self, rank: int, error: RuntimeError) -> LostWorkerError:
        """Return what to say where a message of another worker did not come; `error` is gloo's."""
        return lost_worker(self._layout, rank, error, silence_limit_s=self.silence_limit_s)

    def _expect_no_more_steps(self) -> None:
        """Answer also those pulls that were made for steps which will not come, after a stop."""
        with self._changed:
            self._is_trained = True
            self._changed.notify_all()

    def _wait_for_all(self, done_by: Mapping[int, int], due: int) -> None:
        """Wait until every worker has done as much as is due."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or min(done_by.values()) >= due, self.silence_limit_s
            )
            if self._failure is not None:
                raise self._failure
            slowest = min(done_by, key=lambda worker: done_by[worker])
            if done_by[slowest] < due:
                raise self._lost(slowest, has_ended=False)

    def _lost(self, worker: int, *, has_ended: bool) -> LostWorkerError:
        return LostWorkerError.at(self._layout, worker, limit_s=self.silence_limit_s, has_ended=has_ended)

    def _run(self, listen: Callable[[int], None], worker: int) -> None:
        failure: Exception | None = None
        try:
            listen(worker)
        except LostWorkerError:
            failure = self._lost(worker, has_ended=True)
        except Exception as error:
            failure = error
        with self._changed:
            self._failure = self._failure or failure
            self._num_ends[worker] += 1
            self._changed.notify_all()

    def _answer_pulls(self, worker: int) -> None:
        num_open = len(self._tables)
        while num_open:
            request = self._mail.receive_header(PullRequest, worker, Channel.PULL, limit_s=LISTENING_LIMIT_S)
            if request.step == END:
                num_open -= 1
                continue
            table = self._tables[request.table]
            rows_U = torch.empty(request.num_rows, dtype=torch.int64)
            self._mail.receive(rows_U, worker, Channel.PULL).wait(LISTENING_LIMIT_S)
            local_rows_U = rows_U - table.rows.first
            if request.step != NO_STEP:
                self._unpushed[worker, request.table].append(local_rows_U)
            self._wait_for_updates(request)
            with self._table_locks[request.table]:
                answer_UD = table.read_rows(local_rows_U)
            self._mail.send(answer_UD, worker, Channel.ANSWER).wait(LISTENING_LIMIT_S)
            if request.step == NO_STEP:
                with self._changed:
                    self._num_readings[worker] += 1
                    self._changed.notify_all()

    def _wait_for_updates(self, request: PullRequest) -> None:
        """Wait until the updates are applied that a pull must not miss."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_trained or self._num_steps_applied() >= request.least_steps,
                LISTENING_LIMIT_S,
            )
            if request.step != NO_STEP and not self._is_trained:
                staleness_steps = request.step - self._num_steps_applied()
                self._num_pulls += 1
                self._sum_staleness_steps += staleness_steps
                self._max_staleness_steps = max(self._max_staleness_steps, staleness_steps)

    def _take_pushes(self, worker: int) -> None:
        num_open = len(self._tables)
        while num_open:
            notice = self._mail.receive_header(PushNotice, worker, Channel.PUSH, limit_s=LISTENING_LIMIT_S)
            if notice.step == END:
                num_open -= 1
                continue
            table = self._tables[notice.table]
            gradients_UD = torch.empty(notice.num_rows, table.dimension)
            self._mail.receive(gradients_UD, worker, Channel.PUSH).wait(LISTENING_LIMIT_S)
            local_rows_U = self._unpushed[worker, notice.table].popleft()
            if len(local_rows_U) != notice.num_rows:
                raise TrainingError(
                    f"worker {worker} must push gradients of the {len(local_rows_U)} rows of table {table.name!r} "
                    f"that it pulled for step {notice.step}, got {notice.num_rows}"
                )
            with self._table_locks[notice.table]:
                table.update_rows(local_rows_U, gradients_UD, learning_rate=notice.learning_rate)
            with self._changed:
                self._num_pushes[worker] += 1
                self._changed.notify_all()

    def _num_steps_applied(self) -> int:
        """Return how many steps have the updates of all workers in the tables."""
        return self._first_step + min(self._num_pushes.values()) // len(self._tables)
