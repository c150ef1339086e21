"""Columns of any type as texts, and as canonical texts: the rule of `canonical_text.py`, applied to whole columns.

Each different value of a dictionary is looked at once, and most values by a few of their bytes only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from heterps_core.data.hashing import TEXTS_PER_BLOCK, load_words
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
    places, canonical = other_forms(values)
    if not len(places):
        return values
    chosen = np.arange(len(values))
    chosen[places] = len(values) + np.arange(len(places))
    return pa.concat_arrays([values, canonical]).take(pa.array(chosen))


def other_forms(texts: pa.StringArray) -> tuple[npt.NDArray[np.int64], pa.StringArray]:
    """Return the places [m] of texts that are not canonical, and their canonical texts [m].

    A few places of texts that are canonical may be among them.
    """
    firsts = range(0, len(texts), TEXTS_PER_BLOCK)
    of_blocks = [first + _not_surely_canonical(texts.slice(first, TEXTS_PER_BLOCK)) for first in firsts]
    places = np.concatenate(of_blocks) if of_blocks else np.zeros(0, dtype=np.int64)
    return places, _each_canonical(texts.take(pa.array(places)))


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


_DECIMAL = r"^(?:0|[1-9][0-9]*)\.[0-9]*$"
_WORTH_A_PATTERN = 2_048
"""Texts; Arrow takes 150 us to compile the pattern, and a text that was seen before takes 0.1 us without it."""


def _each_canonical(texts: pa.StringArray) -> pa.StringArray:
    if len(texts) <= _WORTH_A_PATTERN:
        written = [None if text is None else canonical_text(text) for text in texts.to_pylist()]
        return pa.array(written, pa.string())
    is_decimal = pc.match_substring_regex(texts, _DECIMAL).fill_null(False)
    is_other = pc.invert(is_decimal)
    others = [None if text is None else canonical_text(text) for text in texts.filter(is_other).to_pylist()]
    decimals = pc.ascii_rtrim(pc.ascii_rtrim(texts, "0"), ".")
    return pc.replace_with_mask(decimals, is_other, pa.array(others, pa.string()))


_BLANK_BEFORE, _BLANK_AFTER, _NUMBER, _WORD = 1, 2, 4, 8


def _kinds(always: int, characters: dict[int, str]) -> npt.NDArray[np.uint8]:
    """Return by its code which kinds of texts a character may begin or end."""
    kinds = np.full(256, always, dtype=np.uint8)
    for kind, some in characters.items():
        kinds[np.frombuffer(some.encode(), dtype=np.uint8)] |= kind
    return kinds


_DIGITS = "0123456789"
# A blank at one end counts whatever stands at the other.
_BEGINS = _kinds(
    _BLANK_AFTER,
    {_BLANK_BEFORE: BLANKS, _NUMBER: f"{_DIGITS}+-.", _WORD: "".join({word[0] for word in WORDS})},
)
_ENDS = _kinds(
    _BLANK_BEFORE,
    {_BLANK_AFTER: BLANKS, _NUMBER: f"{_DIGITS}.ZC", _WORD: "".join({word[-1] for word in WORDS})},
)
_LONGEST_WORD = max(map(len, WORDS))
_SHORTEST_TIME = len("12:30:00.0")

_WORD_BYTES = 8
_LETTER_BITS = np.uint64(0x4040404040404040)
"""Set in the bytes of all letters, in no digit and in no character that a number has besides digits and e."""

_LOW_BITS, _LOW_BITS_OF_E = np.uint64(0x1F1F1F1F1F1F1F1F), np.uint64(0x0505050505050505)


def _not_surely_canonical(texts: pa.StringArray) -> npt.NDArray[np.int64]:
    """Return the places [m] of all texts that are not canonical, and of a few that are.

    Most texts are found canonical by their first and last character alone.
    """
    offsets = np.frombuffer(texts.buffers()[1], np.int32, len(texts) + 1, 4 * texts.offset)
    if offsets[0] == offsets[-1]:
        return np.zeros(0, dtype=np.int64)
    written = np.frombuffer(texts.buffers()[2], np.uint8)[offsets[0] : offsets[-1]].tobytes()
    # Zeros follow, so that an empty text has a first and a last character, too.
    words = np.frombuffer(written + bytes(2 * _WORD_BYTES - len(written) % _WORD_BYTES), np.uint64)
    characters = words.view(np.uint8)
    first, last = offsets[:-1] - offsets[0], offsets[1:] - (offsets[0] + 1)
    begin = characters.take(first)
    if written.isdigit():
        return np.flatnonzero((begin == ord("0")) & (last > first))
    kinds = _BEGINS.take(begin) & _ENDS.take(characters.take(last))
    places: npt.NDArray[np.int64] = np.flatnonzero(kinds)
    kinds, first, last = kinds[places], first[places], last[places]
    is_other = kinds & (_BLANK_BEFORE | _BLANK_AFTER) > 0
    is_other |= (kinds & _WORD > 0) & (last - first < _LONGEST_WORD)
    numbers = np.flatnonzero(kinds & _NUMBER)
    has_times = b":" in written
    if has_times or b"e" in written or b"E" in written:
        # Names, such as hexadecimal digits, have a letter that no number has.
        sizes = last[numbers] - first[numbers] + 1
        begins = load_words(first[numbers].astype(np.int64), np.minimum(sizes, _WORD_BYTES), words)
        letters = begins & _LETTER_BITS
        # Five bits that differ from those of e, added to 31, set bit 5.
        is_not_e = ((begins ^ _LOW_BITS_OF_E) & _LOW_BITS) + _LOW_BITS
        is_number = (letters >> np.uint64(1)) & is_not_e == 0
        numbers, sizes, is_plain = numbers[is_number], sizes[is_number], letters[is_number] == 0
        long = np.flatnonzero(sizes > _WORD_BYTES)
        if len(long):
            ends = load_words(last[numbers[long]] + (1 - _WORD_BYTES), np.full(len(long), _WORD_BYTES), words)
            is_long_time = has_times & (sizes[long] >= _SHORTEST_TIME)
            is_plain[long] &= (ends & _LETTER_BITS == 0) & (sizes[long] <= 2 * _WORD_BYTES) & ~is_long_time
        is_other[numbers[~is_plain]] = True
    # Without letters a sign or zero in front, or a zero or point at the end, is another form.
    begin, end = characters.take(first[numbers]), characters.take(last[numbers])
    is_other[numbers] |= (begin < ord("1")) & (last > first)[numbers]
    if b"." in written:
        is_other[numbers] |= (end == ord("0")) | (end == ord("."))
    other: npt.NDArray[np.int64] = places[is_other]
    return other
