"""Profiles that were measured before, so that a nightly run measures only what changed.

A profile holds as long as the model, the machine, the software, the batch size and the row numbers are the same;
all of them are in its key. A file that cannot be read is measured anew: a cache must never stop a run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heterps_core.errors import ConfigurationError
from heterps_core.graph.model_graph import ModelGraph
from heterps_core.profiling.layer_profile import SCHEMA_VERSION, LayerProfile
from heterps_core.profiling.machine import Machine, software_versions
from heterps_core.profiling.measuring_process import ProfileRequest

logger = logging.getLogger(__name__)


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
    """Of dense layers and of embeddings."""

    @classmethod
    def of(
        cls, request: ProfileRequest, graph: ModelGraph, machine: Machine, *, device_type: str
    ) -> ProfileKey:
        """Return the key of what a request would measure on a machine."""
        return cls(
            graph_fingerprint=graph.fingerprint(),
            hardware_fingerprint=machine.fingerprint(),
            device_type=device_type,
            software=software_versions(),
            batch_size=request.batch_size,
            num_threads=request.num_threads,
            ids_source=request.ids_source,
            optimizers=(request.dense_optimizer, request.embedding_optimizer),
        )

    def file_name(self) -> str:
        """Return a name that differs wherever the key does."""
        text = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, sort_keys=True)
        return f"{self.device_type}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


class ProfileCache:
    """A folder of profiles, one file each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get_or_measure(self, key: ProfileKey, measure: Callable[[], LayerProfile]) -> LayerProfile:
        """Return the profile of a key; measure and keep it where there is none that can be read."""
        path = self._directory / key.file_name()
        found = _read(path)
        if found is not None:
            return found
        profile = measure()
        _write(path, profile)
        return profile


def _read(path: Path) -> LayerProfile | None:
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        return LayerProfile.from_json(document)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError, ConfigurationError) as error:
        logger.warning("measuring anew, because the cached profile %s cannot be used: %s", path, error)
        return None


def _write(path: Path, profile: LayerProfile) -> None:
    """Write the file whole or not at all; where that fails the profile is only not kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, suffix=".partial", delete=False
        ) as file:
            try:
                json.dump(profile.to_json(), file, indent=1)
                file.flush()
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        logger.warning("the profile is not kept in %s: %s", path, error)
