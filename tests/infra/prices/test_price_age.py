import logging
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from infra.prices.price_age import age_text, warn_of_old_prices
from tests.infra.builders import offer

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("times", "text"),
    [
        (["2026-11-21T11:30:00+00:00"], "prices less than an hour old"),
        (["2026-11-21T07:00:00+00:00"], "prices 5 hours old"),
        (["2026-11-20T08:00:00+00:00"], "prices 28 hours old"),
        (["2026-07-20", "2026-11-21T07:00:00+00:00"], "prices 5 hours to 124 days old"),
    ],
)
def test_age_is_told_in_words(times, text):
    assert age_text([replace(offer(), price_as_of=time) for time in times], now=NOW) == text


def test_a_price_older_than_a_week_is_warned_of_with_the_way_out(caplog):
    fresh, old = (replace(offer(), price_as_of=time) for time in ("2026-11-15", "2026-11-13"))

    with caplog.at_level(logging.WARNING):
        warn_of_old_prices([fresh], now=NOW)
        assert caplog.text == ""
        warn_of_old_prices([fresh, old], now=NOW)

    assert "c7i.large is 8 days old" in caplog.text
    assert "prefect deployment run refresh-prices" in caplog.text
