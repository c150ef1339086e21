"""Profiles of rented machines that later plans are made with: one for each device type, model, batch and software."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

from heterps_core.errors import ConfigurationError
from heterps_core.models.model_graph import ModelGraph
from heterps_core.profiling.measuring_process import ProfileRequest
from heterps_core.profiling.profiles.device_profile import DeviceProfile, hardware_name
from heterps_core.profiling.profiles.profile_cache import ProfileCache, ProfileKey

FOLDER = "rented"
"""Beside the profiles that were measured on the machine itself."""


class DeviceProfileCache:
    """A folder of profiles that hold for a device type.

    Args:
        profiles_directory: Of the workspace.
    """

    def __init__(self, profiles_directory: Path) -> None:
        self._cache = ProfileCache(profiles_directory / FOLDER, DeviceProfile)

    def find(
        self, request: ProfileRequest, graph: ModelGraph, *, device_type: str, now: datetime
    ) -> DeviceProfile | None:
        """Return what is known of a device type; None where nothing matches, or it has expired.

        Args:
            request: What is to be planned with; its data set does not matter.
            graph: Of the same model.
            device_type: In any market.
            now: With a time zone.
        """
        key = ProfileKey.of_device_type(
            without_dataset(request), graph, device_type=hardware_name(device_type)
        )
        found = self._cache.get(key)
        return found if found is not None and found.is_valid(now) else None

    def keep(self, request: ProfileRequest, graph: ModelGraph, measured: DeviceProfile) -> None:
        """Keep what a machine measured, under the software that it measured with.

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
        self._write(request, graph, measured)

    def charge(self, request: ProfileRequest, graph: ModelGraph, kept: DeviceProfile, *, run_id: str) -> None:
        """Write down that a run has borne the cost of a profile."""
        self._write(request, graph, replace(kept, charged_to=run_id))

    def _write(self, request: ProfileRequest, graph: ModelGraph, measured: DeviceProfile) -> None:
        software = measured.profile.software
        key = ProfileKey.of_device_type(
            without_dataset(request), graph, device_type=measured.device_type, software=software
        )
        self._cache.keep(key, measured)


def without_dataset(request: ProfileRequest) -> ProfileRequest:
    """Return the request as a rented machine gets it: it has no data set, and draws row indices by Zipf's law."""
    return replace(request, dataset=None, dataset_fingerprint="")
