"""A synthetic click stream day by day, whose truth moves: what a nightly line needs to show that it keeps up.

The effects of a day are a turn of two fixed draws, cos(drift n) a + sin(drift n) b for day number n, so they keep
their size, those of two days correlate by the cosine of the angle between them, and any day can be written without
those before it. In slots of many values a share of the values is replaced by new ones each day, with effects of
their own, as campaigns come and go.
"""

from __future__ import annotations

import math
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from heterps_core.data.reading.days import PARTITION_PREFIX
from heterps_core.data.synthetic.click_stream import ClickStream, write_rows
from heterps_core.data.synthetic.click_truth import (
    CALIBRATION_STREAM,
    SLOT_CARDINALITIES,
    ClickEffects,
    ClickTruth,
    FloatArray,
    draw_value_effects,
    value_texts,
)
from heterps_core.errors import ConfigurationError

DEFAULT_DRIFT = 0.1
"""Angle in radians by which the truth turns a day: a week later its effects correlate by 0.76 with those before."""

DEFAULT_NEW_ID_SHARE = 0.02
"""Share of the values that are new each day, in slots of many values."""

MIN_CHANGING_CARDINALITY = 100
"""Slots of fewer values, such as the kind of a device, keep theirs."""

_LAST_DRAW, _DAY_ROWS, _NEW_IDS = (CALIBRATION_STREAM + number for number in (1, 2, 3))
"""Random streams of the second draw of effects, of the rows of a day, and of what replaces values."""

_GENERATION_BITS = 40
"""Above those of slot and value in the number that a value's text is made from."""


def write_click_days(
    folder: Path | str,
    *,
    first_day: date,
    num_days: int,
    rows_per_day: int,
    seed: int,
    drift: float = DEFAULT_DRIFT,
    new_id_share: float = DEFAULT_NEW_ID_SHARE,
) -> tuple[ClickStream, ...]:
    """Write days of clicks as folder/day=YYYY-MM-DD/clicks.tsv.gz, with the true probabilities beside them.

    The same seed and drift give the same rows for a day whichever days are written with it, so a later call goes on
    where an earlier one ended.

    Raises:
        ConfigurationError: A number is out of its range.
        DataError: A file cannot be written.
    """
    for name, number, least in (
        ("num_days", num_days, 1),
        ("rows_per_day", rows_per_day, 1),
        ("seed", seed, 0),
    ):
        if number < least:
            raise ConfigurationError(f"{name} must be at least {least}, got {number}")
    days = [first_day + timedelta(days=number) for number in range(num_days)]
    return tuple(
        write_rows(
            Path(folder) / f"{PARTITION_PREFIX}{day}" / "clicks.tsv.gz",
            truth_of_day(day, seed=seed, drift=drift, new_id_share=new_id_share),
            num_rows=rows_per_day,
            entropy=(seed, _DAY_ROWS, day.toordinal()),
        )
        for day in days
    )


def truth_of_day(day: date, *, seed: int, drift: float, new_id_share: float) -> ClickTruth:
    """Return what is behind the clicks of a day; without drift the truth of `write_click_stream`."""
    number = day.toordinal()
    effects = ClickEffects.draw(np.random.default_rng([seed, CALIBRATION_STREAM]))
    if drift:
        last = ClickEffects.draw(np.random.default_rng([seed, _LAST_DRAW]))
        effects = _turned(effects, last, angle=drift * number)
    values: list[FloatArray] = []
    texts: list[pa.StringArray] = []
    for slot, size in enumerate(SLOT_CARDINALITIES):
        slot_effects, numbers = effects.values[slot], np.arange(size)
        if new_id_share and size >= MIN_CHANGING_CARDINALITY:
            generations = _generations(slot, size, number, seed=seed, share=new_id_share)
            slot_effects = _replaced(slot_effects, slot, generations, seed=seed)
            numbers = numbers + (generations << _GENERATION_BITS)
        values.append(slot_effects)
        texts.append(value_texts(slot, numbers))
    return ClickTruth(
        effects._replace(values=values), texts, np.random.default_rng([seed, CALIBRATION_STREAM, number])
    )


def _turned(first: ClickEffects, last: ClickEffects, *, angle: float) -> ClickEffects:
    """Return effects on the way from one draw to the other, of the same size as either."""
    cosine, sine = math.cos(angle), math.sin(angle)
    return ClickEffects(
        *(
            [cosine * before + sine * after for before, after in zip(*both, strict=True)]
            for both in zip(first, last, strict=True)
        )
    )


def _generations(slot: int, size: int, number: int, *, seed: int, share: float) -> npt.NDArray[np.int64]:
    """Return how often each value [size] of a slot has been replaced by a day, each at its own turn."""
    lifetime_days = max(1, round(1 / share))
    turns = np.random.default_rng([seed, _NEW_IDS, slot]).integers(0, lifetime_days, size=size)
    generations: npt.NDArray[np.int64] = (number + turns) // lifetime_days
    return generations


def _replaced(effects: FloatArray, slot: int, generations: npt.NDArray[np.int64], *, seed: int) -> FloatArray:
    """Return the effects [size + 1] of a slot with a draw of its own for each generation of a value."""
    size = len(generations)
    replaced = effects.copy()
    for generation in np.unique(generations):
        drawn = draw_value_effects(np.random.default_rng([seed, _NEW_IDS, slot, int(generation)]), size)
        is_of_it = np.flatnonzero(generations == generation)
        replaced[is_of_it] = drawn[is_of_it]
    return replaced
