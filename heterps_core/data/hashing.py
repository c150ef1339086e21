"""From texts to ids by a hash of our own that never changes: row indices and keys are part of every checkpoint.

The hash reads a text's UTF-8 bytes as little-endian 64-bit words (the last one padded with zeros):

    h = mix(slot);  for each word w: h = mix(h ^ w);  h = mix(h ^ number of bytes)

where mix is the finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014, constants of variant 13 by D. Stafford), started at the golden-ratio increment.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from heterps_core.data.features import MISSING_ROW

_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_ALL_ONES = np.uint64(0xFFFFFFFFFFFFFFFF)
_BYTES_PER_WORD = 8
_BITS_PER_WORD = 64

TEXTS_PER_BLOCK = 8_192
"""Texts hashed at once. Arrays of this size stay in the cache and below malloc's threshold for fresh pages:
16 ns a text, against 45 ns with 64,000 at once (one core of an AMD EPYC, NumPy 2.4, November 2026)."""

UInt64Array = npt.NDArray[np.uint64]


def hash_texts(texts: pa.StringArray, *, slot: int | npt.NDArray[np.int64]) -> UInt64Array:
    """Return a 64-bit hash [n] of each text, salted by the slot of all or of each [n]: slots collide independently.

    A null hashes like the empty text.
    """
    salts = mix(np.arange(np.max(slot, initial=0) + 1, dtype=np.uint64))
    hashes = np.broadcast_to(salts[slot], len(texts)).copy()
    for begin in range(0, len(texts), TEXTS_PER_BLOCK):
        _hash_block(texts.slice(begin, TEXTS_PER_BLOCK), hashes[begin : begin + TEXTS_PER_BLOCK])
    return hashes


def rows_of_hashes(
    hashes: UInt64Array, *, is_missing: npt.NDArray[np.bool_], num_rows: int
) -> npt.NDArray[np.int32]:
    """Return the embedding row [n] of each value: 1 + hash mod (num_rows - 1), or row 0 where it is missing.

    Missing is what is null or empty. It has a row of its own, so the model learns what absence means.
    """
    rows = (hashes % np.uint64(num_rows - 1)).astype(np.int32)
    rows += MISSING_ROW + 1
    rows[is_missing] = MISSING_ROW
    return rows


def keys_of_hashes(hashes: UInt64Array, *, slot: int, hash_bits: int) -> npt.NDArray[np.int64]:
    """Return the keys [n] of values of a slot: the slot's number, then so many leading bits of the hash.

    Example:
        >>> keys = keys_of_hashes(np.array([0xA706DD2F4D197E6F], np.uint64), slot=2, hash_bits=60)
        >>> hex(int(keys[0]))
        '0x2a706dd2f4d197e6'
    """
    leading = (hashes >> np.uint64(_BITS_PER_WORD - hash_bits)).astype(np.int64)
    return leading | np.int64(slot << hash_bits)


def mix(values: UInt64Array) -> UInt64Array:
    """Return splitmix64 of each value; a bijection on 64-bit numbers. Overwrites `values`.

    Example:
        >>> hex(int(mix(np.array([0], dtype=np.uint64))[0]))
        '0xe220a8397b1dcdaf'
    """
    values += _GOLDEN_RATIO
    scratch = values >> np.uint64(30)
    values ^= scratch
    values *= _MULTIPLIER_1
    np.right_shift(values, np.uint64(27), out=scratch)
    values ^= scratch
    values *= _MULTIPLIER_2
    np.right_shift(values, np.uint64(31), out=scratch)
    values ^= scratch
    return values


def text_lengths(texts: pa.StringArray) -> npt.NDArray[np.int32]:
    """Return the number of UTF-8 bytes [n] of each text; 0 for a null."""
    offsets = _offsets_of(texts)
    lengths: npt.NDArray[np.int32] = np.diff(offsets)
    if texts.null_count:
        # Arrow leaves the bytes under a null undefined.
        lengths[np.asarray(texts.is_null())] = 0
    return lengths


def _hash_block(texts: pa.StringArray, hashes: UInt64Array) -> None:
    """Turn the salt in `hashes` [n] into the hash of each text, in place."""
    starts, lengths, words = _words_of(texts)
    longest = int(lengths.max(initial=0))
    for position in range(0, longest, _BYTES_PER_WORD):
        _absorb(hashes, starts, lengths, words, position)
    hashes ^= lengths.astype(np.uint64)
    mix(hashes)


def _offsets_of(texts: pa.StringArray) -> npt.NDArray[np.int32]:
    offsets = np.frombuffer(texts.buffers()[1], dtype=np.int32)
    return offsets[texts.offset : texts.offset + len(texts) + 1]


def _words_of(texts: pa.StringArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], UInt64Array]:
    """Return each text's first byte [n], its length [n] and all bytes as aligned words, two of padding."""
    offsets = _offsets_of(texts)
    first, last = int(offsets[0]), int(offsets[-1])
    num_words = -(-(last - first) // _BYTES_PER_WORD)
    words = np.zeros(num_words + 2, dtype=np.uint64)
    data = texts.buffers()[2]
    if data is not None and last > first:
        words.view(np.uint8)[: last - first] = np.frombuffer(data, dtype=np.uint8)[first:last]
    return (offsets[:-1] - first).astype(np.int64), text_lengths(texts), words


def _absorb(
    hashes: UInt64Array,
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    words: UInt64Array,
    position: int,
) -> None:
    """Mix the word at byte `position` of each text that is long enough into its hash, in place."""
    active = np.flatnonzero(lengths > position)
    if len(active) == len(hashes):
        hashes[:] = mix(hashes ^ load_words(starts + position, lengths - position, words))
    elif len(active):
        loaded = load_words(starts[active] + position, lengths[active] - position, words)
        hashes[active] = mix(hashes[active] ^ loaded)


def load_words(
    begins: npt.NDArray[np.int64], remaining: npt.NDArray[np.int32], words: UInt64Array
) -> UInt64Array:
    """Return the 8 bytes from each `begins` on, those beyond `remaining` (at least 1) set to zero."""
    index = begins >> 3
    shift = ((begins & 7) << 3).astype(np.uint64)
    loaded: UInt64Array = words[index]
    if shift.any():
        loaded >>= shift
        # In two steps, because a shift by 64 bits is undefined.
        loaded |= (words[index + 1] << np.uint64(1)) << (np.uint64(_BITS_PER_WORD - 1) - shift)
    missing_bytes = _BYTES_PER_WORD - np.minimum(remaining, _BYTES_PER_WORD)
    if missing_bytes.any():
        loaded &= _ALL_ONES >> (missing_bytes.astype(np.uint64) << np.uint64(3))
    return loaded
