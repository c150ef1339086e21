"""Columns of any type as texts, and as canonical texts: the rule of `canonical_text.py`, applied to whole columns.

Of a dictionary each different value is looked at once, and most of them by a few of their bytes only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.data.reading.canonical_text import BLANKS, WORDS, canonical_text

_EXACT_BELOW = {16: 2.0**11, 32: 2.0**24, 64: 2.0**53}
"""By the bits of a floating type: from here on several whole numbers may be written alike."""


def column_texts(column: pa.Array) -> pa.StringArray:
    """Return an Arrow column of any plain type as texts, as Arrow writes them; true and false become 1 and 0.

    Raises:
        pa.ArrowException: It holds what has no text, or bytes that are no UTF-8.
    """
    if pa.types.is_string(column.type):
        return column
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if isinstance(column.type, pa.UuidType):
        return pa.array([None if value is None else str(value) for value in column.to_pylist()], pa.string())
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    return column.cast(pa.string())


def canonical_texts(values: pa.Array) -> pa.Array:
    """Return `canonical_text` of texts [n], of the different ones of a dictionary, or of those in lists."""
    if pa.types.is_dictionary(values.type):
        return pa.DictionaryArray.from_arrays(values.indices, canonical_texts(values.dictionary))
    if pa.types.is_list(values.type):
        return pa.ListArray.from_arrays(values.offsets, canonical_texts(values.values))
    places = _not_surely_canonical(values)
    if not len(places):
        return values
    texts = values.take(pa.array(places))
    canonical = _each_canonical(texts)
    if canonical.equals(texts):
        return values
    chosen = np.arange(len(values))
    chosen[places] = len(values) + np.arange(len(places))
    return pa.concat_arrays([values, canonical]).take(pa.array(chosen))


def identity_problem(column: pa.Array) -> str | None:
    """Return for people why the values of a column have no text that tells them apart; None where they have."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary
    elif type(column) in (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray):
        column = column.flatten()
    if pa.types.is_duration(column.type):
        return (
            f"must hold values that say their unit, got {column.type}; write durations as numbers of seconds"
        )
    if not pa.types.is_floating(column.type):
        return None
    exact_below = _EXACT_BELOW[column.type.bit_width]
    numbers = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    lost = numbers[(np.abs(numbers) >= exact_below) & ~np.isinf(numbers)]
    if not len(lost):
        return None
    return (
        f"must hold categories that differ from each other, but holds {lost[0]:.17g} as a {column.type}, "
        f"which is exact below {exact_below:.0f} only; write ids as whole numbers (int64, in pandas Int64) or texts"
    )


def _each_canonical(texts: pa.StringArray) -> pa.StringArray:
    if len(texts) <= _WORTH_A_PATTERN:
        written = [None if text is None else canonical_text(text) for text in texts.to_pylist()]
        return pa.array(written, pa.string())
    is_decimal = pc.match_substring_regex(texts, _DECIMAL).fill_null(False)
    is_other = pc.invert(is_decimal)
    others = [None if text is None else canonical_text(text) for text in texts.filter(is_other).to_pylist()]
    decimals = pc.ascii_rtrim(pc.ascii_rtrim(texts, "0"), ".")
    return pc.replace_with_mask(decimals, is_other, pa.array(others, pa.string()))


def _flags(characters: str) -> npt.NDArray[np.bool_]:
    flags = np.zeros(256, dtype=bool)
    flags[np.frombuffer(characters.encode(), dtype=np.uint8)] = True
    return flags


_DIGITS = "0123456789"
_IS_BLANK, _STARTS_WORD = _flags(BLANKS), _flags("".join({word[0] for word in WORDS}))
_LONGEST_WORD = max(map(len, WORDS))
_STARTS_NUMBER, _ENDS_NUMBER = _flags(f"{_DIGITS}+-."), _flags(f"{_DIGITS}.ZC")
_STARTS_OTHER_FORM, _ENDS_OTHER_FORM = _flags("0+-."), _flags("0.")
_NOT_IN_NUMBER = ~_flags(f"{_DIGITS}+-.eE:TZUC ")

_DECIMAL = r"^(?:0|[1-9][0-9]*)\.[0-9]*$"
_WORTH_A_PATTERN = 512
"""Texts; Arrow takes 150 us to compile the pattern, and a text that was seen before takes 0.1 us without it."""


def _not_surely_canonical(texts: pa.StringArray) -> npt.NDArray[np.int64]:
    """Return the places [m] of all texts that are not canonical, and of a few that are."""
    offsets = np.frombuffer(texts.buffers()[1], np.int32, len(texts) + 1, 4 * texts.offset)
    if offsets[0] == offsets[-1]:
        return np.zeros(0, dtype=np.int64)
    characters = np.frombuffer(texts.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    offsets = offsets - offsets[0]
    # An empty text is taken for the one beside it.
    first, last = np.minimum(offsets[:-1], len(characters) - 1), np.maximum(offsets[1:] - 1, 0)
    begin, end = characters.take(first), characters.take(last)
    is_other = _IS_BLANK.take(begin) | _IS_BLANK.take(end)
    is_other |= _STARTS_WORD.take(begin) & (last - first < _LONGEST_WORD)
    is_number = _STARTS_NUMBER.take(begin) & _ENDS_NUMBER.take(end)
    if is_number.any():
        written = characters.tobytes()
        is_of_any_form = b"e" in written or b"E" in written or b":" in written
        if not is_of_any_form:
            is_end = _ENDS_OTHER_FORM.take(end) if b"." in written else False
            is_number &= (_STARTS_OTHER_FORM.take(begin) & (last > first)) | is_end
        of_number = np.flatnonzero(is_number)
        if is_of_any_form:
            # No other character stands between the first, which is one of a number, and the last.
            num_others = np.cumsum(_NOT_IN_NUMBER.take(characters), dtype=np.int32)
            of_number = of_number[(num_others.take(first) == num_others.take(last)).take(of_number)]
        is_other[of_number] = True
    return np.flatnonzero(is_other)
