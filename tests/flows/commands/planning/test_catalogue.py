import argparse
import gzip
import re

import pytest

from flows.cli import main
from flows.commands.planning.catalogue import add_arguments, run
from heterps_core.errors import UnknownNameError
from infra.prices.price_catalogue import BUNDLED_SNAPSHOT


def shown(capsys, *arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    run(parser.parse_args(arguments))
    return capsys.readouterr().out.splitlines()


def test_each_device_type_has_the_price_of_a_unit_of_its_memory_and_of_its_speed(workspace, capsys):
    first, heading, *rows = shown(capsys, "gpu-t4*", "cpu-c8g")

    assert re.match(r"3 device types, prices \d+ days old in us-east-1", first)
    assert heading.split("  ")[1] == "device type"
    # g4dn.xlarge costs 0.526 USD/hour, and has a card of 16 GiB and 8.1 TFLOP/s; c8g.medium has one core.
    assert [row.split() for row in rows] == [
        ["cpu-c8g", "0.0399", "2.0", "0.0199", "0.086", "0.462", "0.173", "5.6", "0.26", "-", "-", "c8g"],
        ["gpu-t4", "0.5260", "16.0", "0.0329", "8.100", "0.065", "-", "320.0", "5.00", "-", "-", "g4dn"],
        [
            "gpu-t4-20gbit",
            "1.2040",
            "16.0",
            "0.0752",
            "8.100",
            "0.149",
            "-",
            "320.0",
            "20.00",
            "-",
            "-",
            "g4dn",
        ],
    ]


def test_a_core_of_a_machine_with_disks_of_its_own_shows_its_share_of_them(workspace, capsys):
    _, _, row = shown(capsys, "cpu-i7i")

    # i7i.large has one core and 468 GB.
    assert row.split()[-3:] == ["468", "485", "i7i"]


def test_a_disk_speed_that_is_a_sibling_s_is_reported_as_that(workspace, capsys):
    assert shown(capsys, "cpu-c6id")[-1].startswith("disk MB/s of c6id: the siblings m6id and m7gd")
    assert not any("sibling" in line for line in shown(capsys, "cpu-i7i"))


def test_every_left_out_family_has_its_reason(workspace, capsys):
    text = " ".join(" ".join(shown(capsys)).split())

    assert "121 instance families carry them; 68 are left out:" in text
    for family, reason in {"f2": "FPGA", "trn1": "no torch build", "t3": "burstable", "m4": "Xen"}.items():
        assert re.search(rf"{reason}[^:]*: [^:]*\b{family}\b", text), family


def test_an_unknown_device_type_is_refused(workspace):
    with pytest.raises(UnknownNameError, match="Did you mean 'gpu-t4'"):
        run(argparse.Namespace(device_types=["gpu-t5"], region="us-east-1"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--region", "eu-west-1"], "'eu-west-1' is not a known region with prices; known are: us-east-1."),
        (
            [],
            "line 2: a row of prices must be as refresh-prices writes it, got KeyError: 'vcpus'; remove the file",
        ),
    ],
    ids=["region without prices", "price file without a column"],
)
def test_prices_that_cannot_be_read_are_one_line_with_the_way_out(workspace, capsys, arguments, message):
    if not arguments:
        text = gzip.decompress(BUNDLED_SNAPSHOT.path.read_bytes()).decode().replace("vcpus", "cores", 1)
        folder = workspace.root / "prices"
        folder.mkdir()
        (folder / "prices_2026-11-01T000000.000000Z.csv.gz").write_bytes(gzip.compress(text.encode()))

    assert main(["catalogue", *arguments]) == 2

    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
