import json

import pytest

from flows.cli import main

CATALOGUE = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,SpotPrice,Region,AvailabilityZone
c3-standard-4,,,4,16,0.2,0.03,us-central1,us-central1-a
c3-standard-8,,,8,32,0.3,,us-central1,us-central1-a
c3-standard-4,,,4,16,0.5,,europe-west4,europe-west4-b
"""


def answered(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main(["offers", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))


@pytest.fixture
def catalogue(tmp_path):
    path = tmp_path / "gcp_vms_2026-05-20.csv"
    path.write_text(CATALOGUE)
    return str(path)


def test_bundled_prices_are_shown_with_their_age(capsys):
    status, out, _ = answered(capsys, "--device-types", "gpu-t4", "--limit", "1")

    assert status == 0
    header, first, more, age = out.splitlines()
    assert header.split()[:3] == ["device", "type", "instance"]
    assert first.split()[:7] == ["gpu-t4", "g4dn.xlarge", "1", "aws", "us-east-1", "0.5260", "0.5260"]
    assert more.split()[1] == "more:"
    assert "days old: aws/karpenter-provider-aws" in age


def test_another_clouds_catalogue_is_sorted_by_the_price_of_a_unit(capsys, catalogue):
    status, out, _ = answered(capsys, "--catalogue", catalogue, "--region", "us-central1", "--json")

    # By hand: 0.3 for 4 cores, 0.2 for 2, and 0.03 for 2 on spot.
    assert status == 0
    assert [
        (row["device_type"], row["instance_type"]["name"], row["units"], row["cloud"])
        for row in json.loads(out)
    ] == [
        ("cpu-c3", "c3-standard-8", 4, "gcp"),
        ("cpu-c3", "c3-standard-4", 2, "gcp"),
        ("cpu-c3-spot", "c3-standard-4", 2, "gcp"),
    ]


def test_nothing_sold_is_said(capsys, catalogue):
    assert answered(capsys, "--catalogue", catalogue, "--device-types", "gpu-t4")[1].startswith(
        "nothing is sold"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--region", "mars"], "'mars' is not a known region with prices"),
        (["--device-types", "gpu-t5"], "Did you mean 'gpu-t4'"),
        (["--catalogue", "none.csv"], "none.csv cannot be read"),
    ],
)
def test_a_wrong_name_is_one_line(capsys, arguments, complaint):
    status, _, error = answered(capsys, *arguments)

    assert status == 2
    assert complaint in error
    assert len(error.splitlines()) == 1
