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

ODD_NAMES = (
    "",
    " ",
    "a.b",
    "a b",
    'a "b"',
    "a,b",
    "a\nb",
    "a\\b",
    "a\x00b",
    "=[a]",
    "#a",
    "Größe",
    "広告 😀",
    "x" * 5_000,
    "1",
    "element",
    "None",
    "Label",
)


def text_of(rows: list[list[str]], *, separator: str = ",", end: str = "\n") -> bytes:
    """Return the rows as a text file."""
    return "".join(separator.join(fields) + end for fields in rows).encode()


def _rows_with(**odd: list[str]) -> list[list[str]]:
    """Return a header and rows: label, site, price and odd columns."""
    columns = {
        "label": [str(row * 7 % 5 // 3) for row in _ROWS],
        "site": [f"s{row % 7}" for row in _ROWS],
        "price": [f"{1 + row * 31 % 83}.{row % 10}" for row in _ROWS],
        **{name: [values[row % len(values)] for row in _ROWS] for name, values in odd.items()},
    }
    return [list(columns), *map(list, zip(*columns.values(), strict=True))]


def _with_label(*values: str) -> bytes:
    rows = _rows_with()
    return text_of([rows[0], *([values[row % len(values)], *rows[row + 1][1:]] for row in _ROWS)])


_PLAIN = _rows_with()
_TEXT = text_of(_PLAIN)

ODD_TEXTS: dict[str, tuple[bytes, str]] = {
    "plain": (_TEXT, ""),
    "BOM": (b"\xef\xbb\xbf" + _TEXT, ""),
    "CRLF": (text_of(_PLAIN, end="\r\n"), ""),
    "blank lines first": (b"\n\r\n" + _TEXT, ""),
    "no end of line": (_TEXT.rstrip(), ""),
    "tabs": (text_of(_PLAIN, separator="\t"), ""),
    "semicolons": (text_of(_PLAIN, separator=";"), ""),
    "bars": (text_of(_PLAIN, separator="|"), ""),
    "Hive": (text_of(_PLAIN, separator="\x01"), ""),
    "carets": (text_of(_PLAIN, separator="^"), ""),
    "padded": (text_of(_PLAIN, separator=", "), ""),
    "as many tabs as commas": (text_of(_rows_with(**{"a\tb\tc\td": ["x", "y"]})), ""),
    "latin-1 header": (
        text_of(_rows_with(größe=["x", "y"])).decode().encode("latin-1"),
        "must be UTF-8 text",
    ),
    "latin-1 column": (text_of(_rows_with(odd=["ö", "ß"])).decode().encode("latin-1"), ""),
    "UTF-16": (_TEXT.decode().encode("utf-16"), "text in UTF-16"),
    "empty": (b"", "must hold at least one row"),
    "blank lines alone": (b"\n\n", "must hold at least one row"),
    "header without rows": (b"label,site,price\n", "must hold at least one row"),
    "one row": (b"label,site,price\n1,s1,2.5\n", "column label has 1"),
    "one column": (b"label\n1\n0\n", "must have a column of categories"),
    "one column without label": (b"site\na\nb\n", "has no column that is called as labels are"),
    "no header": (text_of(_PLAIN[1:]), "must have a header"),
    "ragged": (_TEXT + b"1,s1\n", "expected 3|Expected 3"),
    "numbers as names": (text_of([["label", "0", "1"], *_PLAIN[1:]]), ""),
    "a name that stands twice": (
        text_of([["label", "site", "site", "odd"], *_rows_with(o=["x", "y"])[1:]]),
        "",
    ),
    "a label that stands twice": (text_of([["label", "site", "label"], *_PLAIN[1:]]), "stands there 2 times"),
    "a column without a name": (text_of(_rows_with(**{"": ["x", "y"]})), ""),
    "quoted": (text_of(_rows_with(odd=['"a,b"', '"a ""b"""', '""'])), ""),
    "quoted header": (text_of(_rows_with(**{'"a,b"': ["x", "y"]})), ""),
    "numbers near their end": (text_of(_rows_with(odd=["1e308", "2", "3"])), ""),
    "infinity": (text_of(_rows_with(odd=["inf", "-inf", "2.5"])), ""),
    "nan": (text_of(_rows_with(odd=["nan", "1.5", "NaN", ""])), ""),
    "whole numbers beyond int64": (
        text_of(_rows_with(user_id=["18446744073709551615", "18446744073709551614"])),
        "",
    ),
    "leading zeros": (text_of(_rows_with(zip=["00501", "010", "10"])), ""),
    "thousands": (text_of(_rows_with(odd=['"1,000"', '"2,500"'])), ""),
    "booleans": (text_of(_rows_with(odd=["True", "False", ""])), ""),
    "times of day": (text_of(_rows_with(odd=["10:00:00", "11:30:00"])), ""),
    "a number that is a text far below": (text_of([*_rows_with(odd=["1.5"] * 200 + ["none"] * 40)]), ""),
    "label True and False": (_with_label("True", "False", "False"), ""),
    "label yes and no": (_with_label("yes", "no", "no"), ""),
    "label Yes, yes and no": (_with_label("Yes", "yes", "no", "no", "no", "NO"), ""),
    "label Y and N": (_with_label("Y", "N", "N"), ""),
    "label 1.0 and 0.0": (_with_label("1.0", "0.0", "0.0"), ""),
    "label 1, 1.0 and 0": (_with_label("1", "1.0", "0", "0"), ""),
    "label 1 and -1": (_with_label("1", "-1", "-1"), ""),
    "label 2 and 1": (_with_label("2", "1", "1"), ""),
    "label in quotes": (_with_label('"1"', '"0"', '"0"'), ""),
    "label of blanks": (_with_label("1", "0", " 0"), ""),
    "label 1e0 and 0": (_with_label("1e0", "0", "0"), ""),
    "label of probabilities": (_with_label("0.1", "0.25", "0.9"), "of two, but column label has 3"),
    "label of three values": (_with_label("0", "1", "2"), "of two, but column label has 3"),
    "label with gaps": (_with_label("0", "1", ""), "a value in every row"),
    "label with NA": (_with_label("0", "1", "NA"), "a value in every row"),
    "label of one value": (_with_label("0"), "column label has 1"),
    "label of dates": (_with_label("2026-11-01", "2026-11-02", "2026-11-02"), ""),
}
"""By what is odd: a file of text, and what a refusal says; empty where it can be trained with."""

ODD_LABELS: dict[str, tuple[pa.Array, str]] = {
    "boolean": (_some([True, False, False]), ""),
    "float32": (_some([0.0, 1.0, 0.0], pa.float32()), ""),
    "half float": (_some([0.0, 1.0, 0.0], pa.float16()), ""),
    "int8": (_some([1, -1, -1], pa.int8()), ""),
    "uint64": (_some([1, 0, 0], pa.uint64()), ""),
    "decimal": (_some([Decimal("1.00"), Decimal("0.00"), Decimal("0.00")]), ""),
    "string": (_some(["click", "none", "none"]), ""),
    "string_view": (_some(["1", "0", "0"], pa.string_view()), ""),
    "large_string": (_some(["1", "0", "0"], pa.large_string()), ""),
    "dictionary": (_some(["yes", "no", "no"]).dictionary_encode(), ""),
    "bool8": (pa.ExtensionArray.from_storage(pa.bool8(), _some([1, 0, 0], pa.int8())), ""),
    "binary": (_some([b"1", b"0", b"0"]), ""),
    "several forms": (_some(["1.0", "0", "True", "False", "0.0"]), ""),
    "NaN": (_some([1.0, 0.0, np.nan]), "a value in every row"),
    "null": (pa.nulls(NUM_ROWS), "a value in every row"),
    "list": (_some([[1], [0]]), "must hold texts or numbers"),
    "struct": (_some([{"x": 1}]), "must hold texts or numbers"),
    "bytes": (_some([b"\xff", b"\xfe"]), "must hold texts or numbers"),
}
"""By what is odd: a label column in Parquet, and what a refusal says; empty where it can be trained with."""
