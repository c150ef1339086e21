"""Profiles of a model for each device type: this machine's measured or from the cache, the others' estimated.

All that a profile depends on is in its key. A file that cannot be read counts as missing, and stops no run.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from heterps_core.device_types import get_device_type
from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.json_codec import JsonDocument
from heterps_core.json_file import replace_json
from heterps_core.models.model_graph import ModelGraph
from heterps_core.profiling.analytic_profile import estimate_profile
from heterps_core.profiling.layer_profile import LOCAL_DEVICE_TYPE, SCHEMA_VERSION, LayerProfile
from heterps_core.profiling.machine import Machine, software_versions, this_machine
from heterps_core.profiling.measuring_process import (
    ProfileRequest,
    measure_in_fresh_process,
)

logger = logging.getLogger(__name__)

Kept = TypeVar("Kept", bound=JsonDocument)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileKey:
    """All that a profile depends on."""

    graph_fingerprint: str
    hardware_fingerprint: str
    device_type: str
    software: Mapping[str, str]
    batch_size: int
    num_threads: int
    ids_source: str
    optimizers: tuple[str, str]
    precision: str

    @classmethod
    def of(
        cls, request: ProfileRequest, graph: ModelGraph, machine: Machine | None, *, device_type: str
    ) -> ProfileKey:
        """Return the key of what a request would measure on a machine, or on any of a device type."""
        return cls(
            graph_fingerprint=graph.fingerprint(),
            hardware_fingerprint=machine.fingerprint() if machine else device_type,
            device_type=device_type,
            software=software_versions(),
            batch_size=request.batch_size,
            num_threads=request.num_threads,
            ids_source=request.ids_source,
            optimizers=(request.dense_optimizer, request.embedding_optimizer),
            precision=request.precision,
        )

    @classmethod
    def of_device_type(
        cls,
        request: ProfileRequest,
        graph: ModelGraph,
        *,
        device_type: str,
        software: Mapping[str, str] | None = None,
    ) -> ProfileKey:
        """Return the key of what a request measures on any machine of a device type, with tables of any size.

        Tables grow every night, and a look-up takes as long. `software` None: what is installed here.
        """
        key = cls.of(request, graph.without_table_sizes(), None, device_type=device_type)
        versions = software or key.software
        # Builds of the same version for other hardware ("2.13.0+cpu") run the same code.
        return replace(
            key, software={name: versions[name].partition("+")[0] for name in ("heterps", "torch")}
        )

    def file_name(self) -> str:
        """Return a name that differs wherever the key does."""
        values = asdict(self)
        if self.precision == "float32":
            # As it was before there was a choice, so that rented measurements are found again.
            del values["precision"]
        text = json.dumps({"schema_version": SCHEMA_VERSION, **values}, sort_keys=True)
        return f"{self.device_type}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


class ProfileCache(Generic[Kept]):
    """A folder of profiles, one file each.

    None as the folder keeps nothing; it need not be there yet.
    """

    def __init__(self, directory: Path | None, kind: type[Kept]) -> None:
        self._directory = directory
        self._kind = kind

    def get_or_measure(self, key: ProfileKey, measure: Callable[[], Kept]) -> Kept:
        """Return the profile of a key; measure and keep it where there is none that can be read."""
        found = self.get(key)
        if found is None:
            found = measure()
            self.keep(key, found)
        return found

    def get(self, key: ProfileKey) -> Kept | None:
        """Return the profile of a key, or None where there is none that can be read."""
        if self._directory is None:
            return None
        path = self._directory / key.file_name()
        try:
            return self._kind.from_json(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, ConfigurationError) as error:
            logger.warning(
                "the cached profile %s counts as missing, because it cannot be used: %s", path, error
            )
            return None

    def keep(self, key: ProfileKey, profile: Kept) -> None:
        """Keep a profile in the place of an earlier one of its key; where that fails it is only not kept."""
        if self._directory is None:
            return
        path = self._directory / key.file_name()
        try:
            replace_json(path, profile.to_json())
        except OSError as error:
            logger.warning("the profile is not kept in %s: %s", path, error)


def profile_model(
    request: ProfileRequest,
    graph: ModelGraph,
    device_types: Iterable[str],
    *,
    cache_directory: Path | None,
) -> dict[str, LayerProfile]:
    """Return a profile for each device type, `LOCAL_DEVICE_TYPE` always among them and first.

    The graph is that of `layer_profiler.trace_model`; without a cache directory nothing is kept.

    Raises:
        UnknownNameError: A device type is not known.
        HeterpsError: The measurement failed.
    """
    wanted = [name for name in dict.fromkeys(device_types) if name != LOCAL_DEVICE_TYPE]
    try:
        hardware = [get_device_type(name) for name in wanted]
    except UnknownNameError as error:
        raise UnknownNameError("device type", error.name, [LOCAL_DEVICE_TYPE, *error.known]) from None
    key = ProfileKey.of(request, graph, this_machine(), device_type=LOCAL_DEVICE_TYPE)
    measured = ProfileCache(cache_directory, LayerProfile).get_or_measure(
        key, lambda: measure_in_fresh_process(request)
    )
    estimates = {each.name: estimate_profile(graph, measured, each) for each in hardware}
    return {LOCAL_DEVICE_TYPE: measured, **estimates}
