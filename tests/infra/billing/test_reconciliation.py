import gzip
import json
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from heterps_core.errors import DataError
from infra.billing.cost_export import read_cost_export
from infra.billing.reconciliation import reconcile, reconciliation_as_text
from infra.ledger.ledger import EndReason, Ledger
from tests.infra.builders import offer, plan

START = datetime(2026, 11, 1, 3, tzinfo=UTC)

LEGACY = """\
identity/LineItemId,lineItem/LineItemType,lineItem/UsageStartDate,lineItem/UsageType,lineItem/ResourceId,\
lineItem/UsageAmount,lineItem/UnblendedCost,resourceTags/user:heterps:run-id
a,Usage,2026-11-01T03:00:00Z,BoxUsage:c7i.large,i-1,1.0,0.36,r1
b,Usage,2026-11-01T04:00:00Z,BoxUsage:c7i.large,i-1,0.5,0.18,r1
c,Usage,2026-11-01T03:00:00Z,USW2-SpotUsage:c7i.xlarge,i-2,1.0,0.20,r1
d,Usage,2026-11-01T03:00:00Z,EBS:VolumeUsage.gp3,vol-1,0.01,0.0008,r1
e,Usage,2026-11-01T03:00:00Z,BoxUsage:c7i.large,i-lost,2.0,0.72,r0
f,Usage,2026-11-01T03:00:00Z,BoxUsage:m5.large,i-others,2.0,0.2,
g,Tax,2026-11-01T03:00:00Z,,,,0.99,
"""
"""By hand, after the columns of AWS's data dictionary; i-2 is charged for an hour though it lived half an hour."""


@pytest.fixture
def entries(tmp_path):
    """i-1 lived 1.5 h at 0.36 USD/hour, i-2 half an hour at 0.2, i-3 a second at 0.36, one was never had."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    cheap, dear = offer(price_usd_per_hour=0.36), offer("c7i.xlarge", price_usd_per_hour=0.2)
    requests = plan(cheap, dear, cheap, cheap).node_requests()
    for request in requests:
        ledger.intend("r1", "aws", request, at=START)
    for request, name, hours in zip(requests, ["i-1", "i-2", "i-3"], [1.5, 0.5, 1 / 3600], strict=False):
        ledger.launched("r1", request.node_id, provider_instance_id=name, at=START)
        ledger.ended("r1", request.node_id, reason=EndReason.RUN_ENDED, at=START + timedelta(hours=hours))
    ledger.failed("r1", requests[3].node_id, reason="no capacity", at=START)
    return ledger.entries()


def write_legacy(folder):
    path = folder / "export.csv.gz"
    path.write_bytes(gzip.compress(LEGACY.encode()))
    return path


def write_cur2(folder, *, as_parquet):
    """The same lines with the names and the map of tags of CUR 2.0."""
    rows = [line.split(",") for line in LEGACY.splitlines()[1:]]
    columns = {
        "line_item_line_item_type": [row[1] for row in rows],
        "line_item_usage_start_date": [row[2] for row in rows],
        "line_item_usage_type": [row[3] for row in rows],
        "line_item_resource_id": [row[4] for row in rows],
        "line_item_usage_amount": [row[5] for row in rows],
        "line_item_unblended_cost": [row[6] for row in rows],
    }
    tags = [{"user_heterps_run_id": row[7]} if row[7] else {} for row in rows]
    if as_parquet:
        path = folder / "export.parquet"
        numbers = ("line_item_usage_amount", "line_item_unblended_cost")
        arrays = {
            name: pa.array([float(v or 0) for v in values]) if name in numbers else pa.array(values)
            for name, values in columns.items()
        }
        times = [datetime.fromisoformat(v) for v in columns["line_item_usage_start_date"]]
        arrays["line_item_usage_start_date"] = pa.array(times, pa.timestamp("ms", "UTC"))
        arrays["resource_tags"] = pa.array(
            [list(entry.items()) for entry in tags], pa.map_(pa.string(), pa.string())
        )
        pq.write_table(pa.table(arrays), path)
        return path
    path = folder / "export.csv"
    quoted = ['"' + json.dumps(entry).replace('"', '""') + '"' for entry in tags]
    lines = [",".join([*values, tag]) for *values, tag in zip(*columns.values(), quoted, strict=True)]
    path.write_text("\n".join([",".join([*columns, "resource_tags"]), *lines]) + "\n")
    return path


@pytest.fixture(params=["legacy csv.gz", "cur2 csv", "cur2 parquet"])
def export(request, tmp_path):
    if request.param == "legacy csv.gz":
        return write_legacy(tmp_path)
    return write_cur2(tmp_path, as_parquet=request.param.endswith("parquet"))


def test_every_instance_is_held_against_what_was_charged_for_it(entries, export):
    found = reconcile(entries, read_cost_export(export), now=START)

    by_id = {instance.provider_instance_id: instance for instance in found.instances}
    assert by_id["i-1"].difference_usd == pytest.approx(0.0)
    assert by_id["i-2"].difference_usd == pytest.approx(0.1)
    assert (by_id["i-3"].charged_usd, by_id["i-3"].difference_usd) == (None, None)
    # A minute is the least that is charged: 0.36 / 60.
    assert by_id["i-3"].ours_usd == pytest.approx(0.006)
    assert (found.ours_usd, found.charged_usd) == (pytest.approx(0.64), pytest.approx(0.74))


def test_what_only_one_of_the_bills_knows_is_told(entries, export):
    found = reconcile(entries, read_cost_export(export), now=START)

    assert [instance.provider_instance_id for instance in found.missing] == ["i-3"]
    assert [item.resource_id for item in found.unknown] == ["i-lost"]
    assert found.other_usd == {"EBS:VolumeUsage.gp3": pytest.approx(0.0008)}


def test_the_text_names_the_largest_difference_first(entries, export):
    text = reconciliation_as_text(reconcile(entries, read_cost_export(export), now=START))

    assert text.splitlines()[1].startswith("i-2 ")
    assert "0.640000 USD ours, 0.740000 USD charged (+15.62%)" in text
    assert "not in the export: 1 instances, 0.006000 USD" in text
    assert "charged, but in no ledger: i-lost, 0.720000 USD" in text


def test_an_export_without_resource_ids_is_refused_with_the_way_out(tmp_path):
    path = tmp_path / "export.csv"
    path.write_text("lineItem/LineItemType,lineItem/UnblendedCost\nUsage,1\n")

    with pytest.raises(DataError, match=r"lacks .*line_item_resource_id.*INCLUDE_RESOURCES"):
        read_cost_export(path)


@pytest.mark.parametrize("content", [b"", b"\x1f\x8bnot a gzip", b"PAR1 no"])
@pytest.mark.parametrize("name", ["export.csv", "export.csv.gz", "export.parquet"])
def test_a_file_that_is_no_export_is_refused(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(DataError, match="export"):
        read_cost_export(path)


def test_a_cost_that_is_no_number_is_told_with_its_line(tmp_path):
    path = tmp_path / "export.csv"
    path.write_text(LEGACY.replace("0.18", "much"))

    with pytest.raises(DataError, match="line 3"):
        read_cost_export(path)
