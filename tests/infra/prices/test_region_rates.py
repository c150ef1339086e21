import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.training.storage.store import StorageUsage
from infra.prices.region_rates import rates_between, write_rates
from infra.prices.service_charges import RATES, ServiceRate, service_lines
from tests.infra.prices import aws_answers
from tests.infra.prices.aws_answers import NOW, stubbed_prices, will_give_rates

HOME, AWAY, FAR = "us-east-1", "eu-west-1", "sa-east-1"
BETWEEN = "traffic between regions"


def rate(usd):
    return ServiceRate("GB-month", usd, "a list", "2026-11-21")


@pytest.fixture
def folder(tmp_path):
    rates = {"disks": 0.088, "stored data": 0.03, "traffic to us-east-1": 0.02}
    write_rates(tmp_path, {AWAY: {name: rate(usd) for name, usd in rates.items()}})
    return tmp_path


def usd(rates):
    return {name: rate.usd_per_unit for name, rate in rates.items()}


def test_rates_come_from_all_products_in_the_units_of_bills():
    prices, pricing, _ = stubbed_prices()
    will_give_rates(pricing, AWAY)

    # By hand: 46.08 USD for a GiB/s is 0.045 for a MiB/s; of two tiers the more expensive one counts.
    assert prices.rates(AWAY, now=NOW) == aws_answers.RATES
    pricing.assert_no_pending_responses()


def test_disks_are_priced_in_the_region_of_machines_and_requests_in_that_of_the_store(folder):
    rates = rates_between(folder, AWAY, HOME)

    assert usd(rates) == usd(RATES) | {"disks": 0.088, "traffic to us-east-1": 0.02}
    assert rates["disks"].price_source == "a list"
    assert rates["disks"].price_as_of == "2026-11-21"
    assert rates_between(folder, HOME, AWAY)["stored data"].usd_per_unit == 0.03


def test_without_a_refresh_rates_are_those_of_the_bundled_region(tmp_path):
    assert rates_between(tmp_path, HOME, HOME) == RATES


def test_a_byte_between_regions_costs_the_higher_rate_of_the_directions(folder):
    assert rates_between(folder, AWAY, HOME)[BETWEEN].usd_per_unit == 0.02

    write_rates(folder, {FAR: {"traffic to eu-west-1": rate(0.138)}})

    assert rates_between(folder, AWAY, FAR)[BETWEEN].usd_per_unit == 0.138
    assert rates_between(folder, FAR, AWAY)[BETWEEN].usd_per_unit == 0.138
    assert rates_between(folder, AWAY, HOME)["disks"].usd_per_unit == 0.088, "those of others stay"


def test_a_bill_has_a_line_for_what_crossed(folder):
    lines = service_lines(
        instance_seconds=0.0,
        disk_gb_each=0.0,
        storage=StorageUsage(crossing_bytes=3 * 10**9),
        rates=rates_between(folder, AWAY, HOME),
    )

    assert [(line.service, line.quantity, line.usd) for line in lines] == [
        (BETWEEN, 3.0, pytest.approx(0.06))
    ]


def test_a_damaged_file_is_named(folder):
    (folder / "service_rates.json").write_text("{")

    with pytest.raises(ConfigurationError, match=r"service_rates\.json"):
        rates_between(folder, AWAY, HOME)
