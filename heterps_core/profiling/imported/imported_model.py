"""What an imported profile becomes: a graph and profiles that the planner takes like its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from heterps_core.models.model_graph import ModelGraph
from heterps_core.profiling.profiles.layer_profile import LayerProfile

OPTIMIZER_VALUES_PER_PARAMETER = 2
"""Adam's two moments, as in this project's own profiles; the files do not name an optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedModel:
    """A model that was profiled by others."""

    graph: ModelGraph
    profiles: Mapping[str, LayerProfile]
    """By device type: those that the file holds, and estimates from them."""

    provenance: str
    """Which file, in which format, for people."""
