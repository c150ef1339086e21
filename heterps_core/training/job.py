"""The training job of a cluster: written once as `job.json`, read by every node and worker."""

from __future__ import annotations

import math
from dataclasses import dataclass

from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.field_rules import Count, NotNegative, Positive
from heterps_core.json_codec import JsonDocument, JsonForm, check_fields
from heterps_core.models import sizes_of
from heterps_core.plans.scheduling_plan import Stage, check_stages_cover_chain
from heterps_core.training.pipeline.pipeline_schedule import WARMUP_PER_STAGE

PRECISIONS = ("float32", "bfloat16")
"""Precisions in which dense layers multiply, float32 on hardware without units for bfloat16. Parameters, and what
crosses between stages, are float32 in both."""

AUTO = "auto"
"""In place of a precision: the planner chooses."""

WIRE_DTYPES = ("float32", "bfloat16")
"""Number formats of what workers send: activations and their gradients between stages, and between machines the rows
of tables and theirs. The update of a row, and sums, are float32 in both."""

SYNC, DELAYED = UPDATE_MODES = ("sync", "delayed")
"""When a batch's gradients are applied: before the next batch begins, or while others run (`stage_runner.py`)."""

_STEPS_TO_DELAY = 1_000
"""From as many steps on updates are delayed by default: the AUC is then that of `sync` within
0.0005, over five seeds; with 312 steps it was 0.0035 lower (docs/log, 2026-11)."""

DENSE_OPTIMIZERS = ("adam", "sgd")
"""Names of those in `gradients/optimizers.py`, which loads torch."""

EMBEDDING_OPTIMIZERS = ("rowwise-adagrad", "rowwise-adam", "sgd")
"""Names of those in `embeddings/row_optimizers.py`."""

CHAMPION, SCRATCH = "champion", "scratch"
"""Weights that a day begins with: the champion's, or new ones."""

TELL, TRAIN = "tell", "train"
"""Ways to treat rows that arrive late, for a day that was trained before."""

STOP = "stop"
"""Beside `TELL`: what is done where a day looks otherwise than the one before."""

NIGHT_SAMPLES = 1_000_000_000
"""Rows of a large night; Criteo's terabyte click logs hold 4.4 billion in 24 days, a fifth of this a day."""

PRODUCTION_ROWS_PER_SLOT = 300_000_000
"""Rows of a table of a production model. With 26 slots of 16 floats 530 GB: the tables of MLPerf's DLRM take about
100 GB, those that HeterPS was made for 10 TB."""

_STEPS_PER_EPOCH = 256
SMALLEST_BATCH, LARGEST_BATCH = 32, 4096

ROWS_OF_FIXED_COST = 60
"""Packing weights, calls and messages cost a stage as much for each micro-batch as so many more rows would; measured
on CTR-DNN (docs/LOG.md)."""

LEAST_MICROBATCH_ROWS = 64
"""Below, the fixed cost of a message and of a layer's call outweighs its work."""

_MOST_MICROBATCH_ROWS = 8_192
"""glibc maps tensors above 32 MiB again each time: whole batches of 65,536 rows took 1.57 times the processor time of
eight parts of them, and 1.6 times the memory (CTR-DNN, 2 cores, AMD EPYC, November 2026)."""


