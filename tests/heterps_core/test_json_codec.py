from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import pytest

from heterps_core.errors import MalformedDocumentError
from heterps_core.field_rules import Positive, count
from heterps_core.hardware import Market
from heterps_core.json_codec import JsonDocument, JsonForm


@dataclass(frozen=True)
class Part:
    sizes: tuple[Annotated[int, count(8)], ...]
    market: Market
    at: datetime | None = None


@dataclass(frozen=True)
class Whole(JsonDocument):
    json_form = JsonForm(what="whole", way_out="make it again", version=2, sums=("num_parts",))

    parts: Mapping[str, Part]
    value: float | str
    pair: tuple[int, bool] = (0, False)

    @property
    def num_parts(self) -> int:
        return len(self.parts)


WHOLE = Whole({"a": Part((1, 8), Market.SPOT, datetime(2026, 11, 22, tzinfo=UTC))}, "many")
DOCUMENT = {
    "schema_version": 2,
    "parts": {"a": {"sizes": [1, 8], "market": "spot", "at": "2026-11-22T00:00:00+00:00"}},
    "value": "many",
    "pair": [0, False],
    "num_parts": 1,
}


def test_a_dataclass_is_written_by_its_fields_and_sums_and_read_by_its_fields():
    assert WHOLE.to_json() == DOCUMENT
    assert Whole.from_json({**DOCUMENT, "comment": "by hand"}) == WHOLE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 1}, "schema_version: must be 2, got 1"),
        ({"schema_version": True}, "schema_version: must be 2, got True"),
        ({"value": []}, r"value: must be a number or a text, got \[\]"),
        ({"pair": [1]}, r"pair: must be a list of 2, got \[1\]"),
        ({"pair": [1, 0]}, r"pair\[1\]: must be true or false, got 0"),
        ({"pair": [True, True]}, r"pair\[0\]: must be a whole number, got True"),
        ({"parts": []}, r"parts: must be a JSON object, got \[\]"),
        ({"parts": {"a": {"market": "spot"}}}, "parts.a.sizes: is missing"),
        ({"parts": {"a": {"sizes": [9], "market": "spot"}}}, r"parts.a.sizes\[0\]: must lie in 1..8, got 9"),
        (
            {"parts": {"a": {"sizes": [], "market": 7}}},
            "parts.a.market: must be one of on-demand, spot, got 7",
        ),
        (
            {"parts": {"a": {"sizes": [], "market": "spot", "at": 7}}},
            "parts.a.at: must be a time as in ISO 8601, got 7",
        ),
    ],
)
def test_what_is_wrong_is_reported_with_the_path_the_rule_the_value_and_the_way_out(change, message):
    with pytest.raises(MalformedDocumentError, match=f"^whole: {message}; make it again$"):
        Whole.from_json(DOCUMENT | change)


def test_a_document_of_no_object_is_refused():
    with pytest.raises(MalformedDocumentError, match="must be a JSON object, got 7; make it again"):
        Whole.from_json(7)


@dataclass(frozen=True)
class Strict(JsonDocument):
    json_form = JsonForm(is_strict=True)

    price: Positive = 1.0


def test_a_strict_document_names_an_unknown_field_and_the_known_ones():
    with pytest.raises(MalformedDocumentError, match="prise: is not a known field; known are: price"):
        Strict.from_json({"prise": 2.0})
