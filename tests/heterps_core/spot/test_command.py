from __future__ import annotations

import json

import pytest

from flows.cli import main


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "zone_v100_1.json"
    # Up for four hours, down for two, for ten days.
    path.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": ([1] * 24 + [0] * 12) * 40}))
    return path


def test_replays_a_trace_and_says_what_each_policy_costs(trace, tmp_path, capsys):
    output = tmp_path / "figures.json"

    status = main(
        ["replay", str(trace), "--work-hours", "2", "--hours-between", "7", "--output", str(output)]
    )

    figures = json.loads(output.read_text())
    policies = figures["policies"]
    assert status == 0
    assert "expected-cost costs" in capsys.readouterr().out
    # 10 days hold 34 ends of nights of 3 hours, 7 hours apart.
    assert figures["num_nights"] == 34
    assert policies["on-demand"]["cost_over_on_demand"] == pytest.approx(1.0)
    assert policies["expected-cost"]["share_missed"] == 0
    assert 1 <= policies["expected-cost"]["cost_over_clairvoyant"] < 1 / figures["bound_over_on_demand"]


def test_pools_together_are_never_dearer_in_hindsight(trace, tmp_path):
    bounds = []
    for extra in ([], [str(trace), "--together"]):
        output = tmp_path / "figures.json"
        assert main(["replay", str(trace), *extra, "--work-hours", "2", "--output", str(output)]) == 0
        bounds.append(json.loads(output.read_text())["bound_over_on_demand"])

    assert bounds[1] == pytest.approx(bounds[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slack", "1.01"], "allow more time"),
        (["--slack", "nan"], "slack must be positive"),
        (["--work-hours", "0"], "work_hours must be positive"),
        (["--startup-seconds", "inf"], "startup_seconds"),
        (["--instances", "0"], "number of instances must be positive"),
        (["--on-demand-usd", "-1"], "on-demand price must be positive"),
        (["--hours-between", "0"], "--hours-between must be"),
        (["--seed", "-1"], "--seed must not be negative"),
        (["--work-hours", "900"], "no trace holds a whole night"),
    ],
)
def test_arguments_that_cannot_be_used_end_as_one_line(trace, capsys, arguments, message):
    status = main(["replay", str(trace), *arguments])

    error = capsys.readouterr().err
    assert status == 2
    assert message in error
    assert error.count("\n") == 1
