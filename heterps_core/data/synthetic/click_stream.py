"""A synthetic click stream in the published Criteo format, whose click probabilities are known, whole or by days.

So a model's AUC can be put beside the best that is reachable, which no real log tells. The truth of days moves: the
effects of a day are a turn of two fixed draws, cos(drift n) a + sin(drift n) b for day number n, so they keep
their size, those of two days correlate by the cosine of the angle between them, and any day can be written without
those before it. In slots of many values a share of the values is replaced by new ones each day, with effects of
their own, as campaigns come and go.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from heterps_core.data.reading.days import PARTITION_PREFIX
from heterps_core.data.reading.readers import read_rows
from heterps_core.data.schema import CRITEO_SCHEMA
from heterps_core.data.synthetic.click_truth import (
    CALIBRATION_STREAM,
    SLOT_CARDINALITIES,
    ClickEffects,
    ClickTruth,
    FloatArray,
    draw_value_effects,
    value_texts,
)
from heterps_core.errors import ConfigurationError, DataError
from heterps_core.judging.quality import ClickQuality, measure_quality

_ROWS_PER_CHUNK = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class ClickStream:
    """A written click stream."""

    path: Path
    probabilities_path: Path
    """.npy file with the true click probability of each row, float64 [num_rows]. Its name begins with
    "_", so a reader of the folder leaves it out."""

    num_rows: int

    def click_probabilities(self) -> FloatArray:
        """Return the true click probability [num_rows] of each row, in file order."""
        probabilities: FloatArray = np.load(self.probabilities_path)
        return probabilities

    def best_reachable(self) -> ClickQuality:
        """Return what the truth itself reaches on the rows as written; reads them."""
        labels = [batch.labels for batch in read_rows([self.path], CRITEO_SCHEMA)]
        return best_reachable_quality(self.click_probabilities(), np.concatenate(labels))


def write_click_stream(path: Path | str, *, num_rows: int, seed: int) -> ClickStream:
    """Write a click stream as tab-separated text, gzip-compressed where the name ends in ".gz".

    The same seed gives the same rows, and a longer stream begins with the shorter one. The file appears
    under its name when it is complete.

    Raises:
        DataError: The file cannot be written, for instance because the disk is full; nothing is left of it.
    """
    if num_rows < 1:
        raise ConfigurationError(f"num_rows must be at least 1, got {num_rows}")
    return write_rows(Path(path), ClickTruth.of_seed(seed), num_rows=num_rows, entropy=(seed,))


def write_rows(path: Path, truth: ClickTruth, *, num_rows: int, entropy: Sequence[int]) -> ClickStream:
    """Write rows of a truth, with their probabilities beside them; `entropy` decides which rows.

    Raises:
        DataError: As `write_click_stream`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"_{path.name}.draft")
    probabilities_path = probabilities_beside(path)
    try:
        _write_draft(draft, probabilities_path, truth, num_rows=num_rows, entropy=entropy)
        draft.replace(path)
    except OSError as error:
        free_bytes = shutil.disk_usage(path.parent).free
        draft.unlink(missing_ok=True)
        probabilities_path.unlink(missing_ok=True)
        raise DataError(
            path,
            f"cannot be written, with {free_bytes:,} bytes free there: {error.strerror or error}; free space "
            f"or choose another folder",
        ) from error
    return ClickStream(path=path, probabilities_path=probabilities_path, num_rows=num_rows)


def probabilities_beside(path: Path) -> Path:
    """Return where the true click probabilities of a synthetic file stand."""
    return path.with_name(f"_{path.name}.probabilities.npy")


def _write_draft(
    draft: Path, probabilities_path: Path, truth: ClickTruth, *, num_rows: int, entropy: Sequence[int]
) -> None:
    fields = [("label", pa.int8())]
    fields += [(column, pa.int64()) for column in CRITEO_SCHEMA.numeric_columns]
    fields += [(column, pa.string()) for column in CRITEO_SCHEMA.categorical_columns]
    options = pa_csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    probabilities = np.empty(num_rows)
    compression = "gzip" if ".gz" in draft.suffixes else None
    with (
        pa.output_stream(str(draft), compression=compression) as stream,
        pa_csv.CSVWriter(stream, pa.schema(fields), write_options=options) as writer,
    ):
        for chunk, start in enumerate(range(0, num_rows, _ROWS_PER_CHUNK)):
            stop = min(start + _ROWS_PER_CHUNK, num_rows)
            generator = np.random.default_rng([*entropy, chunk])
            of_chunk, columns = truth.draw(generator, _ROWS_PER_CHUNK)
            labels = generator.random(_ROWS_PER_CHUNK) < of_chunk
            probabilities[start:stop] = of_chunk[: stop - start]
            batch = pa.record_batch([pa.array(labels.astype(np.int8)), *columns], schema=pa.schema(fields))
            writer.write_batch(batch.slice(0, stop - start))
    np.save(probabilities_path, probabilities)


def best_reachable_quality(
    click_probabilities: FloatArray,
    labels: npt.NDArray[np.uint8] | npt.NDArray[np.float32],
    weights: npt.NDArray[np.floating[Any]] | None = None,
) -> ClickQuality:
    """Return the quality of the true probabilities [N] on labels [N]: no model does better but by luck."""
    return measure_quality(labels, np.log(click_probabilities / (1.0 - click_probabilities)), weights)


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
    days = consecutive_days(first_day, num_days=num_days, rows_per_day=rows_per_day, seed=seed)
    return tuple(
        write_rows(
            Path(folder) / f"{PARTITION_PREFIX}{day}" / "clicks.tsv.gz",
            truth_of_day(day, seed=seed, drift=drift, new_id_share=new_id_share),
            num_rows=rows_per_day,
            entropy=(seed, _DAY_ROWS, day.toordinal()),
        )
        for day in days
    )


def consecutive_days(first_day: date, *, num_days: int, rows_per_day: int, seed: int) -> list[date]:
    """Return the days that a synthetic stream is written for.

    Raises:
        ConfigurationError: A number is out of its range.
    """
    for name, number, least in (
        ("num_days", num_days, 1),
        ("rows_per_day", rows_per_day, 1),
        ("seed", seed, 0),
    ):
        if number < least:
            raise ConfigurationError(f"{name} must be at least {least}, got {number}")
    num_left = (date.max - first_day).days + 1
    if num_days > num_left:
        raise ConfigurationError(f"num_days must be at most {num_left} from {first_day} on, got {num_days}")
    return [first_day + timedelta(days=number) for number in range(num_days)]


def truth_of_day(day: date, *, seed: int, drift: float, new_id_share: float) -> ClickTruth:
    """Return the truth of a day's clicks; without drift the truth of `write_click_stream`."""
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
