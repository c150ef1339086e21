"""A profile of a rented machine, with its instance type, date and cost; and the cache that keeps it.

Nodes of the local provider measure in a dry run; their profiles are never kept for planning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import hardware_name, moment_of
from heterps_core.json_codec import JsonDocument, JsonForm
from heterps_core.machine import software_versions
from heterps_core.models.model_graph import ModelGraph
from heterps_core.profiling import VALID_FOR
from heterps_core.profiling.layer_profile import LayerProfile
from heterps_core.profiling.measuring_process import ProfileRequest
from heterps_core.profiling.profile_cache import device_profile_name, keep_profile, kept_profile

FOLDER = "rented"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProfile(JsonDocument):
    """Profile that one machine measured."""

    json_form = JsonForm(
        what="a device's profile",
        version=1,
        way_out="measure it again",
    )

    device_type: str
    """The hardware, without the market in which it is bought."""

    instance_type: str
    is_dry_run: bool
    """True for a profile of the flow's own machine, which only stands for the device type."""

    profile: LayerProfile
    run_id: str = ""
    """The run that rented the machine; empty until its bill is known."""

    cost_usd: float = 0.0
    charged_to: str | None = None
    """The run that bore `cost_usd` as its cost of search and profiling; None before any run did."""

    @property
    def expires_at(self) -> datetime:
        """Time from which plans ignore it."""
        return moment_of(self.profile.measured_at) + VALID_FOR

    def is_valid(self, now: datetime) -> bool:
        """Tell whether plans may be made with it."""
        return not self.is_dry_run and now < self.expires_at

    def __str__(self) -> str:
        return f"measured on {self.instance_type} {moment_of(self.profile.measured_at):%Y-%m-%d}"

    def in_place_of(self, estimate: LayerProfile) -> LayerProfile:
        """Return an estimate with the measured times of layers.

        The estimate keeps what one machine alone cannot measure: the links to other machines, the row indices of the
        data and the time to read them, and layers without a measurement.
        """
        return replace(
            estimate,
            hardware=self.profile.hardware,
            hardware_fingerprint=self.profile.hardware_fingerprint,
            software=self.profile.software,
            timings=_measured_where_known(self.profile, estimate, "timings"),
            half_batch_timings=_measured_where_known(self.profile, estimate, "half_batch_timings"),
            network_boundary=self.profile.network_boundary,
            network_sum=self.profile.network_sum,
            measured_replica_path=self.profile.measured_replica_path or estimate.measured_replica_path,
            machine_speed=self.profile.machine_speed or estimate.machine_speed,
            sum_over_step=self.profile.sum_over_step,
            crowding=self.profile.crowding,
            clock_over_processor=self.profile.clock_over_processor,
            measured_at=self.profile.measured_at,
        )


def _measured_where_known(measured: LayerProfile, estimate: LayerProfile, name: str) -> Any:
    return tuple(
        other if own.is_estimated else replace(own, exchanged_bytes=other.exchanged_bytes)
        for own, other in zip(getattr(measured, name), getattr(estimate, name), strict=True)
    )


class DeviceProfileCache:
    """A folder of profiles that hold for a device type."""

    def __init__(self, profiles_directory: Path) -> None:
        self._folder = profiles_directory / FOLDER

    def find(
        self, request: ProfileRequest, graph: ModelGraph, *, device_type: str, now: datetime
    ) -> DeviceProfile | None:
        """Return the profile of a device type, in any market and for any data set; None without one that counts."""
        name = device_profile_name(
            without_dataset(request),
            graph,
            device_type=hardware_name(device_type),
            software=software_versions(),
        )
        found = kept_profile(self._folder / name, DeviceProfile)
        return found if found is not None and found.is_valid(now) else None

    def keep(self, request: ProfileRequest, graph: ModelGraph, measured: DeviceProfile) -> None:
        """Keep the profile of a machine, for the versions of software that measured it.

        Raises:
            ConfigurationError: It is a dry run, or of another model or batch size than was asked for.
        """
        profile = measured.profile
        if measured.is_dry_run:
            raise ConfigurationError(
                f"what is kept for {measured.device_type} must be measured on such a machine, but this was "
                f"measured in a dry run on {profile.hardware}"
            )
        if (profile.graph_fingerprint, profile.batch_size) != (graph.fingerprint(), request.batch_size):
            raise ConfigurationError(
                f"a machine must measure what it was asked for, {graph.name!r} with {request.batch_size} rows, but "
                f"{measured.instance_type} measured {profile.model!r} with {profile.batch_size}"
            )
        name = device_profile_name(
            without_dataset(request), graph, device_type=measured.device_type, software=profile.software
        )
        keep_profile(self._folder / name, measured)


def without_dataset(request: ProfileRequest) -> ProfileRequest:
    """Return the request as a rented machine gets it: it has no data set, and draws row indices by Zipf's law."""
    return replace(request, dataset=None, dataset_fingerprint="")
