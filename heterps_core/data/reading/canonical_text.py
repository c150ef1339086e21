r"""The canonical text of a value: what a category is hashed by, whatever type or spelling it came in.

Tools guess types by the rows that happen to be there: pandas makes whole numbers floating where one is missing, and
numbers of texts where all of them look so. So the identity of a value rests on the value alone, never on its column.

| value, of any Arrow, NumPy, pandas or Python type, or as a text | canonical text |
|---|---|
| 5, 5.0, Decimal("5.00"), "5", "5.0", "+5", " 5 ", "005" | "5" |
| 0, -0.0, "-0" | "0" |
| 1e10, "1e10", "1.0E+10", 10000000000 | "10000000000" |
| 0.5, "0.50", ".5"; float32 0.1 | "0.5"; "0.1" |
| True, "True", "true", "TRUE", 1; False, "false", 0 | "1"; "0" |
| date 2026-11-01, a time at its midnight, "2026-11-01 00:00:00", "2026-11-01T00:00Z" | "2026-11-01" |
| other times of any unit, without zone or in UTC; in another zone | "2026-11-01 12:30:00.5"; converted to UTC |
| times of a day, "12:30:00.500000" | "12:30:00.5" |
| None, NaN, NaT, pd.NA, "", "  ", "nan", "NaN", "None", "NaT", "<NA>" | "": missing |
| infinities; numbers of more than 38 digits in scientific notation | as they are written |
| bytes; UUIDs | their UTF-8 text; 8-4-4-4-12 hexadecimal digits |
| all other texts, such as "NA", "1,000", "01/11/2026", "yes" | without blanks around them |

Refused are floating numbers from 2^53 on (float32: 2^24), as digits may be lost, and durations, whose number depends
on their unit: `identity_problem` in `column_texts.py`.
Models of the first rule (`FIRST_TEXT_RULE`) keep it: the texts of `column_texts`, as they are.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache

BLANKS = " \t\r\n\f\v"
WORDS = {
    **dict.fromkeys(("True", "true", "TRUE"), "1"),
    **dict.fromkeys(("False", "false", "FALSE"), "0"),
    **dict.fromkeys(("nan", "NaN", "None", "NaT", "<NA>"), ""),
}

_MOST_DIGITS = 38
_MOST_REMEMBERED = 1 << 17
"""Texts that were rewritten: most of them come again with the next row group."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d)(?::(\d\d)(?:\.(\d+))?)? ?(Z|UTC|[+-]\d\d(?::?\d\d)?)?", re.ASCII
)
_TIME_OF_DAY = re.compile(r"(\d\d:\d\d:\d\d)\.(\d+)", re.ASCII)


@lru_cache(_MOST_REMEMBERED)
def canonical_text(text: str) -> str:
    """Return the canonical text of a value that is written as a text; see the table of this module.

    Example:
        >>> [canonical_text(text) for text in ("5.0", "1e10", "True", "2026-11-01 00:00:00", "None", " a ")]
        ['5', '10000000000', '1', '2026-11-01', '', 'a']
    """
    text = text.strip(BLANKS)
    if text in WORDS:
        return WORDS[text]
    if _NUMBER.fullmatch(text):
        return _of_number(text)
    if found := _TIME.fullmatch(text):
        return _of_time(text, *found.groups())
    if found := _TIME_OF_DAY.fullmatch(text):
        return _with_fraction(*found.groups())
    return text


def _of_number(text: str) -> str:
    number = Decimal(text)
    if "e" in text.lower() and abs(number.adjusted()) >= _MOST_DIGITS:
        return text
    plain = f"{number:f}"
    if "." in plain:
        plain = plain.rstrip("0").removesuffix(".")
    return plain if number else "0"


def _of_time(
    text: str, day: str, minute: str, second: str | None, fraction: str | None, zone: str | None
) -> str:
    zone = (zone or "").replace("UTC", "Z")
    try:
        moment = datetime.fromisoformat(f"{day} {minute}:{second or '00'}{zone}")
        moment = moment.astimezone(UTC) if zone else moment
    except (ValueError, OverflowError):
        # Such as a 13th month.
        return text
    written = _with_fraction(f"{moment:%H:%M:%S}", fraction)
    return moment.date().isoformat() + ("" if written == "00:00:00" else f" {written}")


def _with_fraction(second: str, fraction: str | None) -> str:
    digits = (fraction or "").rstrip("0")
    return f"{second}.{digits}" if digits else second
