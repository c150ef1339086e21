"""The kernels, compiled for Arm with the product's flags, do under emulation what NumPy does.

Needs g++-aarch64-linux-gnu and qemu-user-static; a compiler's -mcpu=native is replaced by names of processors.
"""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from heterps_core.embeddings import row_kernels
from heterps_core.embeddings.row_kernels import compiler_flags

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
LIBRARIES_OF_ARM = "/usr/aarch64-linux-gnu"
absent = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(absent), reason=f"no {' and no '.join(absent)} here"),
]

ADDRESS = 0x4000_0000_0000
"""Of the memory that this process and the emulated one share; free in both."""

MEMORY_BYTES = 2**22
ALIGNMENT_BYTES = 64
NUM_ROWS, WIDTH = 200, 16


class ArmProcess:
    """Memory for a call of a kernel, and the emulated process that makes it."""

    def __init__(self, folder: Path, library: Path, program: Path) -> None:
        self._command = [EMULATOR, "-cpu", "max", "-L", LIBRARIES_OF_ARM, str(program), str(library)]
        self._file = folder / "memory"
        self._memory = np.memmap(self._file, dtype=np.uint8, mode="w+", shape=MEMORY_BYTES)
        self._num_bytes = 0

    def put(self, array: np.ndarray) -> tuple[int, np.ndarray]:
        """Copy an array there, and return its address and the copy."""
        array = np.ascontiguousarray(array)
        first, stop = self._num_bytes, self._num_bytes + array.nbytes
        self._num_bytes = -(-stop // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        copy = self._memory[first:stop].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return ADDRESS + first, copy

    def struct(self, *numbers: int | float) -> int:
        """Put integers and addresses, eight bytes each, and at most one float at the end; return their address."""
        content = b"".join(
            np.float32(each).tobytes() + bytes(4) if isinstance(each, float) else np.int64(each).tobytes()
            for each in numbers
        )
        return self.put(np.frombuffer(content, dtype=np.uint8))[0]

    def call(self, function: str, *numbers: int | float) -> int:
        """Call a function of the kernels and return its answer."""
        self._memory.flush()
        texts = [each.hex() if isinstance(each, float) else str(each) for each in numbers]
        words = [str(self._file), str(ADDRESS), function, *texts]
        done = subprocess.run([*self._command, *words], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)


@pytest.fixture(scope="module", params=["neoverse-n1", "neoverse-v1", "neoverse-n2"])
def built(request, tmp_path_factory):
    """The kernels for Graviton2, Graviton3, and a processor with SVE2, as Graviton4 has."""
    folder = tmp_path_factory.mktemp(request.param)
    sources = sorted(Path(row_kernels.__file__).parent.glob("*.cpp"))
    library, program = folder / "kernels.so", folder / "call"
    flags = compiler_flags("aarch64", processor=request.param)
    subprocess.run([COMPILER, *flags, *map(str, sources), "-o", str(library)], check=True, timeout=200)
    own = Path(__file__).with_name("call_kernel.cpp")
    subprocess.run([COMPILER, "-std=c++17", str(own), "-ldl", "-o", str(program)], check=True, timeout=100)
    return library, program


@pytest.fixture
def arm(built, tmp_path):
    return ArmProcess(tmp_path, *built)


@pytest.fixture
def generator():
    return np.random.default_rng(7)


def as_bfloat16(values):
    """The upper halves of float32 numbers, rounded to the nearest, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("is_bf16", [False, True], ids=["float32", "bfloat16"])
def test_rows_are_copied_as_numpy_copies_them(arm, generator, is_bf16):
    weight_RD = generator.standard_normal((NUM_ROWS, WIDTH), dtype=np.float32)
    rows_BS = generator.integers(0, NUM_ROWS, (60, 3))
    (weight_at, _), (rows_at, _) = arm.put(weight_RD), arm.put(rows_BS)
    out_at, out = arm.put(np.zeros((60, 3 * WIDTH), dtype=np.uint16 if is_bf16 else np.float32))
    table = arm.struct(weight_at, NUM_ROWS, WIDTH, 0, 0.0)

    assert arm.call("heterps_gather", table, rows_at, 60, 3, out_at, 3 * WIDTH, int(is_bf16)) == -1

    expected = weight_RD[rows_BS].reshape(60, 3 * WIDTH)
    assert np.array_equal(out, as_bfloat16(expected) if is_bf16 else expected)


def test_a_row_outside_the_table_is_found(arm, generator):
    rows_BS = generator.integers(0, NUM_ROWS, (60, 3))
    rows_BS[20, 1] = NUM_ROWS
    (weight_at, _), (rows_at, _) = arm.put(np.zeros((NUM_ROWS, WIDTH), dtype=np.float32)), arm.put(rows_BS)
    out_at, _ = arm.put(np.zeros((60, 3 * WIDTH), dtype=np.float32))
    table = arm.struct(weight_at, NUM_ROWS, WIDTH, 0, 0.0)

    assert arm.call("heterps_gather", table, rows_at, 60, 3, out_at, 3 * WIDTH, 0) == 20 * 3 + 1


def test_bags_are_summed_as_numpy_sums_them(arm, generator):
    weight_RD = generator.standard_normal((NUM_ROWS, WIDTH), dtype=np.float32)
    rows_BS = generator.integers(0, NUM_ROWS, (40, 5))
    rows_BS[::2, 2] = rows_BS[::3, 4] = -1
    starts = np.array([0, 3, 5])
    (weight_at, _), (rows_at, _), (starts_at, _) = arm.put(weight_RD), arm.put(rows_BS), arm.put(starts)
    out_at, out = arm.put(np.zeros((40, 2 * WIDTH), dtype=np.float32))
    table, bags = arm.struct(weight_at, NUM_ROWS, WIDTH, 0, 0.0), arm.struct(starts_at, 2)

    assert arm.call("heterps_pool", table, rows_at, 40, 5, bags, out_at, 2 * WIDTH, 0) == -1

    found = np.where(rows_BS[..., None] >= 0, weight_RD[rows_BS], 0.0)
    expected = np.concatenate([found[:, :3].sum(axis=1), found[:, 3:].sum(axis=1)], axis=1)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


RATE, EPSILON, MEAN_DECAY, SQUARE_DECAY = 0.1, 0.01, 0.9, 0.999


def updated(rule, weight, states, gradient):
    """One update of rows [U, D] by the sums of their gradients; states are those of the rows, changed in place."""
    square = np.square(gradient).mean(axis=1)
    if rule == "sgd":
        return weight - RATE * gradient
    if rule == "adagrad":
        states[0] += square
        return weight - (RATE / (np.sqrt(states[0]) + EPSILON))[:, None] * gradient
    mean, second, count = states
    count += 1
    second[...] = SQUARE_DECAY * second + (1 - SQUARE_DECAY) * square
    mean[...] = MEAN_DECAY * mean + (1 - MEAN_DECAY) * gradient
    root = np.sqrt(second / (1 - SQUARE_DECAY**count)) + EPSILON
    return weight - (RATE / ((1 - MEAN_DECAY**count) * root))[:, None] * mean


@pytest.mark.parametrize("width", [5, 16])
@pytest.mark.parametrize(
    ("rule", "constants"),
    [("sgd", ()), ("adagrad", (EPSILON,)), ("adam", (MEAN_DECAY, SQUARE_DECAY, EPSILON))],
)
def test_repeated_rows_are_updated_once_as_by_numpy(arm, generator, rule, constants, width):
    weight_RD = generator.standard_normal((NUM_ROWS, width), dtype=np.float32)
    rows_BS = generator.integers(0, NUM_ROWS, (90, 3))
    gradients = generator.standard_normal((90, 3, width), dtype=np.float32)
    shapes = {"sgd": [], "adagrad": [NUM_ROWS], "adam": [(NUM_ROWS, width), NUM_ROWS, NUM_ROWS]}[rule]
    states = [np.abs(generator.standard_normal(shape, dtype=np.float32)).round(1) for shape in shapes]
    if rule == "adam":
        states[2] = np.round(states[2])
    placed = [arm.put(state) for state in states]
    (weight_at, weight), (changed_at, changed) = arm.put(weight_RD), arm.put(np.zeros(NUM_ROWS, np.uint8))
    table = arm.struct(weight_at, NUM_ROWS, width, changed_at, 0.3)
    part = arm.struct(arm.put(rows_BS)[0], arm.put(gradients)[0], 90, 3, 3 * width, 0, 0)

    found = arm.call(
        f"heterps_{rule}", table, arm.struct(0, 0), part, 1, 0, *(at for at, _ in placed), RATE, *constants
    )

    assert found == -1
    own, places = np.unique(rows_BS, return_inverse=True)
    sums = np.zeros((len(own), width))
    np.add.at(sums, places.reshape(-1), gradients.reshape(-1, width).astype(np.float64))
    of_rows = [state[own].astype(np.float64) for state in states]
    expected = weight_RD.astype(np.float64)
    expected[own] = updated(rule, expected[own], of_rows, sums + 0.3 * expected[own])
    np.testing.assert_allclose(weight, expected, rtol=2e-5, atol=2e-6)
    for (_, state), of_row in zip(placed, of_rows, strict=True):
        np.testing.assert_allclose(state[own], of_row, rtol=2e-5, atol=2e-6)
    assert np.array_equal(np.flatnonzero(changed), own)


def test_marked_rows_are_taken_in_order(arm, generator):
    marks = (generator.random(NUM_ROWS + 3) < 0.3).astype(np.uint8)
    (marks_at, cleared), (rows_at, rows) = arm.put(marks), arm.put(np.zeros(NUM_ROWS, dtype=np.int64))

    assert arm.call("heterps_changed", marks_at, len(marks), 0) == marks.sum()
    assert arm.call("heterps_changed", marks_at, len(marks), rows_at) == marks.sum()

    assert np.array_equal(rows[: marks.sum()], np.flatnonzero(marks))
    assert not cleared.any()


@pytest.mark.parametrize("num_rows", [NUM_ROWS, 2**32])
def test_distinct_rows_are_those_of_numpy(arm, generator, num_rows):
    rows = generator.integers(0, num_rows, 3_000)
    rows[::7] = rows[0]
    rows_at, _ = arm.put(rows)
    (distinct_at, distinct), (inverse_at, inverse) = (
        arm.put(np.zeros_like(rows)),
        arm.put(np.zeros_like(rows)),
    )

    count = arm.call("heterps_distinct", rows_at, len(rows), num_rows, 0, distinct_at, inverse_at)

    expected, places = np.unique(rows, return_inverse=True)
    assert np.array_equal(distinct[:count], expected)
    assert np.array_equal(inverse, places)


def test_the_union_of_lists_is_that_of_numpy(arm, generator):
    rows = generator.integers(0, 2**32, 2_000, dtype=np.uint32)
    rows[1_000:] = rows[:1_000]
    (rows_at, _), (union_at, union) = arm.put(rows), arm.put(np.zeros_like(rows))

    count = arm.call("heterps_union", rows_at, len(rows), union_at)

    assert np.array_equal(union[:count], np.unique(rows))


def test_an_id_keeps_its_row_and_an_unknown_one_has_none(arm, generator):
    num_rows, hash_bits, has_row, unknown = 2_048, 48, 1 << 62, -2
    ids = generator.integers(0, 2**hash_bits, 900)
    others = generator.integers(0, 2**hash_bits, 300)
    keys_at, keys = arm.put(np.zeros(num_rows, dtype=np.int64))
    (firsts_at, _), (buckets_at, _) = arm.put(np.array([0])), arm.put(np.array([num_rows // 512]))
    index = arm.struct(keys_at, 0, num_rows, firsts_at, buckets_at, 1, hash_bits)
    (ids_at, _), (rows_at, rows) = arm.put(ids), arm.put(np.zeros_like(ids))
    arm.call("heterps_insert_ids", index, ids_at, len(ids), rows_at)
    inserted = rows.copy()
    keys[inserted] |= has_row

    looked_up = np.concatenate([ids, others, [-1]])
    (all_at, _), (found_at, found) = arm.put(looked_up), arm.put(np.zeros_like(looked_up))
    assert arm.call("heterps_find_ids", index, all_at, len(looked_up), 1, found_at) == -1

    assert len(np.unique(inserted)) == len(np.unique(ids))
    assert np.array_equal(keys[inserted], (ids + 1) | has_row)
    assert np.array_equal(found[: len(ids)], inserted)
    assert set(found[len(ids) : -1]) == {unknown}
    assert found[-1] == -1


def test_records_are_copied_to_a_block_and_back(arm, generator):
    values = generator.standard_normal((50, WIDTH), dtype=np.float32)
    counts = generator.standard_normal((50, 1), dtype=np.float32)
    slots, places = generator.permutation(50)[:30].astype(np.int32), np.arange(30, dtype=np.int32)[::-1]
    (values_at, in_memory), (counts_at, _) = arm.put(values), arm.put(counts)
    (slots_at, _), (places_at, _) = arm.put(slots), arm.put(places)
    block_at, block = arm.put(np.zeros((30, WIDTH + 1), dtype=np.float32))
    columns = arm.struct(values_at, WIDTH, counts_at, 1)
    arguments = (columns, 2, slots_at, places_at, 30, block_at, WIDTH + 1)

    arm.call("heterps_copy_records", *arguments, 1)
    assert np.array_equal(block[places], np.concatenate([values, counts], axis=1)[slots])
    block *= 2
    arm.call("heterps_copy_records", *arguments, 0)
    expected = values.copy()
    expected[slots] *= 2
    assert np.array_equal(in_memory, expected)
