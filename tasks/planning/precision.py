"""The precision in which layers multiply, where it is left to the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from heterps_core.device_types import get_device_type
from heterps_core.text_table import usd_text
from heterps_core.training.job import AUTO, PRECISIONS
from tasks.profiling import ProfiledModel
from tasks.running.progress import log_step

LEARN_AS_WELL_IN_BFLOAT16 = frozenset(
    {"lr", "wide-deep", "deepfm", "dlrm", "dcnv2", "din", "mmoe", "ctrdnn", "2emb"}
)
"""Models, with their own sizes, whose AUC and log-loss in bfloat16 equal those in float32 within the spread of five
seeds (docs/QUALITY.md)."""

LEAST_SAVING = 0.05
"""Least share of a plan's cost that bfloat16 must save. The two precisions are measured one after the other, and the
estimates for hardware without units for bfloat16 differed by 3 to 4 % (2 x86 cores, AMD EPYC, load 8, 2026-11-26)."""


def precisions_of(asked: str, model: str) -> tuple[str, ...]:
    """Return the precisions among which a plan is searched, float32 first.

    Args:
        asked: Name in `PRECISIONS`, or `AUTO`.
        model: Name with the settings that are not the model's own.
    """
    if asked != AUTO:
        return (asked,)
    return PRECISIONS if model in LEARN_AS_WELL_IN_BFLOAT16 else PRECISIONS[:1]


def in_float32_without_units(rounded: ProfiledModel, whole: ProfiledModel) -> ProfiledModel:
    """Return profiles in bfloat16 with those in float32 for hardware that multiplies in float32 in both."""
    profiles = {
        name: whole.profiles[name]
        if profile.is_estimated and get_device_type(name).peak_bf16_flops_per_s is None
        else profile
        for name, profile in rounded.profiles.items()
    }
    return replace(rounded, profiles=profiles)


def cheapest_precision(costs_usd: Mapping[str, float]) -> str:
    """Return the precision of the cheapest plan: the first one, unless another saves `LEAST_SAVING` of its cost.

    Example:
        >>> cheapest_precision({"float32": 1.0, "bfloat16": 0.94})
        'bfloat16'
    """
    first = next(iter(costs_usd))
    cheapest = min(costs_usd, key=costs_usd.__getitem__)
    taken = cheapest if costs_usd[cheapest] <= (1 - LEAST_SAVING) * costs_usd[first] else first
    if len(costs_usd) > 1:
        shown = ", ".join(f"{usd_text(usd)} in {name}" for name, usd in costs_usd.items())
        log_step("precision", f"{taken}: the plan costs {shown}; the quality is equal (docs/QUALITY.md)")
    return taken