def default_batch_size(num_train_rows: int) -> int:
    """Return the power of two that gives an epoch about 256 to 512 steps, within 32 and 4096.

    Fewer steps train worse in one epoch (docs/QUALITY.md); smaller batches cost throughput.

    Example:
        >>> default_batch_size(160_000), default_batch_size(5_000), default_batch_size(10**9)
        (512, 32, 4096)
    """
    power = max(num_train_rows // _STEPS_PER_EPOCH, 1).bit_length() - 1
    return min(max(1 << power, SMALLEST_BATCH), LARGEST_BATCH)


_DENSE_RATES = {"lr": 0.01, "cross-deep": 0.003}


def default_dense_learning_rate(model: str) -> float:
    """Return that of a model by its name: ten times 0.001 for the linear one, three times for `cross-deep`.

    Adam moves each weight by its rate a step, whatever the gradient. The changes of hundreds of columns add up, but a
    weight of a linear model comes to 0.04 at most in the 88 steps of 5,661 rows, where 1 is needed. The narrow layers
    of `cross-deep` learn best from 5,661 and from 160,000 rows with 0.002 to 0.004.

    Example:
        >>> default_dense_learning_rate("lr"), default_dense_learning_rate("deepfm(embedding_dim=8)")
        (0.01, 0.001)
    """
    return _DENSE_RATES.get(sizes_of(model)[0], 0.001)


MOST_IN_ONE_TABLE = 8
"""Replicas that share the memory of a table. Each looks at the gradients of all: with 2, 4, 8, 16 a step of CTR-DNN's
takes 0.58, 0.65, 0.96, 1.22 of the time with messages over Unix sockets, one of lr's 0.96, 1.0, 1.22, 1.21, and of
wide-deep's 1.73 with 16 (processor time, 2 x86 cores, AMD EPYC, load 12 to 40)."""

ROWS_AT_ONCE = 4_096
"""Rows that a replica reads together, with one message that requests their table rows. In batches of 32 order, keys
and copies of rows take 300 microseconds a batch one by one, and 20 in blocks."""


def batches_at_once(num_rows: int) -> int:
    """Return how many batches a replica with so many rows of each reads together.

    Example:
        >>> [batches_at_once(num_rows) for num_rows in (32, 4096, 65536)]
        [128, 1, 1]
    """
    return max(1, ROWS_AT_ONCE // max(num_rows, 1))


def default_microbatches(batch_size: int, *, num_stages: int) -> int:
    """Return the number of micro-batches m, a power of two; a pipeline of one stage has nothing to overlap.

    With S equal stages a step of B rows takes as long as (B + m F) (1 + (S - 1) / (3 m)) rows on one of them: the
    second factor is what filling and draining the pipeline costs where too few micro-batches leave gaps that
    weight gradients, a third of the work, cannot close, and F the fixed cost. It is least where
    m = sqrt(B (S - 1) / (3 F)). Unequal stages wait less and want fewer, so m is rounded down, but not to one:
    stages that take turns with a whole batch overlap nothing but its weight gradients.

    Batches of any pipeline are cut where an activation of all their rows would find no place in the heap.

    Example:
        >>> [default_microbatches(batch_size, num_stages=2) for batch_size in (64, 256, 4096, 16384)]
        [1, 2, 4, 8]
        >>> [default_microbatches(batch_size, num_stages=1) for batch_size in (8192, 65536)]
        [1, 8]
    """
    if num_stages == 1:
        return _least_microbatches(batch_size)
    best = max(2.0, math.sqrt(batch_size * (num_stages - 1) / (3 * ROWS_OF_FIXED_COST)))
    count = 1 << int(math.log2(best))
    while count > 1 and (batch_size % count or batch_size // count < LEAST_MICROBATCH_ROWS):
        count //= 2
    return max(count, _least_microbatches(batch_size))


def _least_microbatches(batch_size: int) -> int:
    """Return the power of two that cuts a batch into micro-batches of `_MOST_MICROBATCH_ROWS`, if it divides it."""
    count = 1
    while batch_size // count > _MOST_MICROBATCH_ROWS and batch_size % (2 * count) == 0:
        count *= 2
    return count


def default_update_mode(num_steps: float) -> str:
    """Return the update mode of a training of so many steps."""
    return DELAYED if num_steps >= _STEPS_TO_DELAY else SYNC


def delayed_microbatches(batch_size: int, *, num_stages: int) -> int:
    """Return the number of micro-batches with which a pipeline with delayed updates does not wait for itself.

    The least divisor of the batch that lets every stage be `WARMUP_PER_STAGE` ahead of the next one; all rows
    where there are fewer.

    Example:
        >>> [delayed_microbatches(4096, num_stages=num_stages) for num_stages in (1, 2, 3, 4)]
        [1, 4, 8, 16]
    """
    least = max(WARMUP_PER_STAGE * (num_stages - 1), _least_microbatches(batch_size))
    return next((m for m in range(least, batch_size) if batch_size % m == 0), batch_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """The numbers of a training run."""

    batch_size: Count
    """Samples per step over the whole cluster, at least one per micro-batch and replica."""

    num_microbatches: Count
    """Parts of a batch that are in the pipeline one after the other, at least 1."""

    num_epochs: Count
    seed: int
    max_steps: Count | None = None
    """Batches after which training ends before its epochs do: their rows are drawn evenly from all rows."""

    dense_optimizer: str = "adam"
    """Name in `DENSE_OPTIMIZERS`."""

    dense_learning_rate: Positive = 1e-3
    """At the first step; it falls in a straight line to nothing at the last."""

    embedding_optimizer: str = "rowwise-adagrad"
    """Name in `ROW_OPTIMIZERS`."""

    embedding_learning_rate: Positive = 0.05
    """Falls like the dense one."""

    dense_l2: NotNegative = 0.0
    """Strength of the penalty on the weights of dense layers, half their sum of squares; biases have none."""

    embedding_l2: NotNegative = 0.0
    """The same of the rows that a step updates."""

    clip_norm: Positive | None = None
    """Longest gradient of all dense parameters together, of every stage; a longer one is scaled down to this length
    before the update. None never clips."""

    warmup_steps: Count | None = None
    """First steps, in which both learning rates rise in a straight line; None begins with the whole rates."""

    label_weights: tuple[Positive, ...] = ()
    """Weight of each label in the loss, a weighted mean over labels; empty for equal weights."""

    checkpoint_interval_steps: Count = 200
    """Steps between two checkpoints; one more is written at the end."""

    num_threads: Count = 1

    precision: str = "float32"
    """Name in `PRECISIONS`."""

    wire_dtype: str = "float32"
    """Name in `WIRE_DTYPES`."""

    update_mode: str = "sync"
    """Name in `UPDATE_MODES`; a pipeline of one stage has nothing to delay."""

    embedding_memory_bytes: Count | None = None
    """Host memory of a worker for rows of tables and their optimizer state; the others are on its disk, from where
    the rows of the next batches are fetched in time. None holds all rows in memory."""

    embedding_folders: tuple[str, ...] = ()
    """Where a worker keeps the rows that are not in memory, a folder on each of its disks, which have rows in
    turns. Empty on a rented machine for its own disks, or without any for the folder of temporary files, elsewhere
    for the run's folder."""

    day_number: int = 0
    """The day that is trained on, in days since 0001-01-01; 0 where the data has none. Dynamic ids note it as the one
    when they were last seen."""

    def __post_init__(self) -> None:
        check_fields(self)
        for kind, name, known in (
            ("precision", self.precision, PRECISIONS),
            ("wire dtype", self.wire_dtype, WIRE_DTYPES),
            ("update mode", self.update_mode, UPDATE_MODES),
        ):
            if name not in known:
                raise UnknownNameError(kind, name, known)
        if self.batch_size % self.num_microbatches:
            raise ConfigurationError(
                f"batch_size must be a multiple of num_microbatches, got {self.batch_size} and "
                f"{self.num_microbatches}; take a batch size of "
                f"{-(-self.batch_size // self.num_microbatches) * self.num_microbatches}"
            )

    def num_steps(self, batches_per_epoch: int) -> int:
        """Return the batches of the whole training, over which learning rates fall."""
        steps = self.num_epochs * batches_per_epoch
        return min(steps, self.max_steps or steps)

    @property
    def microbatch_size(self) -> int:
        """Samples of one micro-batch over all replicas of a stage."""
        return self.batch_size // self.num_microbatches


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerState(JsonDocument):
    """State of the optimizers when a model was exported: a file of its own beside the weights."""

    sha256: str
    dense_optimizer: str
    """The optimizer that the state belongs to."""

    embedding_optimizer: str

    def left_aside(self, *, dense_optimizer: str, embedding_optimizer: str) -> list[str]:
        """Return, for people, which of these optimizers cannot go on with it; learning rates do not matter."""
        kinds = {
            "dense": (self.dense_optimizer, dense_optimizer),
            "embedding": (self.embedding_optimizer, embedding_optimizer),
        }
        return [
            f"the {part} optimizer starts again, as it is {new} and not {earlier} any more"
            for part, (earlier, new) in kinds.items()
            if earlier != new
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartModel(JsonDocument):
    """An exported model that training goes on from; its files stand in the run directory."""

    version: str
    """In the registry."""

    run_id: str
    """The run that trained it."""

    weights_sha256: str
    optimizer_state: OptimizerState | None = None
    """None for a model that was exported without it, whose optimizers start again."""

    accumulators_kept: float = 1.0
    """By which Adagrad's accumulators are multiplied: they never forget, and slow a table down night by night."""


def _least_rows(stage: Stage) -> int:
    """Return the fewest rows of a micro-batch of which each replica has one: the sum of shares over the least."""
    shares = stage.replica_shares
    return -(-sum(shares) // min(shares))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob(JsonDocument):
    """A model, its data, its stages and its configuration."""

    json_form = JsonForm(what="job", version=1)

    run_id: str
    model: str
    """Registry name or import path of the model."""

    dataset: str
    """Folder of the prepared data set on the flow's host; nodes elsewhere take the copy in the run directory."""

    stages: tuple[Stage, ...]
    config: TrainingConfig
    start_model: StartModel | None = None
    """The first step sees its weights; None draws them. A checkpoint of the run itself comes before it."""

    worker_bytes: tuple[int, ...] = ()
    """Host memory that a worker of each stage needs; empty where that is not known, and nothing is refused for it."""

    def __post_init__(self) -> None:
        check_stages_cover_chain(self.stages)
        least_rows = max(map(_least_rows, self.stages))
        if self.config.microbatch_size < least_rows:
            shares = next((stage.shares for stage in self.stages if _least_rows(stage) == least_rows), ())
            raise ConfigurationError(
                f"a micro-batch must have a row for each replica, got {self.config.microbatch_size} rows for "
                + (f"shares {shares}" if shares else f"{least_rows} replicas")
                + f"; raise batch_size to {least_rows * self.config.num_microbatches} or more"
            )

    @property
    def replicas_per_stage(self) -> tuple[int, ...]:
        """Number of workers of each stage."""
        return tuple(stage.num_replicas for stage in self.stages)

    @property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """Part of each batch that each worker of each stage takes."""
        return tuple(stage.replica_shares for stage in self.stages)
