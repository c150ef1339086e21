from datetime import timedelta

import pytest

from heterps_core.device_types import DEVICE_TYPES
from heterps_core.errors import ProvisioningError
from infra.providers.aws.prices import AwsPrices
from tests.infra.prices.aws_answers import (
    NOW,
    change,
    instance_type,
    product,
    stubbed_prices,
    will_give_products,
    will_give_sizes,
    will_give_spot_prices,
)

REGION = "us-east-1"


def test_on_demand_prices_come_from_all_pages_and_0_is_none():
    prices, pricing, _ = stubbed_prices()
    reservation, by_quantity = (
        product("c7i.metal", "0.0000000000"),
        product("c7i.24xlarge", "9", unit="Quantity"),
    )
    will_give_products(
        pricing,
        [product("c7i.large", "0.0892500000"), reservation],
        [product("g4dn.xlarge", "0.5260000000"), by_quantity],
        region=REGION,
    )

    assert prices.on_demand(REGION) == {"c7i.large": 0.08925, "g4dn.xlarge": 0.526}
    pricing.assert_no_pending_responses()


def test_of_two_prices_for_one_type_the_higher_one_counts():
    prices, pricing, _ = stubbed_prices()
    will_give_products(pricing, [product("c7i.large", "0.10"), product("c7i.large", "0.09")], region=REGION)

    assert prices.on_demand(REGION) == {"c7i.large": 0.10}


def test_spot_history_is_put_in_order_by_pool_over_pages():
    prices, _, ec2 = stubbed_prices(REGION)
    # Newest first, an empty page in between, as EC2 gives them.
    will_give_spot_prices(
        ec2[REGION],
        [change("c7i.large", "us-east-1a", "0.041", NOW - timedelta(hours=1))],
        [],
        [
            change("c7i.large", "us-east-1b", "0.050", NOW - timedelta(hours=5)),
            change("c7i.large", "us-east-1a", "0.040", NOW - timedelta(hours=9)),
        ],
        names=["c7i.large"],
    )

    histories = prices.spot(REGION, ["c7i.large"], since=NOW - timedelta(days=1))

    first = histories["c7i.large", "us-east-1a"]
    assert (first.prices_usd_per_hour, first.last_usd_per_hour) == ((0.040, 0.041), 0.041)
    assert first.times == (NOW - timedelta(hours=9), NOW - timedelta(hours=1))
    assert histories["c7i.large", "us-east-1b"].last_usd_per_hour == 0.050


def test_spot_prices_of_many_instance_types_are_asked_for_in_parts():
    prices, _, ec2 = stubbed_prices(REGION)
    names = [f"c7i.{number}" for number in range(250)]
    for part, name in [(names[:200], "c7i.0"), (names[200:], "c7i.249")]:
        will_give_spot_prices(ec2[REGION], [change(name, "us-east-1a", "0.04", NOW)], names=part)

    histories = prices.spot(REGION, names, since=NOW - timedelta(days=1))

    assert {name for name, _ in histories} == {"c7i.0", "c7i.249"}


def test_sizes_have_cards_and_the_baseline_of_the_network():
    prices, _, ec2 = stubbed_prices(REGION)
    will_give_sizes(
        ec2[REGION],
        [instance_type("c7i.large", 2, gbit_per_s=0.781)],
        [
            instance_type("g4dn.xlarge", 4, gpu="T4"),
            instance_type("g7e.2xlarge", 8, gpu="RTX PRO Server 6000"),
        ],
    )

    sizes = prices.sizes(REGION, ["c7i", "g4dn"])

    assert sizes["c7i.large"].network_bandwidth_bytes_per_s == pytest.approx(0.781e9 / 8)
    assert sizes["c7i.large"].disk_bandwidth_bytes_per_s == 81.25e6
    assert (sizes["c7i.large"].accelerator_name, sizes["c7i.large"].accelerator_count) == (None, 0)
    assert (sizes["g4dn.xlarge"].accelerator_name, sizes["g4dn.xlarge"].accelerator_count) == ("t4", 1)
    assert sizes["g4dn.xlarge"].accelerator_memory_bytes_each == 16 * 1024**3
    assert DEVICE_TYPES["gpu-rtx-pro-server-6000"].units_of(sizes["g7e.2xlarge"]) == 0  # 5 of 50 Gbit/s
    assert sizes["g7e.2xlarge"].accelerator_name == DEVICE_TYPES["gpu-rtx-pro-server-6000"].accelerator_name


def test_a_refusal_is_one_line_with_what_was_asked_and_a_way_out():
    prices, pricing, _ = stubbed_prices()
    pricing.add_client_error("get_products", "UnauthorizedOperation", "not allowed")

    with pytest.raises(ProvisioningError, match=r"on-demand prices in us-east-1: .*IAM policy"):
        prices.on_demand(REGION)


def test_calls_slow_down_where_aws_throttles():
    assert AwsPrices.with_own_clients().pricing.meta.config.retries["mode"] == "adaptive"
