"""Tables with something odd in them: columns of every Arrow type, names, labels and texts that real files have."""

import uuid
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

NUM_ROWS = 240
_ROWS = range(NUM_ROWS)


def clicks(**odd: Any) -> pa.Table:
    """Return a table that can be trained with, and some columns more."""
    random = np.random.default_rng(0)
    plain = {
        "label": random.integers(0, 2, NUM_ROWS),
        "price": random.normal(10, 2, NUM_ROWS),
        "site": [f"s{row % 7}" for row in _ROWS],
    }
    return pa.table(plain | odd)


def _some(values: list[Any], kind: pa.DataType | None = None) -> pa.Array:
    return pa.array([values[row % len(values)] for row in _ROWS], kind)


_BYTES = [uuid.UUID(int=(number << 64) + (1 << 63)).bytes for number in range(1, 9)]
_FAR = [-(2**62), 2**62, 0]

ODD_COLUMNS: dict[str, pa.Array] = {  # Of all types that Parquet takes.
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), _some(_BYTES, pa.binary(16))),
    "fixed_size_binary": _some(_BYTES, pa.binary(16)),
    "binary": _some([b"\xff\xfe", b"a", None], pa.binary()),
    "binary of texts": _some([b"a", b"b", b"c"], pa.binary()),
    "large_binary": _some([b"\xff", b"b"], pa.large_binary()),
    "binary_view": _some([b"\xff", b"b"], pa.binary_view()),
    "decimal32": _some([Decimal("1.25"), Decimal("2.50"), None], pa.decimal32(5, 2)),
    "decimal128": pa.array([Decimal(row) / 100 for row in _ROWS], pa.decimal128(38, 18)),
    "decimal256": pa.array([Decimal(f"{row}.{row:050d}") for row in _ROWS], pa.decimal256(76, 50)),
    "decimal256 beyond float64": _some(
        [Decimal(10) ** 75, Decimal(1), Decimal(10) ** 74], pa.decimal256(76, 0)
    ),
    "time32": _some([1, 2, 3], pa.time32("s")),
    "time64": pa.array(_ROWS, pa.time64("ns")),
    "duration": pa.array(_ROWS, pa.duration("us")),
    "timestamp out of range": _some(_FAR, pa.timestamp("ms")),
    "timestamp in ns": pa.array([1_700_000_000_000_000_001 + row for row in _ROWS], pa.timestamp("ns")),
    "timestamp in a zone": pa.array(_ROWS, pa.timestamp("ms", "Europe/Berlin")),
    "timestamp in an unknown zone": pa.array(_ROWS, pa.timestamp("ms", "Mars/Olympus")),
    "timestamp with nulls": _some([1, None, 3], pa.timestamp("us")),
    "date32 out of range": _some([2**31 - 1, -(2**31), 0], pa.date32()),
    "date64": pa.array([86_400_000 * row for row in _ROWS], pa.date64()),
    "half float": _some([0.5, None, np.nan, 65_504.0], pa.float16()),
    "float32 not finite": _some([1.0, np.inf, -np.inf, np.nan], pa.float32()),
    "float64 of NaN": _some([np.nan], pa.float64()),
    "float64 near its end": _some([1e308, -1e308, 5e-324], pa.float64()),
    "uint64": _some([2**64 - 1, 2**63, 7], pa.uint64()),
    "uint64 of numbers": pa.array([2**63 + row * 7919 for row in _ROWS], pa.uint64()),
    "int64": pa.array([2**53 + 1 + row for row in _ROWS], pa.int64()),
    "int8": _some([-128, 127, None], pa.int8()),
    "boolean": _some([True, False, None], pa.bool_()),
    "null": pa.nulls(NUM_ROWS),
    "struct": _some([{"x": 1}, {"x": None}, None], pa.struct([("x", pa.int8())])),
    "map": _some([[("a", 1)], [], None], pa.map_(pa.string(), pa.int8())),
    "list": _some([["a"], [], None, ["a", None, "b"]], pa.list_(pa.string())),
    "list of bytes": _some([[b"\xff"], [b"a"]], pa.list_(pa.binary())),
    "list of nulls": _some([[None], []], pa.list_(pa.null())),
    "list of lists": _some([[["a"], []], None], pa.list_(pa.list_(pa.string()))),
    "list of struct": _some([[{"x": 1}], []], pa.list_(pa.struct([("x", pa.int8())]))),
    "list of boolean": _some([[True, False], []], pa.list_(pa.bool_())),
    "list of dictionary": _some([["a"], []], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
    "list of timestamp": _some([_FAR[:2], []], pa.list_(pa.timestamp("ms"))),
    "large_list": _some([["a"], ["b"], [], None], pa.large_list(pa.string())),
    "large_list of large_string": _some([["a"], [], None], pa.large_list(pa.large_string())),
    "fixed_size_list": _some([[1, 2], None, [3, None]], pa.list_(pa.int8(), 2)),
    "list_view": _some([["a"], []], pa.list_view(pa.string())),
    "dictionary": _some(["a", "b", None]).dictionary_encode().cast(pa.dictionary(pa.uint8(), pa.string())),
    "dictionary of large_string": _some(["a", "b"], pa.large_string()).dictionary_encode(),
    "dictionary of bytes": _some([b"\xff", b"b"]).dictionary_encode(),
    "dictionary of numbers": _some([1.5, 2.5]).dictionary_encode(),
    "dictionary of times": pa.array(_ROWS, pa.timestamp("s")).dictionary_encode(),
    "string_view": _some(["a", "b", None], pa.string_view()),
    "large_string": _some(["a", "", None], pa.large_string()),
    "string that is no UTF-8": pa.Array.from_buffers(
        pa.string(), NUM_ROWS, _some([b"\xff\xfe", b"a"]).buffers()
    ),
    "json": pa.ExtensionArray.from_storage(pa.json_(), _some(['{"a": 1}', "{}"])),
    "bool8": pa.ExtensionArray.from_storage(pa.bool8(), _some([0, 1], pa.int8())),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [2]), _some([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))
    ),
    "texts of numbers": _some(["1", "2.5", "", None]),
    "texts of blanks": _some([" ", "  ", "\t"]),
    "texts of 100 KB": _some(["x" * 100_000, "y" * 100_000, "z"]),
    "texts with line breaks": _some(["a\nb", 'a"b', "a,b", "a\x00b", "\N{ZERO WIDTH SPACE}"]),
    "times in text": pa.array([f"2026-11-01T00:{row // 60:02d}:{row % 60:02d}Z" for row in _ROWS]),
}
