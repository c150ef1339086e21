"""Cases of fault injection: one fault at one step of a run's life, and circumstances that are against it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from heterps_core.hardware import Market


class Fault(StrEnum):
    """What happens at a step."""

    RAISE = "raise"
    """The request never arrives, and neither do its repetitions."""

    TIME_OUT = "time out"
    """It is executed and its answer is lost; the repetition arrives."""

    TIME_OUT_FOR_GOOD = "time out for good"
    """It is executed and its answer is lost, those of its repetitions too."""

    KILL_BEFORE = "kill -9 before"
    KILL_AFTER = "kill -9 after"


class Kind(StrEnum):
    """What else is against a run, its watch and the sweep."""

    PLAIN = "nothing else"
    LEDGER_TRUNCATED = "ledger truncated"
    """While the run spends, or after its end."""

    DISK_FULL = "disk of the ledger full"
    """When the first sweep comes; at the second there is room again."""

    CLOCK_BEHIND = "clock -2 h"
    """Of the run's host."""

    CLOCK_AHEAD = "clock +2 h"
    OTHER_REGION = "other region in the shell"
    """Of the sweep."""

    TAGS_LATE = "tags late"
    """A sweep comes right after the launch, and finds the machines by their ids alone."""

    MIXED_CODES = "mixed fleet codes"
    """A zone without capacity, in which one type is not even sold."""

    FAILED_LAUNCHES = "failed launches under a cap"
    """No zone has the second part of the plan."""

    LATE_ANSWER = "AWS knows a part late"
    """One refusal of the table of those that pass, at one of its places."""

    OUTAGE = "AWS or the network away"
    """For every request from some step on: throttling, errors of the server, no connection, or lost answers."""

    LATE_MACHINES = "machines known late"
    """EC2 shows no machine of a fleet that it has just launched."""

    ENDED_PENDING = "machines ended while pending"
    """One of the first fleet or all of the second; once."""

    FULL_ZONES = "full zones"
    """Up to four have the first part of the plan and not the second."""

    SPOT_SUBNETS = "full subnets on spot"
    """Purchases are of one subnet each, and all but the last have nothing."""

    LATE_ROLE = "role of a node late"
    """Its credentials are not there yet, or the bucket refuses it, or the bucket is busy."""


PASSES = (
    Kind.LATE_ANSWER,
    Kind.OUTAGE,
    Kind.LATE_MACHINES,
    Kind.ENDED_PENDING,
    Kind.FULL_ZONES,
    Kind.SPOT_SUBNETS,
    Kind.LATE_ROLE,
)
"""Which no night may end by: they pass within a minute, or another purchase is there."""

WITHOUT_FAULT = (Kind.TAGS_LATE, Kind.MIXED_CODES, Kind.FAILED_LAUNCHES)
"""Whose circumstance is the fault."""

WATCHED = (Kind.LEDGER_TRUNCATED, Kind.CLOCK_BEHIND, Kind.CLOCK_AHEAD)
"""In which the run goes on until its cap ends it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One fault, drawn from a seed."""

    fault: Fault | None
    step: int
    market: Market
    zones: int
    """Zones that have no capacity for the second part of the plan, before one that has."""

    is_ledger_lost: bool
    """Before the sweep."""

    kind: Kind = Kind.PLAIN
    kept_share: float = 1.0
    """Of a ledger that is truncated."""

    cap_usd: float | None = None
    """Of a run whose launches fail."""

    choice: int = 0
    """Which of the forms of its kind, counted on from the first again after the last."""

    lasts_s: float = 0.0
    """How long that which passes lasts, at most a minute."""


def draw(seed: int, *, steps: Mapping[int, Sequence[bool]], kinds: Sequence[Kind] = (Kind.PLAIN,)) -> Case:
    """Return the case of a seed.

    Args:
        seed: Of the case.
        steps: By the number of full zones, for each step of a life without a fault whether it is a request.
        kinds: Of which one is drawn.
    """
    generator = random.Random(seed)
    fault = generator.choice(list(Fault))
    zones = generator.choice(sorted(steps))
    only_requests = fault in (Fault.TIME_OUT, Fault.TIME_OUT_FOR_GOOD)
    possible = [i for i, is_request in enumerate(steps[zones]) if is_request or not only_requests]
    step = generator.choice(possible)
    market = generator.choice(list(Market))
    is_ledger_lost = generator.random() < 0.25
    kind = generator.choice(list(kinds))
    # A run that is watched must come to its spending in half of the cases.
    is_without_fault = kind in WITHOUT_FAULT or (kind in WATCHED and generator.random() < 0.5)
    return Case(
        fault=None if is_without_fault else fault,
        step=step,
        market=market,
        zones=1 if kind is Kind.MIXED_CODES else zones,
        is_ledger_lost=is_ledger_lost and kind in (Kind.PLAIN, Kind.OTHER_REGION),
        kind=kind,
        kept_share=generator.choice((0.0, 0.3, 0.6)),
        cap_usd=round(generator.uniform(0.03, 0.09), 4) if kind is Kind.FAILED_LAUNCHES else None,
    )


def draw_passing(seed: int) -> Case:
    """Return the case of a seed in which something passes; kinds follow one another."""
    generator = random.Random(seed)
    kind = PASSES[seed % len(PASSES)]
    return Case(
        fault=None,
        step=generator.randrange(28),
        market=Market.SPOT if kind is Kind.SPOT_SUBNETS else generator.choice(list(Market)),
        zones=generator.randint(1, 4),
        is_ledger_lost=False,
        kind=kind,
        choice=seed // len(PASSES),
        lasts_s=generator.choice((60.0, generator.uniform(1.0, 60.0))),
    )
