import pytest

from flows.cli import main
from heterps_core.machine import num_cores
from infra.inventory import inventory_path, read_inventory, read_reserved
from infra.workspace import HOME_VARIABLE, Workspace

SLURM = """
[[machines]]
kind = "epyc-32"
home = "slurm"
count = 4
cores = 32
memory_gb = 128
price_usd_per_hour = 3.2
"""
RESERVED = """
[[reserved]]
instance_type = "c7i.4xlarge"
region = "us-east-1"
count = 3
"""


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    return Workspace(root=tmp_path)


def test_it_writes_this_machine_beside_those_of_other_homes_and_reserved_ones(workspace, capsys):
    inventory_path(workspace).write_text(RESERVED + SLURM)

    assert main(["inventory", "--usd-per-hour", "0.5"]) == 0
    assert main(["inventory", "--usd-per-hour", "0.5"]) == 0

    others, here = read_inventory(workspace)
    assert (others.kind, others.count, others.price_usd_per_hour) == ("epyc-32", 4, 3.2)
    assert (here.kind, here.cores, here.price_usd_per_hour) == ("here", num_cores(), 0.5)
    assert [(each.instance_type, each.count) for each in read_reserved(workspace)] == [("c7i.4xlarge", 3)]
    assert "at 0.5 USD/hour; plans name cpu-here" in capsys.readouterr().out


def test_it_only_prints_the_file_where_that_is_asked_for(workspace, capsys):
    assert main(["inventory", "--print"]) == 0

    assert not inventory_path(workspace).exists()
    inventory_path(workspace).write_text(capsys.readouterr().out)
    assert [kind.kind for kind in read_inventory(workspace)] == ["here"]


def test_a_price_below_zero_is_refused_in_one_line(workspace, capsys):
    assert main(["inventory", "--usd-per-hour", "-1"]) == 2

    assert "price_usd_per_hour: must not be negative, got -1.0" in capsys.readouterr().err
    assert not inventory_path(workspace).exists()


def test_doctor_names_the_machines_here_and_their_price(workspace, capsys):
    main(["doctor", "--provider", "here"])

    assert "1 x here at 0 USD/hour" in capsys.readouterr().out
