import numpy as np
import pyarrow as pa
import pytest

from heterps_core.data.features import DynamicIds, FeatureSpec
from heterps_core.data.hashing import hash_texts, keys_of_hashes
from heterps_core.data.row_arrays import ids_of_texts
from tests.heterps_core.data.synthetic_rows import rows_of_texts

MASK = 2**64 - 1

# Written down once, in November 2026. A change here makes every checkpoint worthless.
GOLDEN = {
    (0, ""): 0xA706DD2F4D197E6F,
    (0, "a"): 0x90EE7AC581476B17,
    (0, "abcdefgh"): 0xFB09976CB7BD678A,
    (0, "abcdefghi"): 0xCA278FCA7A9B965B,
    (0, "ümläut"): 0xE6DD652FFEFDDADB,
    (0, "68fd1e64"): 0x393D718B12D502B6,
}

TEXTS = ["", "a", "ab", "68fd1e64", "68fd1e640", "x" * 16, "y" * 1000, "ümläut", "日本語", "\x00", "a\x00"]


def splitmix64(value):
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def reference_hash(text, slot):
    data = text.encode()
    state = splitmix64(slot)
    for start in range(0, len(data), 8):
        state = splitmix64(state ^ int.from_bytes(data[start : start + 8], "little"))
    return splitmix64(state ^ len(data))


@pytest.mark.parametrize(("slot", "text"), GOLDEN)
def test_golden_values_never_change(slot, text):
    assert hash_texts(pa.array([text]), slot=slot)[0] == GOLDEN[slot, text]


def test_splitmix64_of_0_is_the_published_first_output():
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # first output of Vigna's splitmix64.c with seed 0


@pytest.mark.parametrize("slot", [0, 1, 25])
def test_equals_the_same_formula_in_plain_python(slot):
    assert hash_texts(pa.array(TEXTS), slot=slot).tolist() == [reference_hash(t, slot) for t in TEXTS]


def test_equals_plain_python_for_texts_of_all_lengths_across_blocks():
    lengths = np.random.default_rng(3).integers(0, 20, size=9_000)
    texts = ["".join(chr(97 + (i + j) % 26) for j in range(n)) for i, n in enumerate(lengths)]

    assert hash_texts(pa.array(texts), slot=4).tolist() == [reference_hash(text, 4) for text in texts]


@pytest.mark.parametrize(("begin", "stop"), [(0, 11), (1, 4), (3, 3), (10, 11)])
def test_a_slice_of_an_array_hashes_like_the_texts_in_it(begin, stop):
    sliced = pa.array(TEXTS)[begin:stop]

    assert hash_texts(sliced, slot=2).tolist() == [reference_hash(t, 2) for t in TEXTS[begin:stop]]


def test_a_null_is_treated_as_the_empty_text_whatever_bytes_lie_under_it():
    texts = pa.StringArray.from_buffers(
        3,
        pa.py_buffer(np.array([0, 1, 3, 4], dtype=np.int32)),
        pa.py_buffer(b"aXXb"),
        pa.py_buffer(bytes([0b101])),
    )

    assert texts.to_pylist() == ["a", None, "b"]
    assert hash_texts(texts, slot=0).tolist() == [reference_hash(text, 0) for text in ("a", "", "b")]


def test_missing_values_get_row_0_and_no_other_value_does():
    texts = pa.array([None, "", *(f"value {i}" for i in range(500))])

    rows = rows_of_texts(texts, slot=1, num_rows=7)

    assert rows[:2].tolist() == [0, 0]
    assert rows[2:].tolist() == [1 + reference_hash(f"value {i}", 1) % 6 for i in range(500)]


def test_an_array_of_nulls_alone_gets_row_0():
    assert rows_of_texts(pa.nulls(3, pa.string()), slot=0, num_rows=5).tolist() == [0, 0, 0]


def test_spreads_values_evenly_over_the_rows():
    texts = pa.array([f"{i:08x}" for i in range(50_000)])

    counts = np.bincount(rows_of_texts(texts, slot=0, num_rows=101), minlength=101)[1:]

    # Chi-squared with 99 degrees of freedom lies below 149 in 99.9 % of cases.
    assert ((counts - 500) ** 2 / 500).sum() < 149


def test_the_same_value_collides_with_others_in_other_slots():
    texts = pa.array([f"{i:08x}" for i in range(200)])

    first, second = (rows_of_texts(texts, slot=slot, num_rows=1000) for slot in (0, 1))

    assert (first == second).mean() < 0.05


def test_a_key_is_the_slot_and_the_leading_bits_of_the_hash():
    keys = keys_of_hashes(hash_texts(pa.array([*TEXTS, None]), slot=5), slot=5, hash_bits=59)

    # By plain Python: three bits of the slot, 59 of the hash.
    assert keys.tolist() == [(5 << 59) + (reference_hash(text, 5) >> 5) for text in [*TEXTS, ""]]
    assert keys.dtype == np.int64


def test_numbers_beyond_64_bits_are_ids_like_any_others():
    features = FeatureSpec(num_dense=0, slot_rows=(512, 512), dynamic_ids=DynamicIds())
    texts = pa.array([str(2**63), str(2**64 + 1), str(-(2**70)), "7", None])

    ids = ids_of_texts([texts, texts.dictionary_encode()], features)

    assert ids.dtype == np.int64
    assert len(np.unique(ids)) == 10
    assert (ids >= 0).all()
    assert (ids >> features.hash_bits).tolist() == [[0, 1]] * 5
