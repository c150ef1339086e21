from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from heterps_core.errors import DataError
from heterps_core.planning.provisioning.spot_trace import read_trace
from tests.paths import PROJECT

SHARED = PROJECT.parent / "shared" / "data"


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("sky.json.gz", '{"metadata": {"gap_seconds": 90}, "data": [1, 0, 2]}', [1, 1, 0, 2]),
        (
            "sailor.json",
            '[{"Time": 0, "GPUs": 4}, {"Time": 63, "GPUs": 3}, {"Time": 180, "GPUs": 3}]',
            [4, 4, 3],
        ),
        ("seconds.csv", "0,0\n60,0\n60,5\n180,5\n", [0, 5, 5]),
        ("hours.csv", "0.000,7\n0.050,7\n0.050,2\n0.100,2\n", [7, 7, 7, 2, 2, 2]),
        ("nodes.csv", "0,add,a\r\n0,add,b\r\n60000,remove,a\r\n180000,add,c\r\n", [2, 1, 1]),
        # A sample is repeated for two minutes, and the next one begins before that is over.
        (
            "dated.txt",
            "2021-12-10, 13:07:45, 80\n2021-12-10, 13:08:45, 80\n2021-12-10, 13:09:45, 80\n"
            "2021-12-10, 13:08:45, 70\n2021-12-10, 13:09:45, 70\n2021-12-10, 13:10:45, 70\n",
            [80, 70, 70],
        ),
    ],
)
def test_counts_are_read_minute_by_minute(tmp_path, name, text, counts):
    assert read_trace(written(tmp_path, name, text)).instance_counts.tolist() == counts


def test_a_price_holds_until_the_next_one_and_the_newest_comes_first_in_the_file(tmp_path):
    text = (
        "Timestamp,ProductDescription,InstanceType,SpotPrice,AvailabilityZone\n"
        "2016-04-25T12:03:00.000Z,Linux/UNIX,m3.large,0.03,us-east-1a\n"
        "2016-04-25T12:01:30.000Z,Linux/UNIX,m3.large,0.02,us-east-1a\n"
        "2016-04-25T12:00:00.000Z,Linux/UNIX,m3.large,0.01,us-east-1a\n"
    )

    assert read_trace(written(tmp_path, "prices.csv", text)).price_usd_per_hour.tolist() == [0.01, 0.01, 0.02]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        "[1, 2]",
        '{"metadata": {"gap_seconds": 0}, "data": [1]}',
        '{"metadata": {"gap_seconds": 60}, "data": []}',
        '{"metadata": {"gap_seconds": 60}, "data": [-1, 2]}',
        '{"metadata": {"gap_seconds": 60}, "data": [0.5, 2]}',
        '[{"Time": 120, "GPUs": 1}, {"Time": 0, "GPUs": 1}]',
        "0,add,a\n60000,rename,a\n",
        "a,b,c,d\n",
        "SpotPrice,Timestamp\n0,2016-04-25T12:00:00Z\n1,2016-04-25T13:00:00Z\n",
        "SpotPrice,Timestamp\n",
    ],
)
def test_other_files_are_refused_on_one_line(tmp_path, text):
    with pytest.raises(DataError) as caught:
        read_trace(written(tmp_path, "trace.csv", text))

    assert "\n" not in str(caught.value)


def test_damaged_gzip_and_missing_files_are_refused(tmp_path):
    broken = tmp_path / "broken.json.gz"
    broken.write_bytes(gzip.compress(b"[]")[:-6])

    for path in (broken, tmp_path / "absent.json"):
        with pytest.raises(DataError, match="cannot be read"):
            read_trace(path)


@pytest.mark.skipif(not (SHARED / "spot_traces").is_dir(), reason="the published traces are not at hand")
def test_every_published_trace_is_read():
    paths = [path for folder in ("spot_traces", "spot_prices") for path in (SHARED / folder).rglob("*.*")]

    traces = {path.name: read_trace(path) for path in paths if path.is_file()}
    lengths = {
        name: len(trace.instance_counts if trace.price_usd_per_hour is None else trace.price_usd_per_hour)
        for name, trace in traces.items()
    }

    assert len(lengths) > 40
    assert lengths["us-west-2a_k80_1.json.gz"] == 3895 * 600 // 60
    assert lengths["doc_aws-spot-instances-p2-xlarge-2020-11-20-to-2020-11-23.csv"] == int(88.695 * 60)
