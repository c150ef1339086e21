"""Times of a model's layers on one unit of a device type, at two batch sizes. No torch here.

The two batch sizes show how a stage scales over replicas: each of two replicas works on half of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import DeviceType
from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.profiling.replica_path import ReplicaPath
from heterps_core.profiling.timing import Timing
from heterps_core.units import MS_PER_S

SCHEMA_VERSION = 1

LOCAL_DEVICE_TYPE = "local-cpu"
"""Name of the device type whose unit is one core of the machine that runs the profiler."""

LOCAL_GPU_DEVICE_TYPE = "local-gpu"

_MOST_CLOCK_OVER_PROCESSOR = 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A way between replicas: fixed time of a message, and bytes per second beyond it."""

    latency_seconds: float
    bandwidth_bytes_per_s: float

    def seconds(self, num_bytes: float, *, num_messages: int) -> float:
        """Return the time of messages that hold `num_bytes` together."""
        return num_messages * self.latency_seconds + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryCost:
    """Processor time of a worker for a boundary of its stage, on either side of it."""

    microbatch_seconds: float = 0.0
    """For each micro-batch: messages in both directions, and the passes that a stage begins and ends for it."""

    byte_seconds: float = 0.0
    """For each byte that the worker sends or receives."""


NO_COST = BoundaryCost()


@dataclass(frozen=True, kw_only=True, slots=True)
class SumCost:
    """Processor time of a replica for the sum of a batch's dense gradients."""

    peer_seconds: float = 0.0
    """For each other replica."""

    byte_seconds: float = 0.0
    """For each byte that it sends: in a ring of k replicas 2 (k - 1) / k times the gradients."""


