import json
import shutil

import pytest

from flows.cli import main
from heterps_core.hardware import Market
from infra.prices.interruptions import read_counted, with_interruptions
from infra.workspace import Workspace
from tasks.prices import price_folder
from tests.infra.builders import offer


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERPS_HOME", str(tmp_path / "home"))


@pytest.fixture
def trace(tmp_path):
    """Two instances for an hour, one for an hour, none at the end: 2 interruptions in 3 hours."""
    path = tmp_path / "pool.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 3600}, "data": [2, 1, 0]}))
    return path


def answered(capsys, *arguments: object) -> tuple[int, str, str]:
    status = main(["interruptions", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_trace_is_counted_with_its_range(capsys, trace):
    same = shutil.copy(trace, trace.with_name("again.json"))

    status, out, _ = answered(capsys, trace, same)

    assert status == 0
    first, _, together = out.splitlines()
    assert first.startswith("pool.json: 0.667 per instance-hour (")
    assert together.startswith("together: 0.667")
    assert "4 in 6 instance-hours" in together


def test_what_is_kept_is_planned_with_for_the_narrowest_pool(capsys, trace):
    assert answered(capsys, trace, "--use-for", "aws/c7i.large")[0] == 0

    counted = read_counted(price_folder(Workspace.locate()))
    hit, miss, on_demand = with_interruptions(
        [offer(market=Market.SPOT), offer("m7i.large", market=Market.SPOT), offer()], counted
    )

    assert hit.interruptions_per_hour == pytest.approx(2 / 3)
    assert hit.interruptions_source == "counted in pool.json"
    assert miss.interruptions_source.startswith("assumed")
    assert on_demand.interruptions_per_hour == 0.0


@pytest.mark.parametrize("pool", ["g4dn.xlarge", "aws//us-east-1a", "aws/g4dn/a/b", "aws/"])
def test_a_pool_of_another_form_is_refused(capsys, trace, pool):
    status, _, error = answered(capsys, trace, "--use-for", pool)

    assert status == 2
    assert "a pool must be written as" in error


def test_a_damaged_file_is_named(capsys, trace):
    folder = price_folder(Workspace.locate())
    folder.mkdir(parents=True)
    (folder / "interruptions.json").write_text("[1]")

    status, _, error = answered(capsys, trace, "--use-for", "aws/c7i")

    assert status == 2
    assert "remove the file to plan with assumed ones" in error
