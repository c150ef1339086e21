import pytest

from heterps_core.training.storage.store import StorageUsage
from infra.prices.service_charges import service_lines, table_disk_usd_per_hour, usd_per_machine_hour


def usd_by_service(**options):
    return {line.service: line.usd for line in service_lines(**options)}


def test_disks_and_addresses_follow_from_the_hours_of_the_instances():
    # By hand: 10 hours with 73 GB are a GB-month; ten addresses of 0.005 USD.
    found = usd_by_service(instance_seconds=36_000, disk_gb_each=73)

    assert found == {"disks": pytest.approx(0.08), "public addresses": pytest.approx(0.05)}


def test_heartbeats_of_a_fleet_that_beats_too_often_are_seen():
    """33 nodes, every two seconds for an hour, three requests a beat: 178,200 at 0.005 USD the thousand."""
    storage = StorageUsage(put_requests=33 * 1_800 * 3)

    found = usd_by_service(instance_seconds=0, disk_gb_each=0, storage=storage)

    assert found == {"requests that write or list": pytest.approx(0.891)}


def test_each_hour_of_a_machine_has_its_disk_its_address_and_what_it_asks_of_the_bucket():
    # By hand: 360 heartbeats at 0.005 USD the thousand, two reads a minute at 0.0004 USD the thousand.
    per_hour = 73 * 0.08 / 730 + 0.005 + 0.0018 + 0.000048

    assert usd_per_machine_hour(disk_gb_each=73) == pytest.approx(per_hour)


@pytest.mark.parametrize(("mib_per_s", "iops_above_3000"), [(125, 0), (750, 0), (850, 400), (1_000, 1_000)])
def test_a_fast_volume_costs_the_operations_that_its_throughput_needs(mib_per_s, iops_above_3000):
    per_month = 200 * 0.08 + (mib_per_s - 125) * 0.04 + iops_above_3000 * 0.005

    assert table_disk_usd_per_hour(gigabytes=200, mib_per_s=mib_per_s) == pytest.approx(per_month / 730)


def test_what_was_read_kept_and_sent_away_has_lines_of_its_own():
    # By hand: 2 GB for a month of 730 h; 10,000 reads; 3 GB that leave the region.
    storage = StorageUsage(
        get_requests=10_000,
        bytes_written=10**15,
        bytes_read=10**12,
        stored_byte_s=2e9 * 730 * 3_600,
        egress_bytes=3 * 10**9,
    )

    found = usd_by_service(instance_seconds=0, disk_gb_each=0, storage=storage)

    assert found == {
        "requests that read": pytest.approx(0.004),
        "stored data": pytest.approx(0.046),
        "traffic out of the region": pytest.approx(0.27),
    }