NO_SUM_COST = SumCost()


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineSpeed:
    """The limits of one unit, as measured; a roofline divides by them."""

    flops_per_s: float
    """Rate of a large matrix product, as the trainer makes it in the precision of the profile."""

    memory_bandwidth_bytes_per_s: float
    """Bytes read and written by a large copy."""

    kernel_launch_seconds: float
    """Time of an operation on a tensor of one element."""

    @classmethod
    def published(cls, device_type: DeviceType, precision: str = "float32") -> MachineSpeed:
        """Return the peaks of the data sheets, that of float32 for hardware without units for the precision."""
        peak_bf16 = device_type.peak_bf16_flops_per_s if precision == "bfloat16" else None
        return cls(
            flops_per_s=peak_bf16 or device_type.peak_fp32_flops_per_s,
            memory_bandwidth_bytes_per_s=device_type.memory_bandwidth_bytes_per_s,
            kernel_launch_seconds=device_type.kernel_launch_seconds,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReading:
    """Milliseconds of a core for reading rows; one thread of each worker reads beside the training."""

    batch_ms: float = 0.0
    """For each training batch, whatever its rows."""

    row_ms: float = 0.0
    """For each row whose row group is in memory: finding and copying it."""

    decoded_row_ms: float = 0.0
    """More for each row whose row group is not in memory: Arrow's reading, checks and hashing."""

    def seconds(self, num_samples: float, *, num_batches: float, decoded_share: float) -> float:
        """Return the time to read samples; a share of them is not in memory yet."""
        row_ms = self.row_ms + decoded_share * self.decoded_row_ms
        return (num_batches * self.batch_ms + num_samples * row_ms) / MS_PER_S


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTiming:
    """Times of one layer for one batch on one unit."""

    layer: str
    kind: str
    is_sharded: bool
    """True for embeddings, whose update grows with the batch; other layers are updated as a whole, once a step."""

    forward: Timing
    backward: Timing
    update: Timing
    """The optimizer's work on the layer's parameters or on the rows that the batch touched."""

    exchanged_bytes: float
    """Row indices, rows and gradients of the batch's distinct rows, one way each."""

    all_reduced_bytes: float
    """Dense gradients, 0 for embeddings."""

    is_estimated: bool
    source: str

    def compute_ms(self, *, update_share: float) -> float:
        """Return forward, backward and update time; a batch bears `update_share` of a dense update."""
        update_ms = self.update.median_ms * (1.0 if self.is_sharded else update_share)
        return self.forward.median_ms + self.backward.median_ms + update_ms

    def scaled(self, factor: float) -> LayerTiming:
        """Return the timing with `factor` times the time of each phase."""
        return replace(
            self,
            forward=self.forward.scaled(factor),
            backward=self.backward.scaled(factor),
            update=self.update.scaled(factor),
        )

    @property
    def spread_ms(self) -> float:
        """Sum of the three phases' spreads, tenth to ninetieth percentile."""
        return sum(phase.high_ms - phase.low_ms for phase in (self.forward, self.backward, self.update))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProfile(JsonDocument):
    """Times of all layers of a model on one unit of one device type."""

    json_form = JsonForm(
        what="a profile", version=SCHEMA_VERSION, way_out="measure it again", sums=("is_estimated",)
    )

    model: str
    graph_fingerprint: str
    device_type: str
    hardware: str
    """The measured machine; for an estimate, the machine that it was calibrated on."""

    hardware_fingerprint: str
    software: Mapping[str, str]
    batch_size: int
    """B_o."""

    half_batch_size: int
    """Rows that each of two replicas would get."""

    num_threads: int
    ids_source: str
    timings: tuple[LayerTiming, ...]
    half_batch_timings: tuple[LayerTiming, ...]
    exchange_link: Link
    """Between replicas of a stage, for rows of embeddings."""

    all_reduce_link: Link
    """Between replicas of a stage, for dense gradients."""

    boundary_link: Link
    machine_speed: MachineSpeed | None
    """Limits of one unit: measured, or published where the profile is an estimate or imported; None if unknown."""

    sum_over_step: float | None
    """Sum of the times of layers alone over the time of a step of the trainer, to which they were scaled; None for
    estimates."""

    measured_at: str
    """ISO 8601; empty for an imported profile, whose file does not say."""

    general_layers: tuple[str, ...] = ()
    """Layers that train on autograd's general path; the trainer runs the others fused."""

    precision: str = "float32"
    """Precision in which dense layers multiply, where the hardware has units for it."""

    measured_replica_path: ReplicaPath | None = None
    """Cost of the exchange of rows on the measured machine; None for profiles of earlier versions."""

    network_boundary: BoundaryCost = NO_COST
    """Between stages on two machines."""

    memory_boundary: BoundaryCost = NO_COST
    """Between stages on one machine."""

    network_sum: SumCost = NO_SUM_COST
    """Among replicas on several machines."""

    memory_sum: SumCost = NO_SUM_COST
    """Among replicas on one machine."""

    reading: RowReading = RowReading()
    """Reading on a core of the measured machine; zeros where the profiler read no data set."""

    crowding: float = 1.0
    """Processor time of a step beside another worker over that of a step alone: workers on two cores share memory and
    the last cache. 1 where a card computes."""

    clock_over_processor: float = 1.0
    """Seconds that passed for each second on a core while layers were timed: 1 on an idle machine."""

    @property
    def replica_path(self) -> ReplicaPath:
        """Cost of the exchange of rows; assumed from the latency of messages where it is not measured."""
        return self.measured_replica_path or ReplicaPath.assumed(self.exchange_link.latency_seconds)

    @property
    def was_busy(self) -> bool:
        """Whether other processes took the core for more than a fifth of the measurement."""
        return self.clock_over_processor > _MOST_CLOCK_OVER_PROCESSOR

    @property
    def busy_text(self) -> str:
        """One line on how busy this machine was; empty for an idle one. Times are those of an idle machine."""
        if not self.was_busy:
            return ""
        return f"others used the cores while timing layers: {self.clock_over_processor:.1f} s for 1 s of work"

    @property
    def general_share(self) -> float:
        """The share of the general path's layers in the time of all, of a batch that bears a whole update."""
        by_layer = {timing.layer: timing.compute_ms(update_share=1.0) for timing in self.timings}
        return sum(by_layer[name] for name in self.general_layers) / sum(by_layer.values())

    def __post_init__(self) -> None:
        if not 1 <= self.half_batch_size < self.batch_size:
            raise ConfigurationError(
                f"a profile needs two batch sizes with 1 <= half_batch_size < batch_size, "
                f"got {self.half_batch_size} and {self.batch_size}"
            )
        names = [timing.layer for timing in self.timings]
        if names != [timing.layer for timing in self.half_batch_timings]:
            raise ConfigurationError("a profile must hold the same layers at both batch sizes")

    @property
    def is_estimated(self) -> bool:
        """Whether at least one layer was not measured."""
        return any(timing.is_estimated for timing in self.timings)

    def scaled(self, factor: float) -> LayerProfile:
        """Return the profile with `factor` times the time of each layer."""
        return replace(
            self,
            timings=tuple(timing.scaled(factor) for timing in self.timings),
            half_batch_timings=tuple(timing.scaled(factor) for timing in self.half_batch_timings),
        )

    @property
    def origin(self) -> str:
        """Where the times come from, for people."""
        if self.is_estimated:
            return "estimated from data sheets"
        return f"measured on {self.hardware}"

    def update_share(self, batch_size: int) -> float:
        """Return the part of a dense update that one profiling batch bears: B_o / B."""
        return self.batch_size / batch_size

    def compute_seconds(self, layer: int, *, batch_size: int) -> float:
        """Return OCT of a layer: forward, backward and update of B_o samples on one unit, beside other units.

        A dense update is done once a training batch, so B_o of its B samples bear B_o / B of it.
        """
        compute_ms = self.timings[layer].compute_ms(update_share=self.update_share(batch_size))
        return self.crowding * compute_ms / MS_PER_S

    def compute_parallel_fraction(self, *, batch_size: int, decoded_share: float | None = None) -> float:
        """Return alpha, the share of computation that shrinks with replicas.

        Times at half the batch stand for those of two replicas; see `_parallel_fraction`. With a `decoded_share` the
        core that computes also reads the rows; see `RowReading`.
        """
        share = self.update_share(batch_size)
        whole, half = (
            sum(timing.compute_ms(update_share=share) for timing in timings) / MS_PER_S
            for timings in (self.timings, self.half_batch_timings)
        )
        if decoded_share is not None:
            whole, half = (
                seconds + self.reading.seconds(num_samples, num_batches=share, decoded_share=decoded_share)
                for seconds, num_samples in ((whole, self.batch_size), (half, self.half_batch_size))
            )
        return _parallel_fraction(whole, half, num_replicas=self.batch_size / self.half_batch_size)

    def communication_parallel_fraction(
        self, *, batch_size: int, boundary_bytes_per_sample: float = 0.0
    ) -> float:
        """Return beta, the share of communication that shrinks with replicas.

        Boundary bytes cross in one direction; 0 for in-stage communication alone. Their gradients cross in the
        other at the same time.

        The rows of embeddings and the activations at a stage's boundary belong to samples, so two replicas
        move half of them each; dense gradients belong to parameters, so every replica moves all of them.
        """
        dense_seconds = self.update_share(batch_size) * sum(
            self.all_reduce_seconds(index) for index in range(len(self.timings))
        )
        whole, half = (
            dense_seconds
            + self.exchange_link.seconds(sum(timing.exchanged_bytes for timing in timings), num_messages=0)
            + self.boundary_link.seconds(num_samples * boundary_bytes_per_sample, num_messages=0)
            for num_samples, timings in (
                (self.batch_size, self.timings),
                (self.half_batch_size, self.half_batch_timings),
            )
        )
        return _parallel_fraction(whole, half, num_replicas=self.batch_size / self.half_batch_size)

    @property
    def exchange_parallel_fraction(self) -> float:
        """The share of the exchange of rows that shrinks with replicas: several samples look up the same rows."""
        whole, half = (
            sum(timing.exchanged_bytes for timing in timings)
            for timings in (self.timings, self.half_batch_timings)
        )
        return _parallel_fraction(whole, half, num_replicas=self.batch_size / self.half_batch_size)

    def all_reduce_seconds(self, layer: int) -> float:
        """Return the time in which one of many replicas all-reduces a layer's gradients: 2 |W| / bandwidth.

        A ring moves 2 (k - 1) / k |W| bytes per replica, which this bounds. The message's latency is left out:
        a stage sends one message for all its layers together.
        """
        return self.all_reduce_link.seconds(2 * self.timings[layer].all_reduced_bytes, num_messages=0)

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain JSON values, with alpha and beta for readers."""
        return JsonDocument.to_json(self) | {
            "compute_parallel_fraction": self.compute_parallel_fraction(batch_size=self.batch_size),
            "communication_parallel_fraction": self.communication_parallel_fraction(
                batch_size=self.batch_size
            ),
        }


def _parallel_fraction(unit_seconds: float, shared_seconds: float, *, num_replicas: float) -> float:
    r"""Return the share of work that shrinks with replicas, by Amdahl's law from two times.

    With :math:`\rho = T(k) / T(1)` the share is :math:`(1 - \rho) / (1 - 1 / k)`, cut to [0, 1].
    Where there is no work at all it is 1: nothing stands in the way of replicas.

    T(1) is not negative, T(k) of the same unit, and k above 1.

    Example:
        >>> _parallel_fraction(10.0, 6.0, num_replicas=2)
        0.8
    """
    if unit_seconds == 0:
        return 1.0
    rho = shared_seconds / unit_seconds
    return min(max((1 - rho) / (1 - 1 / num_replicas), 0.0), 1.0)
