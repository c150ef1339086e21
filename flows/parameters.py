"""The parameters of each flow, declared here and nowhere else; `flows/parameter_model.py` has what is made of them.

Checks that need files, prices or more than one parameter are in `flows/parameter_checks.py`.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from flows.parameter_model import FlowParameters, OneOf
from heterps_core.device_types import matching
from heterps_core.hardware import Market
from heterps_core.models import DEFAULT_MODEL, SIZES, sized_model
from heterps_core.planning.search.schedulers import SCHEDULERS
from heterps_core.training import job
from infra.billing.caps import Caps
from infra.inventory import HERE
from infra.providers import PROVIDERS
from infra.providers.aws.prices import AwsPrices
from infra.providers.base import REGION
from tasks.judging.promotion_gates import PromotionGates
from tasks.records.mlflow_names import night_name

if TYPE_CHECKING:
    from tasks.sources import ClickSource

LARGEST_SEED = 2**32 - 1
"""NumPy's and Optuna's generators take no larger one."""

USUAL_DEVICE_TYPES = ["cpu-c7i", "cpu-r6in", "gpu-t4", "gpu-t4-20gbit"]
"""For comparisons of methods, and for measurements, which rent a machine of each."""
GATES = PromotionGates()
ENGINE: dict[str, Any] = {field.name: field.default for field in fields(job.TrainingConfig)}


def of_unit(unit: str, **bounds: float) -> Any:
    """Return what marks a number: its unit, for people, and its range."""
    limits: dict[str, Any] = dict(bounds)
    return Field(json_schema_extra={"unit": unit}, allow_inf_nan=False, **limits)


def _plain_number(value: Any) -> Any:
    """Return a whole number that was written as 1e9; any other value as it is."""
    if (
        isinstance(value, str)
        and re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d{1,2}", value)
        and float(value).is_integer()
    ):
        return int(float(value))
    return value


DeviceTypes = Annotated[list[str], AfterValidator(matching)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Samples = Annotated[int, of_unit("samples", ge=1), BeforeValidator(_plain_number)]
Rows = Annotated[int, of_unit("rows", ge=2)]
BatchSize = Annotated[int, of_unit("samples", ge=4)]
"""A batch below 4 cannot be profiled at half its size in two micro-batches."""

Throughput = Annotated[float, of_unit("samples/s", ge=0)]
Usd = Annotated[float, of_unit("USD", gt=0)]
UsdPerHour = Annotated[float, of_unit("USD/hour", gt=0)]
Day = Annotated[str, Field(json_schema_extra={"pattern": r"^\d{4}-\d{2}-\d{2}$"})]


class SourceParameters(FlowParameters):
    """Where the rows are, and what they mean."""

    data: str | None = None
    """File, folder or pattern of clicks in time order, or a folder of folders day=YYYY-MM-DD, here or in S3
    (s3://bucket/prefix); a table such as delta://folder/table or iceberg://catalog/namespace.table (docs/DATA.md);
    empty for a synthetic stream."""

    snapshot: str | None = None
    """Version of a Delta table or snapshot id of an Iceberg table to train on; empty for the newest, which the run
    records."""

    schema_file: str | None = None
    """TOML or JSON file that names label, numeric and categorical columns, as heterps init writes it; empty for the
    Criteo format."""

    prepare_sql: str | None = None
    """File with a SQL query that makes the rows of each day, or all, of the table `rows` and of files in quotes; $day
    is the day. Empty to train on the data as it lies."""

    @property
    def source(self) -> ClickSource:
        """The source of these rows."""
        from tasks.sources import ClickSource

        return ClickSource(**self.values_for(ClickSource))


class _ModelParameters(SourceParameters):
    """What is trained, and on which rows."""

    model: str = DEFAULT_MODEL
    """Name of a model (cross-deep, lr, wide-deep, deepfm, dlrm, dcnv2, rankmixer, wukong; for histories din,
    sasrec, hstu; for several labels mmoe, ple; of the papers ctrdnn, ctrdnn-16, 2emb, matchnet, nce), or your own as
    package.module:function."""

    epochs: Count = 1
    """Passes over the training rows."""

    batch_size: BatchSize | None = None
    """Samples per training step; empty to choose it from the number of rows."""

    size: Annotated[str, OneOf("size", SIZES)] = "m"
    """Size of cross-deep: s for 0.4 of the time at a little less AUC, l for a little more at twice the time
    (docs/QUALITY.md); hidden_widths, embedding_dim and model_settings win over it."""

    hidden_widths: Annotated[list[Count], Field(min_length=1)] | None = None
    """Widths of the fully connected layers of a model, such as 256 128; empty for its own."""

    embedding_dim: Count | None = None
    """Values of an embedding vector; empty for the model's own."""

    model_settings: dict[str, bool | int | float | list[int]] = Field({})
    """Other parameters of the function that builds the model, such as {"dropout": 0.2, "cross_layers": 2}."""

    dense_optimizer: Annotated[str, OneOf("dense optimizer", job.DENSE_OPTIMIZERS)] = ENGINE[
        "dense_optimizer"
    ]
    """Optimizer of the dense layers: adam or sgd."""

    embedding_optimizer: Annotated[str, OneOf("embedding optimizer", job.EMBEDDING_OPTIMIZERS)] = ENGINE[
        "embedding_optimizer"
    ]
    """Optimizer of the embedding rows: rowwise-adagrad, rowwise-adam or sgd."""

    precision: Annotated[str, OneOf("precision", (*job.PRECISIONS, job.AUTO))] = ENGINE["precision"]
    """Number format in which dense layers multiply: float32; bfloat16, where the hardware has units for it; or auto,
    for bfloat16 where the model learns as well in it (docs/QUALITY.md) and the plan costs less."""

    wire_dtype: Annotated[str, OneOf("wire dtype", job.WIRE_DTYPES)] | None = None
    """Number format in which activations and gradients cross between stages, and table rows and theirs between
    machines: float32; or bfloat16, for half the bytes. Empty for bfloat16
    where a link of the plan has less than 10 Gbit/s and the plan costs less with it, else float32."""

    update_mode: Annotated[str, OneOf("update mode", job.UPDATE_MODES)] | None = None
    """When the gradients of a batch are applied: sync, before the next one begins, for which a pipeline drains in
    each step; or delayed, two batches later, so that nothing waits. Empty for delayed from 1,000 steps on."""

    @property
    def sized_model(self) -> str:
        """The model's name, with the sizes that are not its own."""
        sizes = {"hidden_widths": self.hidden_widths, "embedding_dim": self.embedding_dim}
        given = {name: value for name, value in sizes.items() if value is not None}
        return sized_model(self.model, **SIZES[self.size] | given | self.model_settings)

    @property
    def trained_with(self) -> dict[str, Any]:
        """What the times of layers depend on besides the model and the batch."""
        names = {"dense_optimizer", "embedding_optimizer", "precision", "num_threads"}
        return self.model_dump(include=names)


class TrainedParameters(_ModelParameters):
    """All that decides the trained model: saved beside a run, and read again when it is resumed."""

    max_samples: Samples | None = None
    """Most samples to train on, drawn evenly from the training rows, in one epoch; empty for all."""

    day: Day | None = None
    """Day to train on, YYYY-MM-DD, judged on the one after it; empty for the latest whose next day is there too. Only
    for data that is cut into days."""

    late_rows: Annotated[str, OneOf("use of late rows", (job.TELL, job.TRAIN))] = job.TELL
    """What is done with files that a day has got since it was trained on: tell, or train them with this day."""

    start_from: Annotated[str, OneOf("start", (job.CHAMPION, job.SCRATCH))] = job.CHAMPION
    """What a day begins with: champion goes on with its weights, scratch draws new ones."""

    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    """Seed of all random choices in search and training."""

    dense_learning_rate: Positive | None = None
    """Learning rate of the dense layers at the first step; it falls in a straight line to 0 at the last. Empty for
    0.01 of lr, and 0.001 of all other models."""

    embedding_learning_rate: Positive = ENGINE["embedding_learning_rate"]
    """Learning rate of the embedding rows; falls like the dense one."""

    dense_l2: Annotated[float, Field(ge=0, allow_inf_nan=False)] = ENGINE["dense_l2"]
    """Strength of the penalty on the weights of dense layers: half the sum of their squares; biases have none."""

    embedding_l2: Annotated[float, Field(ge=0, allow_inf_nan=False)] = ENGINE["embedding_l2"]
    """The same of embedding rows, each in the steps that update it."""

    clip_norm: Positive | None = None
    """Longest gradient of the dense layers, all stages together; a longer one is scaled down to this norm. Empty to
    clip none."""

    warmup_steps: Annotated[int, of_unit("steps", ge=1)] | None = None
    """First steps, in which both learning rates rise in a straight line; empty for none."""

    label_weights: dict[str, Positive] = Field({})
    """Weight of a label in the loss by its name, where a schema has several, such as {"purchase": 3}; 1 for the
    others."""

    embedding_memory_bytes: Annotated[int, of_unit("bytes", ge=1)] | None = ENGINE["embedding_memory_bytes"]
    """Memory of a worker for rows of embedding tables with their optimizer state; the others are on its disk, and
    those that the next batches look up are fetched in time. Empty to hold all in memory. For stages on CPUs."""

    embedding_folders: list[str] = Field([])
    """Folders of a worker for those other rows, one on each disk, used in turns. Empty for the run's own
    folder, or with a bucket for the machine's own disks, else the folder that TMPDIR names."""

    num_threads: Annotated[int, of_unit("threads", ge=1)] = ENGINE["num_threads"]
    """CPU threads of a worker. Plans assume one for workers on a CPU; more are for dry runs and for GPU workers."""


class _PlannedParameters(_ModelParameters):
    """What a plan is made of, and what it must reach."""

    provider: Annotated[str, OneOf("provider", PROVIDERS)] = HERE
    """Where machines come from: here is this machine, local is a dry run of rented machines on it, aws rents."""

    device_types: DeviceTypes = Field([])
    """Hardware for layers: device types of `heterps catalogue`, or patterns such as gpu-l4*; empty for all types that
    can be rented."""

    regions: list[str] = Field([])
    """Regions in which machines may be rented, by name or pattern such as eu-*; a plan takes the one where it costs
    least with the bytes that cross. Empty for the region of the data, where nothing crosses."""

    throughput_floor_samples_per_s: Throughput = 0.0
    """Least throughput of a plan in samples/s; 0 for none."""

    planned_samples: Samples | None = None
    """Samples of a larger night that a dry run is planned for, such as 1e9; empty for the rows that are trained."""

    planned_rows_per_slot: Rows | None = None
    """Rows of each table that a dry run is planned for; empty for those of the data, or with planned_samples for the
    300,000,000 of a production model."""

    max_usd_per_hour: UsdPerHour | None = None
    """Refuse a plan that costs more in USD/hour; empty for no cap."""

    max_usd_per_run: Usd | None = None
    """Refuse a plan that costs more in USD for the whole run, and stop a run at a checkpoint before it has spent
    more; empty for no cap."""

    max_usd_per_month: Usd | None = None
    """The same for all runs of a calendar month together; empty for no cap."""

    @property
    def caps(self) -> Caps:
        """What may be spent."""
        return Caps(**self.values_for(Caps))


class TrainParameters(_PlannedParameters, TrainedParameters):
    """Parameters of train-ctr, which trains a click model on machines that a proven plan chose."""

    scheduler: Annotated[str, OneOf("scheduler", SCHEDULERS)] = "reinforce"
    """Search method of the plan; exact proves every plan, and its own is taken where it is cheaper."""

    budget_evaluations: Count = 2_000
    """Plans that each search method may rate."""

    max_planning_seconds: Annotated[float, of_unit("seconds", ge=0.1)] | None = None
    """Processor time of all proofs of zones, floors and markets; longer ones end with a gap; empty for 60."""

    markets: list[Annotated[str, OneOf("market", tuple(map(str, Market)))]] = Field(
        [str(Market.ON_DEMAND)], min_length=1
    )
    """How machines may be bought: on-demand, spot, or both; one machine is always on-demand."""

    target_auc: Annotated[float, Field(gt=0.5, lt=1)] | None = None
    """AUC that the plan shall reach at least cost: short trainings on a twentieth of the rows say how many samples it
    needs in which batch, by an extrapolation. Empty to train on all rows; the batch is then chosen by the curve of an
    earlier run where there is one."""

    ready_by: str | None = None
    """Time of day in the time zone of the schedule, such as 06:00, by which the model must be ready: raises the floor
    as far as that needs; empty for no deadline."""

    max_restarts_per_hour: Annotated[int, Field(ge=0)] | None = None
    """Times within an hour that the run goes on by itself after machines or workers were lost; the next loss ends it.
    Empty for 2, and 2 more for each interruption an hour that the plan expects."""

    max_wait_minutes: Annotated[float, of_unit("minutes", ge=0)] = 720.0
    """Longest wait for another run of the workspace to end; 0 ends this one at once where another is at work."""

    plan_only: bool = False
    """Launch nothing: say what would be bought, for how much and why, and end."""

    again: bool = False
    """Train a day once more that has been trained on with the same data and model."""

    data_checks: Annotated[str, OneOf("use of data checks", (job.TELL, job.STOP))] = job.TELL
    """What is done where the day to be judged on looks otherwise than the one to train on (share of clicks, missing
    and new values, distributions): tell, or stop before anything is launched."""

    baseline: bool = True
    """Fit a logistic regression and, where it is installed, LightGBM on a sample of the rows, after the training, and
    show the model beside them; a first champion must not be proven worse than the logistic regression."""

    min_auc_gain: Number = GATES.min_auc_gain
    """Promote only if the lower confidence bound of (challenger - champion) AUC, on rows that neither has seen,
    exceeds this; negative tolerates a regression."""

    max_log_loss_increase: Annotated[float, of_unit("nats")] = GATES.max_log_loss_increase
    """Promote only if the upper confidence bound of (challenger - champion) log-loss is at most this."""

    max_calibration_increase: Number = GATES.max_calibration_increase
    """Promote only if the ratio of predicted to observed clicks is at most this much farther from 1 than the
    champion's."""

    max_cost_ratio: Positive = GATES.max_cost_ratio
    """Promote only if a million samples cost, by plan, at most this many times the champion's, or the gain in AUC is
    proven."""

    min_positives: Annotated[int, of_unit("clicks", ge=2)] = GATES.min_positives
    """Decide only on rows with so many clicks and so many rows without one."""

    promotion_confidence: Annotated[float, Field(gt=0, lt=1)] = GATES.promotion_confidence
    """Confidence level of the bounds in the gates of promotion."""

    resume_run_id: str | None = None
    """Go on with the training of this run from its newest checkpoint, with its data, model and numbers."""

    @property
    def gates(self) -> PromotionGates:
        """What a challenger must show."""
        return PromotionGates(**self.values_for(PromotionGates))

    def check(self) -> None:
        """Check all that can be known before a run; see `check_run`."""
        from flows.parameter_checks import check_run

        check_run(self)

    def name_of(self, run_id: str) -> str:
        """Return what a person calls a run by, such as "2026-11-20 ctrdnn exact"."""
        return night_name(self.day, run_id, model=self.sized_model, scheduler=self.scheduler)


class ProfileParameters(_PlannedParameters):
    """Parameters of profile-devices, which measures a model on a rented machine of each device type."""

    precision: Annotated[str, OneOf("precision", job.PRECISIONS)] = ENGINE["precision"]
    """Number format of the measured products: float32; or bfloat16, where the hardware has units for it."""

    device_types: DeviceTypes = Field([])
    """Hardware to measure: device types of `heterps catalogue`, or patterns such as gpu-l4*; empty for cpu-c7i,
    cpu-r6in, gpu-t4 and gpu-t4-20gbit, or for all machines of an inventory."""

    def check(self) -> None:
        """Check as for train-ctr."""
        from flows.parameter_checks import check_run

        check_run(TrainParameters(**dict(self.values_for(TrainParameters), scheduler="exact")))


class BackfillParameters(FlowParameters):
    """Parameters of backfill-ctr, which trains each day of a range in order, as train-ctr does."""

    first_day: Day
    """First day to train on, YYYY-MM-DD."""

    last_day: Day
    """Last day to train on; the day after it must be there too."""

    data: str
    """Folder of folders day=YYYY-MM-DD, or a pattern of them, here or in S3 (s3://bucket/prefix)."""

    settings: dict[str, Any] = Field({})
    """Other parameters of train-ctr by name, such as {"epochs": 2, "again": true}."""

    def check(self) -> None:
        """Check the days, and the settings as those of train-ctr."""
        from flows.parameter_checks import check_backfill

        check_backfill(self)


class CompareParameters(FlowParameters):
    """Parameters of compare-schedulers, which compares search methods on the same problems, evaluations and seeds."""

    models: list[str] | None = None
    """Models to plan for a night's job, with and without a floor and caps; empty for those of the papers, or for none
    where problem files are given."""

    problem: list[str] | None = None
    """Problem files to compare on; may be given more than once."""

    methods: list[Annotated[str, OneOf("scheduler", SCHEDULERS)]] | None = None
    """Search methods; empty for all."""

    reward: Annotated[str, OneOf("reward", ("cost-model", "measured"))] = "cost-model"
    """What the methods learn of a plan: its cost by the cost model, or the step of the trainer on this machine."""

    budget_measurements: Count = 12
    """With measured rewards, plans that each method may run with each seed; each takes some seconds, once."""

    device_types: DeviceTypes = Field(USUAL_DEVICE_TYPES, min_length=1)
    """Hardware for the layers of the models: device types of `heterps catalogue`, or patterns such as gpu-l4*."""

    throughput_floor_samples_per_s: Throughput = 0.0
    """Least throughput of a plan for a model in samples/s; 0 for none."""

    seeds: Count = 5
    """How many seeds each method searches with, from 0."""

    budget_evaluations: Count = 2_000
    """Plans that each search may rate, where the method's own default is not less; as many as a night by default."""

    max_seconds_per_search: Annotated[float, of_unit("seconds", ge=1)] = 120.0
    """A method that takes longer is given up on the problem."""

    def check(self) -> None:
        """Check models, files and device types."""
        from flows.parameter_checks import check_comparison

        check_comparison(self)


class PriceParameters(FlowParameters):
    """Parameters of refresh-prices, which fetches the prices and sizes of all device types."""

    regions: list[str] = Field([REGION], min_length=1)
    """Regions of AWS, by name or pattern such as eu-*."""

    def check(self) -> None:
        """Check that AWS has the regions."""
        AwsPrices.regions_named(self.regions)
