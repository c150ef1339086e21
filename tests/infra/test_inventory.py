"""The machines that people have: as a file says it, as plans name them, and what is refused in one line."""

import pytest

from heterps_core.device_types import get_device_type
from heterps_core.errors import ConfigurationError, UnknownNameError
from heterps_core.machine import num_cores
from heterps_core.planning.problem.extra_costs import Reserved
from heterps_core.planning.provisioning.offer_choice import most_units, reserved_of, unit_prices
from infra.inventory import HOMES, inventory_path, inventory_text, read_inventory, reserved_offers
from infra.prices.price_catalogue import PriceCatalogue
from infra.providers import PROVIDERS, get_provider
from infra.workspace import Workspace
from tasks.prices import catalogue_of, device_types_of

EPYC = """
[[machines]]
kind = "epyc-32"
home = "slurm"
count = 4
cores = 32
memory_gb = 128
cards = 0
disk_gb = 900
network_gbit_per_s = 10
price_usd_per_hour = 3.2
selector = { partition = "cpu", features = "avx512" }
"""
CARDS = """
[[machines]]
kind = "two-cards"
home = "here"
count = 1
cores = 16
memory_gb = 64
cards = 2
card = "NVIDIA A100-SXM4-80GB"
price_usd_per_hour = 1
"""


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path)


def write(workspace, text):
    inventory_path(workspace).write_text(text)


def test_homes_are_the_providers_that_have_an_inventory():
    assert {name for name, each in PROVIDERS.items() if each.has_inventory} <= set(HOMES)


def test_a_workspace_without_a_file_has_this_machine_as_it_is_for_nothing(workspace):
    [machine] = get_provider("here").kinds(workspace)

    assert (machine.kind, machine.count, machine.cores) == ("here", 1, num_cores())
    assert machine.price_usd_per_hour == 0
    assert "cpu-here" in device_types_of(workspace, "here")


def test_what_is_written_is_what_is_read(workspace):
    write(workspace, EPYC + CARDS)
    kinds = read_inventory(workspace)

    write(workspace, inventory_text(kinds))

    assert read_inventory(workspace) == kinds
    assert kinds[0].selector == {"partition": "cpu", "features": "avx512"}


def test_reserved_instances_are_offers_at_no_price_in_their_region(workspace):
    entry = '[[reserved]]\ninstance_type = "c7i.4xlarge"\nregion = "us-east-1"\ncount = 3\n'
    write(workspace, entry)

    [offer] = reserved_offers(workspace, PriceCatalogue(), region="us-east-1")

    assert (offer.instance_type.name, offer.count, offer.price_usd_per_hour) == ("c7i.4xlarge", 3, 0.0)
    assert offer.is_reserved
    assert reserved_offers(workspace, PriceCatalogue(), region="eu-west-1") == ()
    assert reserved_of("cpu-c7i-spot", [offer]) == Reserved(name="c7i.4xlarge", units=8, count=3)
    write(workspace, entry.replace("c7i.4x", "c7i.5x"))
    with pytest.raises(UnknownNameError, match=r"'c7i\.5xlarge' is not a known reserved instance type"):
        reserved_offers(workspace, PriceCatalogue(), region="us-east-1")


def test_a_core_has_its_share_of_the_machine(workspace):
    write(workspace, EPYC)
    [kind] = read_inventory(workspace)

    [core] = kind.device_types()

    assert (core.name, core.instance_families) == ("cpu-epyc-32", ("epyc-32",))
    assert core.memory_bytes == 4e9
    assert core.network_bandwidth_bytes_per_s == pytest.approx(10e9 / 8 / 32)
    [offer] = kind.offers()
    assert core.units_of(offer.instance_type) == 32


def test_a_machine_here_is_divided_into_cores_and_cards_and_has_one_price(workspace):
    write(workspace, CARDS)

    offers = catalogue_of(workspace, "here").offers(region="us-east-1")

    assert device_types_of(workspace, "here") == ["cpu-two-cards", "gpu-two-cards"]
    assert unit_prices(offers) == {"cpu-two-cards": 1 / 16, "gpu-two-cards": 1 / 2}
    assert [most_units(name, offers) for name in ("cpu-two-cards", "gpu-two-cards")] == [16, 2]
    assert get_device_type("gpu-two-cards").memory_bytes == get_device_type("gpu-a100").memory_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ('home = "slurm"', 'home = "moon"'),
            "'moon' is not a known home of machines; known are: here, ray, slurm",
        ),
        (("price_usd_per_hour = 3.2", ""), r"machines\[0\].price_usd_per_hour: is missing"),
        (("= 3.2", "= -1"), r"price_usd_per_hour: must not be negative, got -1"),
        (("count = 4", "count = 0"), r"machines\[0\].count: must lie in 1\.\..*, got 0"),
        (("cores = 32", "cores = 0"), r"machines\[0\].cores: must lie in 1\.\.512, got 0"),
        (('"epyc-32"', '"c7i"'), "must not be a name of heterps catalogue, got 'c7i'; name it own-c7i"),
        (
            ('"epyc-32"', '"gpu-box"'),
            "must be lower-case letters, .* without cpu, gpu and spot, got 'gpu-box'",
        ),
        (("cards = 0", "cards = 0\nlike = 'cpu-c0'"), "'cpu-c0' is not a known device type; near are:"),
        (("cards = 0", "gpus = 1"), r"machines\[0\].gpus: is not a known field; known are: kind, home,"),
        (("[[machines]]", "[[machines"), "Expected"),
        (("[[machines]]", "[machine]"), "machine: is not a known field; known are: machines"),
    ],
)
def test_a_wrong_inventory_is_refused_in_one_line_with_the_file_and_the_way_out(workspace, change, message):
    write(workspace, EPYC.replace(*change))

    with pytest.raises(ConfigurationError, match=message) as refused:
        read_inventory(workspace)

    text = str(refused.value)
    assert text.startswith(str(inventory_path(workspace)))
    assert text.endswith("; edit it as docs/HOMES.md says")
    assert "\n" not in text


def test_a_kind_stands_once_in_an_inventory(workspace):
    write(workspace, EPYC + EPYC)

    with pytest.raises(ConfigurationError, match="must have each kind once, but has twice epyc-32"):
        read_inventory(workspace)
