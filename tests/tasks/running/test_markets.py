from dataclasses import replace
from datetime import UTC, datetime

import pytest

from heterps_core.errors import ConfigurationError
from heterps_core.hardware import Market
from infra.ledger.ledger import EndReason, Ledger
from infra.workspace import Workspace
from tasks.provisioning import check_markets
from tasks.running.losses import device_types_to_buy, num_spot_losses
from tests.infra.builders import offer, plan

NOW = datetime.now(UTC)
BOTH = ["on-demand", "spot"]


@pytest.fixture
def workspace(tmp_path):
    return Workspace(root=tmp_path).create()


def lose(workspace, launch_id, market, *, reason=EndReason.GONE):
    ledger = Ledger(workspace.ledger_path)
    [request] = plan(replace(offer(market=market))).node_requests()
    ledger.intend(launch_id, "aws", request, at=NOW)
    ledger.launched(launch_id, request.node_id, provider_instance_id=launch_id, at=NOW)
    ledger.ended(launch_id, request.node_id, reason=reason, at=NOW)


def test_only_spot_machines_that_went_by_themselves_are_losses(workspace):
    lose(workspace, "run-1", Market.SPOT)
    lose(workspace, "run-1.2", Market.ON_DEMAND)
    lose(workspace, "run-1.3", Market.SPOT, reason=EndReason.RUN_ENDED)
    lose(workspace, "run-2", Market.SPOT)

    assert num_spot_losses(workspace, "run-1") == 1


def test_a_run_that_lost_spot_twice_goes_on_without_it(workspace, caplog):
    assert device_types_to_buy(workspace, ["cpu-c7i"], BOTH, run_id="run-1") == ["cpu-c7i", "cpu-c7i-spot"]
    lose(workspace, "run-1", Market.SPOT)
    assert device_types_to_buy(workspace, ["cpu-c7i"], BOTH, run_id="run-1") == ["cpu-c7i", "cpu-c7i-spot"]
    lose(workspace, "run-1.2", Market.SPOT)

    assert device_types_to_buy(workspace, ["cpu-c7i"], BOTH, run_id="run-1") == ["cpu-c7i"]
    assert "run run-1 has lost 2 spot instances" in caplog.text
    assert device_types_to_buy(workspace, ["cpu-c7i"], ["spot"], run_id="run-2") == ["cpu-c7i-spot"]


def test_what_cannot_be_bought_is_refused():
    check_markets(provider="local", region="us-east-1")
    check_markets(provider="local", region="eu-west-1")

    with pytest.raises(ConfigurationError, match="rents in us-east-1"):
        check_markets(provider="aws", region="eu-west-1")
