"""What a run is charged besides the time of its units, and the sizes in which units are sold.

Every term is off at 0. The terms stand inside the objective (`cost_model/objective.py`), so that a plan
which saves on compute and pays for it at start-up, on the network or in lost work is not preferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from heterps_core.errors import MalformedProblemError, UnknownNameError
from heterps_core.planning.problem.field_checks import (
    as_object,
    check_count,
    check_not_negative,
    check_positive,
    check_text,
    member,
    shown,
)

MAX_UNITS_PER_INSTANCE = 512
"""Largest machine that is believed; a guard against files that are no problem files."""

MAX_INSTANCE_SIZES = 64

COST_TERMS = {
    "startup": ("startup_seconds", "teardown_seconds"),
    "search": ("search_and_profiling_usd",),
    "storage": ("storage_usd_per_hour",),
    "transfer": ("transfer_usd_per_gb",),
    "spot-risk": ("checkpoint_seconds", "restart_seconds"),
}
"""Term -> the fields that switch it on; the names that users leave out by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceSize:
    """An instance that is sold, as a carrier of units of one device type."""

    name: str
    units: int
    price_usd_per_hour: float

    @classmethod
    def list_from_json(cls, path: str, document: object) -> tuple[InstanceSize, ...]:
        """Read a list of sizes.

        Raises:
            MalformedProblemError: It is no list, or a field is missing or breaks its rule.
        """
        if not isinstance(document, Sequence) or isinstance(document, str):
            raise MalformedProblemError(path, f"must be a list of instances, got {shown(document)}")
        if len(document) > MAX_INSTANCE_SIZES:
            raise MalformedProblemError(
                path, f"must hold at most {MAX_INSTANCE_SIZES} instances, got {len(document)}"
            )
        sizes = []
        for index, entry in enumerate(document):
            place = f"{path}[{index}]"
            values = as_object(place, entry)
            sizes.append(cls(**{name.name: member(values, place, name.name) for name in fields(cls)}))
        return tuple(sizes)


def check_instances(path: str, sizes: Sequence[InstanceSize]) -> None:
    """Check the fields of instance sizes.

    Raises:
        MalformedProblemError: One breaks its rule; carries its path.
    """
    for index, size in enumerate(sizes):
        place = f"{path}[{index}]"
        check_text(f"{place}.name", size.name)
        check_count(f"{place}.units", size.units, at_most=MAX_UNITS_PER_INSTANCE)
        check_positive(f"{place}.price_usd_per_hour", size.price_usd_per_hour)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraCosts:
    """Terms of a run's cost besides its units' time; 0 leaves a term out.

    Raises:
        MalformedProblemError: A value is negative or no number.
    """

    startup_seconds: float = 0.0
    """From the launch of the fleet to its first step; all units are billed."""

    teardown_seconds: float = 0.0
    """From the last step to the end of the instances; all units are billed."""

    search_and_profiling_usd: float = 0.0
    """Spent before the run, whatever the plan."""

    storage_usd_per_hour: float = 0.0
    """Checkpoints, data and whatever else is kept while the run lasts."""

    transfer_usd_per_gb: float = 0.0
    """Of 1e9 bytes that cross between two zones, both sides' charges together."""

    checkpoint_seconds: float = 0.0
    """delta: how long training pauses for one checkpoint."""

    restart_seconds: float = 0.0
    """From an interruption to the first step after it, all units billed."""

    def __post_init__(self) -> None:
        for term in fields(self):
            check_not_negative(f"extra_costs.{term.name}", getattr(self, term.name))

    @classmethod
    def from_json(cls, path: str, document: object) -> ExtraCosts:
        """Read the object of a problem file; a field that is missing is 0.

        Raises:
            MalformedProblemError: It is no object, holds a field that is not known, or a value breaks its rule.
        """
        values = as_object(path, document)
        known = [term.name for term in fields(cls)]
        for name in values:
            if name not in known:
                raise MalformedProblemError(
                    f"{path}.{name}", f"is not a known term; known are: {', '.join(known)}"
                )
        return cls(**values)

    def without(self, terms: Sequence[str]) -> ExtraCosts:
        """Return the costs with the named terms of `COST_TERMS` left out.

        Raises:
            UnknownNameError: There is no such term.
        """
        for term in terms:
            if term not in COST_TERMS:
                raise UnknownNameError("cost term", term, COST_TERMS)
        return replace(self, **{name: 0.0 for term in terms for name in COST_TERMS[term]})


NO_EXTRA_COSTS = ExtraCosts()
"""The plain planning contract."""
