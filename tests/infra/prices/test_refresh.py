import gzip
from datetime import timedelta

import pytest

from heterps_core.errors import ConfigurationError
from infra.prices.live_prices import refresh
from infra.prices.price_catalogue import (
    BUNDLED_SNAPSHOT,
    KEPT_FILES,
    PriceCatalogue,
    newest_refreshed,
    write_refreshed,
)
from tests.infra.builders import offer_named
from tests.infra.prices.aws_answers import (
    NOW,
    RATES,
    change,
    instance_type,
    product,
    stubbed_prices,
    will_give_products,
    will_give_rates,
    will_give_sizes,
    will_give_spot_prices,
)

EAST, WEST = "us-east-1", "us-west-2"


def answers(pricing, ec2, region, *, spot_usd="0.04"):
    will_give_sizes(ec2[region], [instance_type("c7i.large", 2)])
    will_give_products(pricing, [product("c7i.large", "0.09"), product("x1.32xlarge", "13.3")], region=region)
    will_give_rates(pricing, region)
    changes = [change("c7i.large", f"{region}a", spot_usd, NOW - timedelta(hours=2))]
    will_give_spot_prices(ec2[region], changes, names=["c7i.large"])


def asked(prices, known=(), *, regions=(EAST,), now=NOW):
    return refresh(prices, known, regions=regions, families=["c7i"], now=now)


def test_all_prices_of_several_regions_are_of_this_refresh():
    prices, pricing, ec2 = stubbed_prices(EAST, WEST)
    for region in (EAST, WEST):
        answers(pricing, ec2, region)

    result = asked(prices, regions=(EAST, WEST))

    assert (result.num_new, result.num_kept, result.problems) == (4, 0, ())
    assert {(o.region, o.zone, str(o.market), o.price_usd_per_hour) for o in result.offers} == {
        (EAST, None, "on-demand", 0.09),
        (EAST, f"{EAST}a", "spot", 0.04),
        (WEST, None, "on-demand", 0.09),
        (WEST, f"{WEST}a", "spot", 0.04),
    }
    assert {offer.price_as_of for offer in result.offers} == {"2026-11-21T04:00:00+00:00"}
    assert result.rates == {EAST: RATES, WEST: RATES}


def test_what_cannot_be_asked_for_keeps_yesterdays_price_and_says_so():
    prices, pricing, ec2 = stubbed_prices(EAST)
    answers(pricing, ec2, EAST)
    yesterday = asked(prices).offers
    will_give_sizes(ec2[EAST], [instance_type("c7i.large", 2)])
    pricing.add_client_error("get_products", "ThrottlingException", "slow down")
    will_give_rates(pricing, EAST)
    will_give_spot_prices(ec2[EAST], [change("c7i.large", f"{EAST}b", "0.05", NOW)], names=["c7i.large"])

    today = asked(prices, yesterday, now=NOW + timedelta(days=1))

    assert {(o.zone, o.price_usd_per_hour, o.price_as_of[:10]) for o in today.offers} == {
        (None, 0.09, "2026-11-21"),
        (f"{EAST}b", 0.05, "2026-11-22"),  # zone a is in no answer any more
    }
    assert (today.num_new, today.num_kept) == (1, 1)
    assert len(today.problems) == 1
    assert "on-demand prices in us-east-1" in today.problems[0]


def test_sizes_that_cannot_be_asked_for_are_those_known_before():
    prices, pricing, ec2 = stubbed_prices(EAST)
    answers(pricing, ec2, EAST)
    yesterday = asked(prices).offers
    ec2[EAST].add_client_error("describe_instance_types", "UnauthorizedOperation", "no")
    will_give_products(pricing, [product("c7i.large", "0.08")], region=EAST)
    will_give_rates(pricing, EAST)
    will_give_spot_prices(ec2[EAST], [], names=["c7i.large"])

    today = asked(prices, yesterday)

    assert [(o.instance_type.vcpus, o.price_usd_per_hour) for o in today.offers] == [(2, 0.08)]
    assert len(today.problems) == 1


def test_a_refresh_goes_through_its_file_unchanged_and_the_newest_file_counts(tmp_path):
    prices, pricing, ec2 = stubbed_prices(EAST)
    answers(pricing, ec2, EAST)
    offers = asked(prices).offers
    write_refreshed(tmp_path, offers[:1], at=NOW - timedelta(days=1))

    write_refreshed(tmp_path, offers, at=NOW)

    newest = newest_refreshed(tmp_path)
    assert newest.path.name == "prices_2026-11-21T040000.000000Z.csv.gz"
    assert tuple(newest.offers()) == offers
    assert offer_named("c7i.large", PriceCatalogue([newest])).price_usd_per_hour == 0.09


def test_a_refresh_wins_over_the_bundled_prices_and_leaves_the_others(tmp_path):
    prices, pricing, ec2 = stubbed_prices(EAST)
    will_give_sizes(ec2[EAST], [instance_type("c7i.large", 2)])
    will_give_products(pricing, [product("c7i.large", "0.20")], region=EAST)
    will_give_spot_prices(ec2[EAST], [], names=["c7i.large"])

    catalogue = PriceCatalogue([BUNDLED_SNAPSHOT, write_refreshed(tmp_path, asked(prices).offers, at=NOW)])

    assert offer_named("c7i.large", catalogue).price_usd_per_hour == 0.20
    assert offer_named("g4dn.xlarge", catalogue).price_usd_per_hour == 0.526


def test_old_files_are_removed_and_no_draft_is_left(tmp_path):
    for day in range(KEPT_FILES + 2):
        write_refreshed(tmp_path, [], at=NOW + timedelta(days=day))

    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == KEPT_FILES
    assert names[0].startswith("prices_2026-11-23")


def test_a_damaged_file_is_named_with_its_line(tmp_path):
    prices, pricing, ec2 = stubbed_prices(EAST)
    answers(pricing, ec2, EAST)
    written = write_refreshed(tmp_path, asked(prices).offers, at=NOW)
    text = gzip.decompress(written.path.read_bytes()).decode()
    written.path.write_bytes(gzip.compress(text.replace("0.09", "free").encode()))

    with pytest.raises(ConfigurationError, match="line 2"):
        list(written.offers())
